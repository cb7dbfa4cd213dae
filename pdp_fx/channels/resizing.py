"""The data that `rewrites` works on: what stays of the tensors around a node (`Kept`), and the `Job`."""

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
    """A tensor before channels are removed, and which of its indices will stay.

    Attributes:
        value: its shape and labels.
        stays: for each axis with channels, which of its indices stay, as booleans.
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
        results: the tensors that it returns.
        numbers: the old value of every node that returned a number, by the node's name.
        changing: the names of those nodes whose number depends on how many channels there are.
        small: returns the new value of such a node, or None if it is not known.
    """

    source: Kept
    results: tuple[Kept, ...]
    numbers: dict[str, Any]
    changing: frozenset[str]
    small: Callable[[fx.Node], Any]

    def number(self, value: Any) -> Any:
        """The old value of an argument: of a node, the number that it returned."""
        return self.numbers[value.name] if isinstance(value, fx.Node) else value

    def told(self, node: fx.Node) -> bool:
        """Whether a number among the arguments of ``node`` will change, of its own or of other channels."""
        return any(source.name in self.changing for source in node.all_input_nodes)

    def resized(self, kept: Kept, axis: int, given: Any) -> Any:
        """The new argument for the size of ``axis``, in the place of ``given``, a number or a node."""
        if isinstance(given, fx.Node):
            if given.name in self.changing:
                return self.mended(given, kept.size(axis))
            return scaled(given, kept.size(axis), kept.value.shape[axis]) if kept.changes(axis) else given
        return kept.size(axis) if given != -1 and kept.changes(axis) else given

    def mended(self, number: fx.Node, size: int) -> Any:
        """A number or node with the value ``size``, in the place of ``number``, whose value may be another.

        If possible the result is computed from ``number``, which may also follow the size of the batch.
        """
        now = self.small(number)
        if now == size:
            return number
        if number.target is operator.floordiv and isinstance(whole := number.args[0], fx.Node):
            # An axis that merges batch and heads, divided by the old number of heads, may have become 0.
            there, by = self.small(whole), number.args[1]
            divisor = self.small(by) if isinstance(by, fx.Node) else None
            if there and there % size == 0:
                # The old divisor may also follow the size of an image.
                fewer = scaled(by, there // size, divisor) if isinstance(by, fx.Node) and divisor else None
                return _after(number, operator.floordiv, whole, there // size if fewer is None else fewer)
        return scaled(number, size, now) if now else size


def scaled(number: fx.Node, new: int, old: int) -> fx.Node:
    """Nodes for number * new / old: an axis that merges channels with the batch keeps following the batch."""
    common = math.gcd(new, old)
    times = _after(number, operator.mul, number, new // common)
    return _after(times, operator.floordiv, times, old // common)


def _after(place: fx.Node, call: Callable[..., Any], number: fx.Node, other: int | fx.Node) -> fx.Node:
    """A node for ``call(number, other)`` after ``place``; ``number`` itself if the other operand is 1."""
    if other == 1:
        return number
    with place.graph.inserting_after(place):
        return place.graph.call_function(call, (number, other))


def placed_before(node: fx.Node, call: Any, *args: Any) -> fx.Node:
    """A node before ``node``, from the same place, that calls a method by its name or a function."""
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_method" if isinstance(call, str) else "call_function", call, args)
    made.meta = {name: told for name, told in node.meta.items() if name != "shape"}
    return made


def are_distinct(ids: Tensor) -> bool:
    """Whether no label occurs twice."""
    return len(ids.unique()) == ids.numel()


Apply = Callable[[fx.Node, Job], None]
Varies = Callable[[fx.Node, Record], frozenset[int]]
Fits = Callable[[fx.Node, Record], bool]


@dataclass(frozen=True)
class Rewrite:
    """How to resize the nodes of one function, method or module.

    Attributes:
        apply: changes the node's arguments.
        fits: whether ``apply`` can handle the node.
        varies: the axes of its first argument along which the next call may choose other channels.
    """

    apply: Apply
    fits: Fits = lambda node, record: True
    varies: Varies = lambda node, record: frozenset()
