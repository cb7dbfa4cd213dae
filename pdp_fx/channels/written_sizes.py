"""Refusing other sizes where the model writes sizes or positions out that hold for the example's only.

In ``x.view(b, -1, 36)`` the -1 is the number of channels as long as an image has 36 pixels. For an image of
another size the view mixes channels with pixels, and no model that has lost channels can mix them in the same
way. With the -1 written out torch refuses such an image. Likewise ``x.flatten(1)[:, :144]`` picks four
channels of 36 pixels, and a check of the axis' size refuses others.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pdp_fx.channels.kept import Kept, are_distinct, checked_before, placed_before
from pdp_fx.channels.resizing import Job


@dataclass
class _Part:
    """Neighbouring axes of a tensor, and the axes of its view that hold the same elements."""

    source: list[int] = field(default_factory=list[int])
    view: list[int] = field(default_factory=list[int])


def written_out(node: fx.Node, job: Job, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes of a view; a -1 among them is written out if the view relies on other written sizes.

    Args:
        node: the view.
        job: the view's tensors before channels are removed.
        sizes: numbers and nodes, for the channels that stay; None for an axis that stays as it is.
    """
    source, view = job.source, job.results[0]
    if -1 not in sizes or 0 in source.value.shape or not any(map(view.changes, view.stays)):
        return sizes
    left_out = sizes.index(-1)
    before, channels, behind = parts = _parts(source.value.shape, view)
    fixed = [part for part in parts if _is_fixed(part, source, sizes)]
    mine = next(part for part in parts if left_out in part.view)
    if all(part is mine for part in fixed):
        if mine is not channels or not fixed or not _holds_no_batch(mine, source, view, left_out):
            return sizes
        size: Any = view.size(left_out)
    else:
        # An axis of a single index may get more of them, and the -1 is what would follow it.
        shape = source.value.shape
        while mine is before and channels.source and shape[channels.source[0]] == 1:
            before.source.append(channels.source.pop(0))
        while mine is behind and channels.source and shape[channels.source[-1]] == 1:
            behind.source.insert(0, channels.source.pop())
        size = _size(node, source, mine.source, [sizes[axis] for axis in mine.view if axis != left_out])
    return (*sizes[:left_out], size, *sizes[left_out + 1 :])


def _parts(shape: tuple[int, ...], view: Kept) -> tuple[_Part, _Part, _Part]:
    """The axes before those of the channels that are removed, theirs, and those behind them."""
    sizes, parts = view.value.shape, list[_Part]()
    rest, rest_of_view = list(range(len(shape))), list(range(len(sizes)))
    while rest_of_view:
        part = _Part([], [rest_of_view.pop(0)])
        if rest and shape[rest[0]] == 1 == sizes[part.view[0]]:
            part.source.append(rest.pop(0))
        while (missing := _count(part.view, sizes) - _count(part.source, shape)) != 0:
            if missing > 0:
                part.source.append(rest.pop(0))
            else:
                part.view.append(rest_of_view.pop(0))
        parts.append(part)
    parts[-1].source += rest
    concerned = [at for at, part in enumerate(parts) if any(map(view.changes, part.view))]
    first, last = concerned[0], concerned[-1] + 1
    return _joined(parts[:first]), _joined(parts[first:last]), _joined(parts[last:])


def _count(axes: list[int], shape: tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _joined(parts: list[_Part]) -> _Part:
    return _Part([a for part in parts for a in part.source], [a for part in parts for a in part.view])


def _is_fixed(part: _Part, source: Kept, sizes: tuple[Any, ...]) -> bool:
    """Whether a written size of the view counts more than channels, such as pixels."""
    written = any(isinstance(sizes[axis], int) and sizes[axis] > 1 for axis in part.view)
    return written and any(
        source.value.shape[axis] > 1 and not _is_line(source, axis) for axis in part.source
    )


def _is_line(kept: Kept, axis: int) -> bool:
    """Whether an axis holds channels, each once."""
    layer = next((each for each in kept.value.layers if axis in each.support), None)
    return layer is not None and len(layer.support) == 1 and are_distinct(layer.ids)


def _holds_no_batch(part: _Part, source: Kept, view: Kept, axis: int) -> bool:
    """Whether an axis of the view holds each channel once, however large the batch is."""
    return _is_line(view, axis) and 0 not in part.source and source.value.shape[0] > 1


def hold_to_size(node: fx.Node, kept: Kept, axis: int) -> None:
    """Check before ``node`` the size of an axis of its tensor that shrinks, if channels are runs along it.

    Positions along such an axis, which merges channels with pixels, are those of other channels elsewhere.
    """
    if not kept.changes(axis):
        return
    ids = kept.labels(axis)
    rest = ids.shape[axis] - 1
    if not bool((ids.narrow(axis, 0, rest) == ids.narrow(axis, 1, rest)).any()):
        return
    (tensor, *_) = node.all_input_nodes
    size = placed_before(node, "size", tensor, axis)
    message = (
        f"the positions along axis {axis} of %{tensor.name} are those of channels only where it has as many "
        "entries as for the example inputs; other sizes need a model converted from example_inputs like them"
    )
    checked_before(node, size, kept.size(axis), message)


def _size(node: fx.Node, source: Kept, axes: list[int], others: list[Any]) -> Any:
    """The product of the sizes of some axes of the tensor that ``node`` reads, divided by other sizes."""
    (tensor, *_) = node.all_input_nodes
    size: Any = math.prod(source.size(axis) for axis in axes if _is_line(source, axis))
    for axis in axes:
        if not _is_line(source, axis):
            here = placed_before(node, "size", tensor, axis)
            size = here if size == 1 else placed_before(node, operator.mul, here, size)
    for other in others:
        if isinstance(size, int) and isinstance(other, int):
            size //= other
        elif other != 1:
            size = placed_before(node, operator.floordiv, size, other)
    return size
