"""What one row of the table of constructs says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Construct:
    """A tiny net that shows one thing, and what the channel compiler must make of it.

    Attributes:
        net: builds the net.
        inputs: example inputs for a batch size.
        removed: how many output channels, counted over all weights, must go at least at ratio 0.5
            under uniform allocation; 0 says that none can.
        reason: text that must be among the reasons why channels stay; empty when nothing need be said.
        batches: whether the net takes another batch size than the one it was traced with.
        through_norms: whether channels that a norm runs over may go too, with masked statistics.
    """

    net: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    removed: int = 0
    reason: str = ""
    batches: bool = True
    through_norms: bool = False

    @property
    def name(self) -> str:
        """The name of the net's class."""
        return getattr(self.net, "__name__", "net")


def images(channels: int = 3, size: int = 6) -> Callable[[int], Inputs]:
    """Square images."""
    return lambda batch: (torch.randn(batch, channels, size, size, dtype=torch.float64),)


def sequences(width: int = 6, length: int = 5) -> Callable[[int], Inputs]:
    """Sequences of vectors, (batch, length, width)."""
    return lambda batch: (torch.randn(batch, length, width, dtype=torch.float64),)


def signals(channels: int = 3, length: int = 8) -> Callable[[int], Inputs]:
    """Signals over time, (batch, channels, length)."""
    return lambda batch: (torch.randn(batch, channels, length, dtype=torch.float64),)


def volumes(channels: int = 2, size: int = 4) -> Callable[[int], Inputs]:
    """Cubes, (batch, channels, size, size, size)."""
    return lambda batch: (torch.randn(batch, channels, size, size, size, dtype=torch.float64),)


def vectors(width: int = 6) -> Callable[[int], Inputs]:
    """Vectors, (batch, width)."""
    return lambda batch: (torch.randn(batch, width, dtype=torch.float64),)


def words(vocabulary: int = 11, length: int = 5) -> Callable[[int], Inputs]:
    """Word numbers, (batch, length)."""
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def pairs(one: Callable[[int], Inputs], other: Callable[[int], Inputs]) -> Callable[[int], Inputs]:
    """Both inputs, side by side."""
    return lambda batch: (*one(batch), *other(batch))


def conv_bn(channels: int, out_channels: int, kernel_size: int = 3, **options: Any) -> nn.Sequential:
    """A convolution that keeps the size, and BatchNorm."""
    conv = nn.Conv2d(channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))
