"""Views that spread channels over axes whose sizes follow something else, such as pixels.

``tokens.reshape(b, c, h, w)`` of tokens (b, h * w, c) that were not transposed back is a legal view. On
images of 2 x 2 pixels each row of the result has channels of its own, on other images it has others, so no
model that has lost channels can mix them in the same way.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, takewhile
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate, map_arg

from pdp_fx.channels.labels import Layer, compress
from pdp_fx.channels.lone_axes import lone_axes
from pdp_fx.channels.record import Labelled, Record
from pdp_fx.tracing.functions import NUMBER_HOMES
from pdp_fx.weights.sources import asks_size

Shape = tuple[int, ...]
Atoms = frozenset[int]
"""Pieces of axes that are whole in a tensor and in its view, by the number of elements behind each piece."""


def mixed_axes(given: tuple[Any, ...], source: fx.Node, value: Labelled, record: Record) -> frozenset[int]:
    """The axes of a tensor whose channels a view lays out along axes that other sizes decide.

    Args:
        given: the sizes that the view is given, one for each axis of its result: numbers, nodes, one -1.
        source: the node that the tensor comes from.
        value: the tensor.
        record: what is known of the nodes before the view.
    """
    layers = [layer for layer in value.layers if layer.support and not layer.free]
    lone = lone_axes(source, record)
    may_grow = [axis for axis, size in enumerate(value.shape) if size == 1 and axis not in lone]
    laid_out = _laid_out(given, value.shape, may_grow, record)
    if not layers or laid_out is None or all(isinstance(size, int) and size > 0 for size in given):
        return frozenset()
    shape, sizes = laid_out
    cuts = sorted({*_cuts(shape), *_cuts(sizes)})
    aligned = all(outer % inner == 0 for inner, outer in pairwise(cuts))
    cuts = cuts if aligned else _cuts(sizes)
    spread = [_changes(layer, shape, cuts, aligned) for layer in layers]
    labelled = frozenset[int]().union(*spread)
    view = _View(given, sizes, shape, cuts, aligned, labelled, _kept(given, source, len(shape)), record)
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
        aligned: whether the atoms are whole in the tensor; if not, they are only in its view.
        labelled: the atoms along which channels change.
        kept: the axes that are those of the tensor, whatever their sizes.
        record: what is known of the nodes before the view.
    """

    given: tuple[Any, ...]
    sizes: Shape
    shape: Shape
    cuts: list[int]
    aligned: bool
    labelled: Atoms
    kept: frozenset[int]
    record: Record

    def atoms(self, axis: int) -> Atoms:
        """What makes up an axis of the result."""
        inner = math.prod(self.sizes[axis + 1 :])
        return frozenset(cut for cut in self.cuts if inner <= cut < inner * self.sizes[axis])

    @property
    def following(self) -> list[int]:
        """The axes of the result whose sizes may differ at the next call.

        If only that of an axis of one index makes them differ, their channels are those of one batch.
        """
        axes = (axis for axis in range(len(self.given)) if axis not in self.kept)
        return [axis for axis in axes if self._follows(axis) and not self._grows(axis)]

    def _grows(self, axis: int) -> bool:
        return _grown(self.given[axis], self.record) > self.sizes[axis]

    def _is_varying(self, axis: int) -> bool:
        return getattr(self.given[axis], "name", "") in self.record.varying

    def _follows(self, axis: int) -> bool:
        """Whether a size may differ, as that of a -1 where no other size of its part follows the pixels.

        Where axes end in the middle of others, a -1 need not stand for what is left of pixels.
        A -1 that stands for all channels of its part is written out (`written_sizes`).
        """
        if self.given[axis] != -1:
            return self._is_varying(axis)
        inner = math.prod(self.sizes[axis + 1 :])
        common = sorted(set(_cuts(self.shape)) & set(_cuts(self.sizes)))
        start = max(cut for cut in common if cut <= inner)
        end = min(cut for cut in common if cut >= inner * self.sizes[axis])
        part = frozenset(cut for cut in self.cuts if start <= cut < end)
        others = [at for at in range(len(self.sizes)) if start <= math.prod(self.sizes[at + 1 :]) < end]
        if part <= self.labelled or part & self.labelled <= self.atoms(axis):
            return False
        return not self.aligned or not any(map(self._is_varying, others))


