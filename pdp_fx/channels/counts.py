"""Numbers that a graph computes from how many channels there are: what they were, and how they change.

A number may follow other sizes, too, such as that of an axis which merges a batch and heads. Every number
below is one of nodes, so that it holds for all sizes, and not that of the example.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.kept import Kept, placed_before, scaled
from pdp_fx.channels.labels import first_line, from_front
from pdp_fx.channels.record import Labelled, Record
from pdp_fx.tracing.functions import NUMBER_HOMES

JOINS = frozenset({"cat", "concat", "concatenate", "hstack"})
"""Functions that join tensors, which may be parts of one, along an axis."""

MERGES = frozenset(
    {"view", "reshape", "flatten", "view_as", "reshape_as", "repeat", "tile", "repeat_interleave"}
)
"""Functions and methods that may put axes together, or make copies of one as often as they are told."""


ARITHMETIC: frozenset[Any] = frozenset({
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.iadd, operator.isub,
    operator.imul, operator.itruediv, torch.add, torch.sub, torch.mul, torch.div, torch.pow, "add", "sub",
    "mul", "div", "pow", "add_", "sub_", "mul_", "div_", "pow_",
})  # fmt: skip
"""Functions and methods that compute element by element, also with a number such as that of channels."""


@dataclass(frozen=True)
class _Read:
    """What a node reads of a tensor: the sizes of axes, or the product of all.

    Attributes:
        source: the node that returned the tensor.
        value: the tensor's shape and labels.
        axes: the axes whose sizes are read, counted from the front.
        one: whether a single size was asked for.
    """

    source: fx.Node
    value: Labelled
    axes: tuple[int, ...]
    one: bool


def _read(node: fx.Node, values_of: Callable[[fx.Node], tuple[Labelled, ...] | None]) -> _Read | None:
    """What a node reads of the shape of a tensor, or None for another node."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    asked: Any = None
    if node.target == "size":
        asked = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    elif not _is_product(node) and not (node.target is getattr and node.args[1] == "shape"):
        return None
    value = _first(values_of(source))
    rank = len(value.shape)
    if asked is None:
        return _Read(source, value, tuple(range(rank)), one=False)
    return _Read(source, value, (from_front(asked, rank),), one=True) if isinstance(asked, int) else None


def _first(values: tuple[Labelled, ...] | None) -> Labelled:
    """The first tensor that a node returned; one without axes if it returned none."""
    return values[0] if values else Labelled((), ())


class Counts:
    """The numbers of a graph whose channels are being removed.

    Args:
        found: the channel structure, with the old results of all nodes.
        gone: for every class whether it is dropped.
        changing: the names of the nodes whose number depends on how many channels there are.
    """

    def __init__(self, found: ChannelMap, gone: np.ndarray, changing: frozenset[str]) -> None:
        self._found = found
        self._gone = gone
        self._changing = changing

    def told(self, node: fx.Node) -> list[fx.Node]:
        """The numbers among the arguments of ``node`` that depend on how many channels there are."""
        return [source for source in node.all_input_nodes if source.name in self._changing]

    def with_before(self, given: Any, place: fx.Node) -> Any:
        """Arguments with the numbers from before any channel was removed, which are computed at ``place``."""
        return map_arg(given, lambda source: self.before(source, place))

    def before(self, node: fx.Node, place: fx.Node) -> Any:
        """The number or sizes of ``node`` before any channel was removed.

        Args:
            node: any node.
            place: the node before which new nodes that compute it are inserted.
        """
        if node.name not in self._changing:
            return node
        read = _read(node, self._found.given)
        if read is not None:
            sizes = tuple(self._size_before(read, axis, place) for axis in read.axes)
            return sizes[0] if read.one else _product(sizes, place) if _is_product(node) else sizes
        if not is_arithmetic(node):
            return self._found.numbers[node.name]
        function: Any = node.target
        args = self.with_before(node.args, place)
        if not any(isinstance(leaf, fx.Node) for leaf in tree_leaves(args)) or isinstance(args[0], tuple):
            return function(*args)
        with place.graph.inserting_before(place):
            return place.graph.create_node("call_function", function, args)

    def _size_before(self, read: _Read, axis: int, place: fx.Node) -> Any:
        kept, size = self._found.kept(read.value, self._gone), read.value.shape[axis]
        if kept.changes(axis) and is_fixed(read.value, axis) and not self._found.alone:
            return size
        now = placed_before(place, "size", read.source, axis)
        return scaled(now, size, kept.size(axis)) if kept.changes(axis) else now

    def ratio(self, node: fx.Node) -> Fraction | None:
        """By how much a number changes, whatever sizes it follows besides; None if it is not known."""
        if node.name not in self._changing:
            return Fraction(1)
        read = _read(node, self._found.given)
        if read is not None:
            kept = self._found.kept(read.value, self._gone)
            known = read.one or _is_product(node)
            return _multiplied(_shrinkage(kept, axis) for axis in read.axes) if known else None
        if node.target is operator.floordiv and self._is_whole(*node.args):
            return self.ratio(node.args[0])  # pyright: ignore[reportArgumentType]
        ratios = [self.ratio(arg) if isinstance(arg, fx.Node) else Fraction(1) for arg in node.args]
        if node.target is operator.mul:
            return _multiplied(ratios)
        alike = len(ratios) == 2 and ratios[0] == ratios[1]
        if node.target in (operator.add, operator.sub):
            return ratios[0] if alike else None
        return Fraction(1) if alike and node.target in (operator.floordiv, operator.truediv) else None

    def _is_whole(self, number: Any, parts: Any) -> bool:
        """Whether the size of an axis of channels divides into so many parts, now and before."""
        read = _read(number, self._found.given) if isinstance(number, fx.Node) else None
        if read is None or not read.one or not isinstance(parts, int):
            return False
        (axis,), kept = read.axes, self._found.kept(read.value, self._gone)
        return is_fixed(read.value, axis) and read.value.shape[axis] % parts == kept.size(axis) % parts == 0


