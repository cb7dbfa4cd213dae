"""Chains of convolution, BatchNorm and ReLU, each twice as deep as the one before.

They compute next to nothing, so that the table shows how the time to compile grows with depth.
"""

from __future__ import annotations

from torch import nn

DEPTHS = {"chain_250": 250, "chain_500": 500, "chain_1000": 1000}
WIDTH = 8


def chain(depth: int) -> nn.Sequential:
    """A classifier of pictures, ``depth`` blocks deep and 8 channels wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
