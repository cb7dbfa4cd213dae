"""What a node that is told sizes has to know to be told new ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from pdp_fx.channels.record import Labelled, Record


@dataclass(frozen=True)
class Kept:
    """A tensor before channels go.

    Attributes:
        value: its shape and labels.
        stays: per axis with channels, which of its indices stay, as booleans.
    """

    value: Labelled
    stays: dict[int, np.ndarray]

    def size(self, axis: int) -> int:
        """The size of ``axis`` afterwards."""
        return int(self.stays[axis].sum()) if axis in self.stays else self.value.shape[axis]

    def changes(self, axis: int) -> bool:
        """Whether ``axis`` gets shorter."""
        return self.size(axis) != self.value.shape[axis]

    def before(self, axis: int, index: int) -> int:
        """How many of the indices below ``index`` stay."""
        return int(self.stays[axis][:index].sum()) if axis in self.stays else index

    def labels(self, axis: int) -> Tensor:
        """The labels that change along ``axis``, and perhaps along others."""
        return next(layer.ids for layer in self.value.layers if axis in layer.support)


@dataclass(frozen=True)
class Job:
    """One node to resize.

    Attributes:
        source: the first tensor that it reads; an empty one if there is none.
        results: the tensors that it gives.
        numbers: the value that every number node had.
        changing: the number nodes that depend on how many channels there are.
        small: the value that a number node will have, or None if that is not known.
    """

    source: Kept
    results: tuple[Kept, ...]
    numbers: dict[str, Any]
    changing: frozenset[str]
    small: Callable[[fx.Node], Any]

    def number(self, value: Any) -> Any:
        """The value of a number or of a node that gave one."""
        return self.numbers[value.name] if isinstance(value, fx.Node) else value

    def told(self, node: fx.Node) -> bool:
        """Whether a number that ``node`` is given will be another, be it of its own channels or of others."""
        return any(source.name in self.changing for source in node.all_input_nodes)

    def resized(self, kept: Kept, axis: int, given: Any) -> Any:
        """What to write for the size of ``axis`` where the program has ``given``."""
        if isinstance(given, fx.Node):
            if given.name in self.changing:
                return self.mended(given, kept.size(axis))
            return scaled(given, kept.size(axis), kept.value.shape[axis]) if kept.changes(axis) else given
        return kept.size(axis) if given != -1 and kept.changes(axis) else given

    def mended(self, number: fx.Node, size: int) -> Any:
        """What gives ``size`` where the number's own program may have been right for all channels only.

        A computation stays one if it can, for it may follow the size of the batch, too.
        """
        now = self.small(number)
        if now == size:
            return number
        if number.target is operator.floordiv and isinstance(whole := number.args[0], fx.Node):
            # Batch and heads in one, divided by the heads that there were, may have come to nothing.
            there, by = self.small(whole), number.args[1]
            divisor = self.small(by) if isinstance(by, fx.Node) else None
            if there and there % size == 0:
                # What it was divided by may follow the size of an image, too.
                fewer = scaled(by, there // size, divisor) if isinstance(by, fx.Node) and divisor else None
                return _after(number, operator.floordiv, whole, there // size if fewer is None else fewer)
        return scaled(number, size, now) if now else size


def scaled(number: fx.Node, new: int, old: int) -> fx.Node:
    """The number times new / old: an axis that merges channels with the batch keeps following the batch."""
    common = math.gcd(new, old)
    times = _after(number, operator.mul, number, new // common)
    return _after(times, operator.floordiv, times, old // common)


def _after(place: fx.Node, call: Callable[..., Any], number: fx.Node, other: int | fx.Node) -> fx.Node:
    """A new node behind ``place``, unless the other number is 1."""
    if other == 1:
        return number
    with place.graph.inserting_after(place):
        return place.graph.call_function(call, (number, other))


Apply = Callable[[fx.Node, Job], None]
Varies = Callable[[fx.Node, Record], frozenset[int]]
Fits = Callable[[fx.Node, Record], bool]


@dataclass(frozen=True)
class Rewrite:
    """A way to resize one function.

    Attributes:
        apply: changes the node's arguments.
        fits: whether ``apply`` can deal with this node.
        varies: along which axes of its first argument the next call may take others.
    """

    apply: Apply
    fits: Fits = lambda node, record: True
    varies: Varies = lambda node, record: frozenset()