def recoverable(node: fx.Node, record: Record) -> bool:
    """Whether the number of ``node`` from before any channel is removed can be computed afterwards."""
    if node.name not in record.taint or not _varies(node, record):
        return True
    read = _read(node, record.values_of)
    if read is not None:
        return all(is_fixed(read.value, axis) or _is_even(read.value, axis) for axis in read.axes)
    return is_arithmetic(node) and all(recoverable(source, record) for source in node.all_input_nodes)


def _varies(node: fx.Node, record: Record) -> bool:
    return node.name in record.varying or node.name in record.free_axes


def is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes with numbers in Python."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in NUMBER_HOMES


def is_fixed(value: Labelled, axis: int) -> bool:
    """Whether an axis holds channels, each once, so that its size is the same at every call."""
    lines = [first_line(layer.ids, axis).numpy() for layer in value.layers if axis in layer.support]
    return any(len(np.unique(line)) == line.size for line in lines)


def has_fixed_size(node: fx.Node, axis: int, record: Record) -> bool:
    """Whether an axis of the tensor that ``node`` returns is as long at every call.

    It holds channels, each once, or it joins such axes, or it is such an axis of the tensor that it was made
    of by an operation which leaves axes alone, or cuts or copies them by the same numbers at every call. The
    other operands of arithmetic are as long there, or of one index.
    """
    place = node.name, axis
    if place not in record.fixed_sizes:
        record.fixed_sizes[place] = _has_fixed_size(node, axis, record)
    return record.fixed_sizes[place]


def _has_fixed_size(node: fx.Node, axis: int, record: Record) -> bool:
    value = _first(record.values_of(node))
    if is_fixed(value, axis):
        return True
    rank, sources = len(value.shape), [source for source in node.all_input_nodes if record.values_of(source)]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in JOINS:
        joined: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if joined in (axis, axis - rank):
            return all(has_fixed_size(source, axis, record) for source in sources)
    if len(sources) == 1 and _cuts_or_copies(node, record):
        return has_fixed_size(sources[0], axis, record)
    if name in MERGES:
        return False
    line = _line_along(value, axis)
    if line is None:
        return False
    for source in sources:
        given = _first(record.values_of(source))
        place = len(given.shape) + axis - rank
        theirs = _line_along(given, place) if place >= 0 else None
        alike = theirs is not None and np.array_equal(line, theirs)
        alike = alike or (node.target in ARITHMETIC and place >= 0 and given.shape[place] > 1)
        if alike and has_fixed_size(source, place, record):
            return True
    return False


def _cuts_or_copies(node: fx.Node, record: Record) -> bool:
    """Whether a node slices axes, or copies each index of one, by numbers that are the same at every call."""
    numbers = [given for given in node.all_input_nodes if not record.values_of(given)]
    if any(number.name not in record.numbers or _varies(number, record) for number in numbers):
        return False
    if node.target is operator.getitem:
        given: Any = node.args[1]
        places = given if isinstance(given, tuple) else (given,)
        return all(place is Ellipsis or isinstance(place, slice) for place in places)
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    return getattr(node.target, "__name__", node.target) == "repeat_interleave" and isinstance(dim, int)


def _line_along(value: Labelled, axis: int) -> np.ndarray | None:
    """The labels along an axis, or None if it has none or those of several layers."""
    lines = [first_line(layer.ids, axis).numpy() for layer in value.layers if axis in layer.support]
    return lines[0] if len(lines) == 1 else None


def _is_even(value: Labelled, axis: int) -> bool:
    """Whether all channels along an axis, if there are any, occur equally often."""
    lines = (first_line(layer.ids, axis).numpy() for layer in value.layers if axis in layer.support)
    return all(len(set(np.unique(line, return_counts=True)[1])) == 1 for line in lines)


def _is_product(node: fx.Node) -> bool:
    return node.target in ("numel", "nelement")


def _product(sizes: tuple[Any, ...], place: fx.Node) -> Any:
    product: Any = 1
    for size in sizes:
        known = isinstance(product, int) and isinstance(size, int)
        product = product * size if known else placed_before(place, operator.mul, size, product)
    return product


def _shrinkage(kept: Kept, axis: int) -> Fraction | None:
    if not kept.changes(axis):
        return Fraction(1)
    even = is_fixed(kept.value, axis) or _is_even(kept.value, axis)
    return Fraction(kept.size(axis), kept.value.shape[axis]) if even else None


def _multiplied(ratios: Any) -> Fraction | None:
    product = Fraction(1)
    for ratio in ratios:
        if ratio is None:
            return None
        product *= ratio
    return product
