"""What the weights of a model look like at some moments of its training, small enough for a record."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn

from pdp_fx.demo.flips import mask_units
from pdp_fx.pruner import find

BINS = 61
SPAN = 4.0
"""How many root mean squares the bins reach to either side; what lies beyond is in the outermost ones."""


class WeightHistogram(TypedDict):
    """A histogram of the prunable units: weights with their signs, or scores of channels.

    Attributes:
        epoch: how many epochs were over.
        reach: the bins divide the range from -reach to reach.
        counts: of all units, bin by bin.
        left: of those that the hard masks leave; the same for a dense model.
    """

    epoch: int
    reach: float
    counts: list[int]
    left: list[int]


def noted(epochs: int) -> tuple[int, ...]:
    """After how many of the epochs the weights are looked at: each quarter of them.

    Example:
        >>> noted(16)
        (4, 8, 12, 16)
    """
    return tuple(sorted({max(round(part * epochs / 4), 1) for part in range(1, 5)}))


def histogram(model: nn.Module, epoch: int) -> WeightHistogram:
    """The histogram of a model as it is now; without masks, of its weights, but not of biases and norms."""
    if find(model) is None:
        values = torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1])
        pruned = torch.zeros_like(values, dtype=torch.bool)
    else:
        with torch.no_grad():
            units = mask_units(model)
        values, pruned = units.magnitudes, units.pruned
    # A training that has diverged shall come to its record all the same.
    values = values.double().nan_to_num(0.0, 0.0, 0.0)
    reach = SPAN * float(values.square().mean().sqrt()) or 1.0
    return {
        "epoch": epoch,
        "reach": float(f"{reach:.6g}"),
        "counts": _counts(values, reach),
        "left": _counts(values[~pruned], reach),
    }


def _counts(values: Tensor, reach: float) -> list[int]:
    return torch.histc(values.clamp(-reach, reach).cpu(), BINS, -reach, reach).int().tolist()