def _kept(given: tuple[Any, ...], source: fx.Node, rank: int) -> frozenset[int]:
    """The first and last axes of a view that are given the sizes of the first and last of its input."""

    def is_size_of(size: Any, axis: int) -> bool:
        asked = size.args[1:] if isinstance(size, fx.Node) and size.target == "size" else ()
        return len(asked) == 1 and size.args[0] is source and asked[0] in (axis, axis - rank)

    first = takewhile(lambda axis: is_size_of(given[axis], axis), range(min(len(given), rank)))
    back = takewhile(lambda i: is_size_of(given[-i], rank - i), range(1, min(len(given), rank) + 1))
    return frozenset(first) | {len(given) - i for i in back}


def _laid_out(
    given: tuple[Any, ...], shape: Shape, ones: list[int], record: Record
) -> tuple[Shape, Shape] | None:
    """The shapes of a tensor and of its view if as many of ``ones``, as a batch, as possible had two indices.

    None if they are not known.
    """
    sizes = tuple(_grown(size, record) for size in given)
    now = _completed(tuple(_number(size, record) for size in given), shape)
    if now is None:
        return None
    for count in range(len(ones), 0, -1):
        for wider in combinations(ones, count):
            grown = tuple(2 if axis in wider else size for axis, size in enumerate(shape))
            completed = _completed(sizes, grown)
            if completed is not None and all(map(operator.ge, completed, now)):
                return grown, completed
    return shape, now


def _number(size: Any, record: Record) -> Any:
    return record.numbers.get(size.name) if isinstance(size, fx.Node) else size


def _completed(sizes: tuple[Any, ...], shape: Shape) -> Shape | None:
    """The sizes with the number that -1 stands for; None if they do not make up the shape."""
    if not all(isinstance(size, int) and size for size in sizes) or 0 in shape:
        return None
    whole, rest = math.prod(shape), abs(math.prod(sizes))
    if whole % rest or (-1 not in sizes and whole != rest):
        return None
    return tuple(whole // rest if size == -1 else size for size in sizes)


def _cuts(shape: Shape) -> list[int]:
    """How many elements lie behind each place between two axes, the innermost place first."""
    return list(accumulate(reversed(shape), lambda inner, size: inner * size, initial=1))


def _changes(layer: Layer, shape: Shape, cuts: list[int], aligned: bool) -> Atoms:
    """The atoms along which labels change; those whole in ``shape`` are looked for along its axes that do."""
    behind = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    along = [range(behind[axis], behind[axis] * shape[axis]) for axis in layer.support]
    atoms = [atom for atom in pairwise(cuts) if not aligned or any(atom[0] in axis for axis in along)]
    labels = layer.ids if aligned else layer.ids.expand(shape)
    laid_out = labels.reshape([outer // inner for inner, outer in reversed(atoms)])
    ids, _ = compress(laid_out, laid_out)
    return frozenset(inner for (inner, _), size in zip(atoms, reversed(ids.shape), strict=True) if size > 1)


def _grown(size: Any, record: Record) -> Any:
    """The value of a size if all axes of one index had two."""
    if not isinstance(size, fx.Node):
        return size
    if asks_size(size):
        return map_aggregate(record.numbers[size.name], lambda number: 2 if number == 1 else number)
    function: Any = size.target
    if size.op != "call_function" or getattr(function, "__module__", "") not in NUMBER_HOMES:
        return record.numbers.get(size.name)
    grown = {source: _grown(source, record) for source in size.all_input_nodes}
    if any(value is None for value in grown.values()):
        # It is not made of sizes alone, such as whether the model is in training mode.
        return record.numbers.get(size.name)
    args, kwargs = map_arg((size.args, size.kwargs), grown.__getitem__)
    return function(*args, **kwargs)
