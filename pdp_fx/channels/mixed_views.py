"""Views that spread channels over axes whose sizes follow something else, such as pixels.

``tokens.reshape(b, c, h, w)`` of tokens (b, h * w, c) that were not transposed back is a legal view. On
images of 2 x 2 pixels each row of the result has channels of its own, on other images it has others, so no
model that has lost channels can mix them in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pdp_fx.channels.labels import compress
from pdp_fx.channels.record import Labelled, Record
from pdp_fx.tracing.functions import NUMBER_HOMES
from pdp_fx.weights.sources import asks_size

Shape = tuple[int, ...]
Atoms = frozenset[int]
"""Pieces of axes that are whole in a tensor and in its view, by the number of elements behind each piece."""


def mixed_axes(given: tuple[Any, ...], value: Labelled, record: Record) -> frozenset[int]:
    """The axes of a tensor whose channels a view lays out along axes that other sizes decide.

    Args:
        given: the sizes that the view is given, one for each axis of its result: numbers, nodes, one -1.
        value: the tensor.
        record: what is known of the nodes before the view.
    """
    layers = [layer for layer in value.layers if layer.support and not layer.free]
    sizes = _completed(tuple(_number(size, record) for size in given), value.shape)
    if not layers or sizes is None or all(isinstance(size, int) and size > 0 for size in given):
        return frozenset()
    cuts = sorted({*_cuts(value.shape), *_cuts(sizes)})
    aligned = all(outer % inner == 0 for inner, outer in pairwise(cuts))
    cuts = cuts if aligned else _cuts(sizes)
    spread = [_changes(layer.ids.expand(value.shape), cuts) for layer in layers]
    view = _View(given, sizes, value.shape, cuts, frozenset[int]().union(*spread), record)
    mixed = [atoms for atoms in map(view.atoms, view.following) if not aligned or atoms <= view.labelled]
    found = [
        layer.support for layer, along in zip(layers, spread, strict=True) if any(a & along for a in mixed)
    ]
    return frozenset[int]().union(*found)


@dataclass(frozen=True)
class _View:
    """A view of a tensor with channels.

    Attributes:
        given: the sizes that it is given.
        sizes: the same as numbers.
        shape: the shape of the tensor.
        cuts: the number of elements behind each atom, the innermost atom first, and of all elements.
        labelled: the atoms along which channels change.
        record: what is known of the nodes before the view.
    """

    given: tuple[Any, ...]
    sizes: Shape
    shape: Shape
    cuts: list[int]
    labelled: Atoms
    record: Record

    def atoms(self, axis: int) -> Atoms:
        """What makes up an axis of the result."""
        inner = math.prod(self.sizes[axis + 1 :])
        return frozenset(cut for cut in self.cuts if inner <= cut < inner * self.sizes[axis])

    @cached_property
    def following(self) -> list[int]:
        """The axes of the result whose sizes follow others than that of an axis of one index, as a batch."""
        return [axis for axis in range(len(self.given)) if self._follows(axis) and not self._grows(axis)]

    def _is_varying(self, axis: int) -> bool:
        return getattr(self.given[axis], "name", "") in self.record.varying

    def _follows(self, axis: int) -> bool:
        """Whether the size may differ at the next call, as that of a -1 if no other makes up for pixels."""
        if self.given[axis] != -1:
            return self._is_varying(axis)
        inner = math.prod(self.sizes[axis + 1 :])
        common = sorted(set(_cuts(self.shape)) & set(_cuts(self.sizes)))
        start = max(cut for cut in common if cut <= inner)
        end = min(cut for cut in common if cut >= inner * self.sizes[axis])
        others = [at for at in range(len(self.sizes)) if start <= math.prod(self.sizes[at + 1 :]) < end]
        free = [cut for cut in self.cuts if start <= cut < end and cut not in self.labelled]
        return bool(free) and not any(map(self._is_varying, others))

    def _grows(self, axis: int) -> bool:
        """Whether the size would be larger if all axes of one index had two."""
        grown = [_grown(size, self.record) for size in self.given if size != -1]
        if self.given[axis] != -1:
            return _grown(self.given[axis], self.record) > self.sizes[axis]
        whole = math.prod(2 if size == 1 else size for size in self.shape)
        return whole > self.sizes[axis] * math.prod(grown)


def _number(size: Any, record: Record) -> Any:
    return record.numbers.get(size.name) if isinstance(size, fx.Node) else size


def _completed(sizes: tuple[Any, ...], shape: Shape) -> Shape | None:
    """The sizes with the number that -1 stands for; None if they are not all known."""
    if not all(isinstance(size, int) for size in sizes) or 0 in shape:
        return None
    rest = math.prod(shape) // abs(math.prod(sizes))
    return tuple(rest if size == -1 else size for size in sizes)


def _cuts(shape: Shape) -> list[int]:
    """How many elements lie behind each place between two axes, the innermost place first."""
    return list(accumulate(reversed(shape), lambda inner, size: inner * size, initial=1))


def _changes(labels: Tensor, cuts: list[int]) -> Atoms:
    """The atoms along which labels change."""
    shape = [outer // inner for inner, outer in pairwise(cuts)]
    laid_out = labels.reshape(shape[::-1])
    ids, _ = compress(laid_out, laid_out)
    return frozenset(cut for cut, size in zip(cuts, reversed(ids.shape), strict=False) if size > 1)


def _grown(size: Any, record: Record) -> Any:
    """The value of a size if all axes of one index had two."""
    if not isinstance(size, fx.Node):
        return size
    if asks_size(size):
        return map_aggregate(record.numbers[size.name], lambda number: 2 if number == 1 else number)
    function: Any = size.target
    if size.op != "call_function" or getattr(function, "__module__", "") not in NUMBER_HOMES:
        return record.numbers.get(size.name)
    args, kwargs = map_aggregate((size.args, size.kwargs), lambda leaf: _grown(leaf, record))
    return function(*args, **kwargs)
