"""Random programs that lay channels out anew by the sizes of their input, whatever that does to them.

A program is a tuple of steps between two layers. "b", "c", "h" and "w" are the sizes of the tensor that the
first layer gives; each view takes every one of them once, so it is legal for all inputs:

    LayoutNet((View((("b",), ("h", "w"), ("c",))), Permute((0, 2, 1))), 6)
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.channels.construct import conv_bn

Part = tuple[str, ...]
NAMES = ("b", "c", "h", "w")


@dataclass(frozen=True)
class View:
    """A reshape; each part is a product of sizes.

    Attributes:
        parts: the names of the sizes behind each axis.
        left_out: the axis that is given as -1, or None.
    """

    parts: tuple[Part, ...]
    left_out: int | None = None

    def of(self, x: Tensor, sizes: dict[str, int]) -> Tensor:
        given = [prod(sizes[name] for name in part) for part in self.parts]
        if self.left_out is not None:
            given[self.left_out] = -1
        return x.reshape(given)


@dataclass(frozen=True)
class Permute:
    """A permutation of the axes."""

    order: tuple[int, ...]

    def of(self, x: Tensor, sizes: dict[str, int]) -> Tensor:
        return x.permute(self.order)


class LayoutNet(nn.Module):
    """Runs its steps between a convolution and a linear layer, which reads the axis of length "c".

    Args:
        steps: what to do to the channels.
        channels: how many there are.
        written: the names of the sizes that views are given as numbers, for nets that take one size only.
    """

    def __init__(self, steps: tuple[View | Permute, ...], channels: int, written: str | None = None) -> None:
        super().__init__()
        self.channels, self.written, self.size = channels, written, (0, 0)
        self.steps = steps
        self.stem, self.mid, self.head = conv_bn(3, channels, 1), nn.Linear(channels, 8), nn.Linear(8, 3)
        self.axis = next(view for view in reversed(steps) if isinstance(view, View)).parts.index(("c",))

    def take_only(self, height: int, width: int) -> None:
        """Refuse images of any other size from now on, unless views read all sizes off their input."""
        if self.written is not None:
            self.size, self.places = (height, width), nn.Parameter(torch.randn(3, height, width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x if self.written is None else x + self.places))
        sizes = dict(zip("bchw", x.shape, strict=True))
        numbers = dict(zip("chw", (self.channels, *self.size), strict=True))
        for step in self.steps:
            x = step.of(x, sizes | {name: numbers[name] for name in self.written or ""})
        return self.head(torch.relu(self.mid(x.movedim(self.axis, -1))))


@st.composite
def random_layouts(draw: Callable[[Any], Any]) -> LayoutNet:
    """Nets of up to two permutations and views, and a last view in which the channels have an axis."""
    steps: list[View | Permute] = []
    rank = len(NAMES)
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.booleans()):
            steps.append(Permute(tuple(draw(st.permutations(range(rank))))))
        else:
            parts = _parts(draw, NAMES)
            steps.append(View(parts, draw(st.sampled_from((None, *range(len(parts)))))))
            rank = len(parts)
    others = _parts(draw, tuple(name for name in NAMES if name != "c"))
    place = draw(st.integers(0, len(others)))
    last = (*others[:place], ("c",), *others[place:])
    steps.append(View(last, draw(st.sampled_from((None, *range(len(last)))))))
    written = draw(st.sampled_from((None, "", "chw", "hw")))
    return LayoutNet(tuple(steps), draw(st.sampled_from((4, 6))), written)


def _parts(draw: Callable[[Any], Any], names: tuple[str, ...]) -> tuple[Part, ...]:
    """All names in any order, cut into two or more parts."""
    order = tuple(draw(st.permutations(names)))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), min_size=1)))
    return tuple(order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True))
