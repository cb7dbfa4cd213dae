"""How each function that is told sizes is told new ones.

A rewrite gets a `Job`: the node, what it read and what it gave, and which of their indices stay. It
changes the node's arguments. ``fits`` says, while labels flow, whether it will be able to.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pdp_fx.channels.record import Record
from pdp_fx.channels.resizing import Job, Rewrite


def _arguments(node: fx.Node, first: int, names: tuple[str, ...], count: int) -> list[Any]:
    """The arguments from ``first`` on, by place or by name."""
    rest = list(node.args[first:])
    return [rest[i] if i < len(rest) else node.kwargs.get(names[i]) for i in range(count)]


def _sizes(node: fx.Node, job: Job, first: int, names: tuple[str, ...]) -> None:
    """Write the sizes that start at argument ``first``: one for each axis of the result."""
    name = next((name for name in names if name in node.kwargs), None)
    packed = len(node.args) == first + 1 and isinstance(node.args[first], (tuple, list))
    given: Any = node.kwargs[name] if name else node.args[first] if packed else node.args[first:]
    result = job.results[0]
    if not isinstance(given, (tuple, list)) or len(given) != len(result.value.shape):
        return
    new = tuple(job.resized(result, axis, size) for axis, size in enumerate(given))
    if name:
        node.update_kwarg(name, new)
    else:
        node.args = (*node.args[:first], new) if packed else (*node.args[:first], *new)


def _method_sizes(node: fx.Node, job: Job) -> None:
    _sizes(node, job, 1, ("shape", "size", "sizes"))


def _filled_sizes(node: fx.Node, job: Job) -> None:
    first = int(node.op == "call_method")
    packed = isinstance(node.args[first], (tuple, list)) if len(node.args) > first else False
    if packed and len(node.args) > first + 1:
        head, tail = node.args[: first + 1], node.args[first + 1 :]
        node.args = head
        _sizes(node, job, first, ("size",))
        node.args = (*node.args, *tail)
    else:
        _sizes(node, job, first, ("size",))


def _unflatten(node: fx.Node, job: Job) -> None:
    axis, sizes = _arguments(node, 1, ("dim", "sizes"), 2)
    start = int(axis) % len(job.source.value.shape)
    new = tuple(job.resized(job.results[0], start + place, size) for place, size in enumerate(sizes))
    node.args, node.kwargs = (node.args[0], axis, new), {}


def _unflatten_module(node: fx.Node, job: Job) -> None:
    module: Any = node.graph.owning_module.get_submodule(str(node.target))  # pyright: ignore[reportOptionalMemberAccess]
    node.op, node.target = "call_method", "unflatten"
    node.args = (node.args[0], module.dim, tuple(module.unflattened_size))
    _unflatten(node, job)


def _split(node: fx.Node, job: Job) -> None:
    """Chunks and splits become splits into the sizes that stay."""
    axis = int(_arguments(node, 1, ("", "dim"), 2)[1] or 0) % len(job.source.value.shape)
    if not job.source.changes(axis):
        return
    node.args, node.kwargs = (node.args[0], [result.size(axis) for result in job.results], axis), {}
    node.target = "split" if node.op == "call_method" else torch.split


def _narrow(node: fx.Node, job: Job) -> None:
    axis, start = _arguments(node, 1, ("dim", "start"), 2)
    place = int(axis) % len(job.source.value.shape)
    if job.source.changes(place):
        first = job.source.before(place, int(job.number(start)))
        node.args, node.kwargs = (node.args[0], axis, first, job.results[0].size(place)), {}


def _parts(node: fx.Node) -> list[Any]:
    subscript: Any = node.args[1]
    return (
        list(subscript) if isinstance(subscript, (tuple, list)) and not _is_index(subscript) else [subscript]
    )


def _is_index(part: Any) -> bool:
    """Whether a part of a subscript picks several places: a list of numbers, or a node (a tensor)."""
    return isinstance(part, list) and all(isinstance(item, int) for item in part)


def _placed(parts: list[Any], rank: int) -> list[tuple[int, int]]:
    """The place of every part of a subscript, with the tensor axis that it indexes."""
    consumed = sum(part is not None and part is not Ellipsis for part in parts)
    placed: list[tuple[int, int]] = []
    axis = 0
    for place, part in enumerate(parts):
        if part is Ellipsis:
            axis += rank - consumed
        elif part is not None:
            placed.append((place, axis))
            axis += 1
    return placed


def _subscript_fits(node: fx.Node, record: Record) -> bool:
    """Numbers, slices, and at most one list of places; what is picked must be told apart by its labels."""
    source = node.args[0]
    values = record.values.get(source.name, ()) if isinstance(source, fx.Node) else ()
    parts = _parts(node)
    several = [part for part in parts if _is_index(part) or _is_tensor(part, record)]
    known = (int, slice, fx.Node)
    plain = all(p is None or p is Ellipsis or isinstance(p, known) or _is_index(p) for p in parts)
    if len(values) != 1 or not plain or len(several) > 1:
        return False
    picked = {axis for place, axis in _placed(parts, len(values[0].shape)) if _picks(parts[place])}
    return all(_distinct(layer.ids) for layer in values[0].layers if layer.support & picked)


def _picks(part: Any) -> bool:
    """Whether a part of a subscript may leave gaps: anything but a number or a slice of step 1."""
    return not isinstance(part, int) and not (isinstance(part, slice) and part.step in (None, 1))


def _distinct(ids: Tensor) -> bool:
    return len(ids.unique()) == ids.numel()


def _is_tensor(part: Any, record: Record) -> bool:
    return isinstance(part, fx.Node) and part.name not in record.numbers


def _subscript(node: fx.Node, job: Job) -> None:
    parts = _parts(node)
    source = job.source
    for place, axis in _placed(parts, len(source.value.shape)):
        if not source.changes(axis):
            continue
        part = parts[place]
        size = source.value.shape[axis]
        if isinstance(part, slice):
            bounds = slice(*(job.number(bound) for bound in (part.start, part.stop, part.step))).indices(size)
            if bounds[2] == 1:
                first = source.before(axis, bounds[0])
                parts[place] = slice(first, max(source.before(axis, bounds[1]), first))
                continue
        number = (
            job.number(part) if isinstance(part, int) or getattr(part, "name", "") in job.numbers else None
        )
        parts[place] = source.before(axis, number % size) if isinstance(number, int) else _chosen(job, axis)
    whole = isinstance(node.args[1], (tuple, list)) and not _is_index(node.args[1])
    node.args = (node.args[0], tuple(parts) if whole else parts[0])


def _chosen(job: Job, axis: int) -> list[int]:
    """Which of the places that stay along ``axis`` the result has, in its order.

    Read off the labels: those of the result are those of the source, chosen and reordered.
    """
    source, result = job.source.labels(axis), _labels_like(job, axis)
    place_of = {label: place for place, label in enumerate(source.tolist())}
    stays = job.source.stays[axis]
    rank = np.cumsum(stays) - 1
    places = [place_of[label] for label in result.tolist()]
    return [int(rank[place]) for place in places if stays[place]]


def _labels_like(job: Job, axis: int) -> Tensor:
    """The labels of the result that come from ``axis`` of the source."""
    known = set(job.source.labels(axis).tolist())
    for layer in job.results[0].value.layers:
        if len(layer.support) == 1 and set(layer.ids.reshape(-1).tolist()) <= known:
            return layer.ids.reshape(-1)
    return torch.empty(0, dtype=torch.int64)


def _reorder(node: fx.Node, job: Job) -> None:
    """A roll or a choice of places along one axis becomes a choice of the places that stay."""
    changed = [axis for axis in job.source.stays if job.source.changes(axis)]
    if not changed:
        return
    (axis,) = changed
    node.op, node.target = "call_function", operator.getitem
    node.args, node.kwargs = (node.args[0], (*([slice(None)] * axis), _chosen(job, axis))), {}


def _reorder_fits(node: fx.Node, record: Record) -> bool:
    """Only along one axis of distinct labels."""
    source: Any = node.args[0]
    values = record.values.get(source.name, ())
    layers = values[0].layers if values else ()
    return len(layers) == 1 and len(layers[0].support) == 1 and _distinct(layers[0].ids)


def _pad(node: fx.Node, job: Job) -> None:
    """Padding of a channel axis shrinks with the channels that it stands for."""
    widths = list(_arguments(node, 1, ("pad",), 1)[0])
    result = job.results[0]
    for index in range(0, len(widths), 2):
        axis = len(result.value.shape) - 1 - index // 2
        if axis in result.stays and result.changes(axis):
            size, high = result.value.shape[axis], widths[index + 1]
            widths[index] = result.before(axis, widths[index])
            widths[index + 1] = result.size(axis) - result.before(axis, size - high)
    if "pad" in node.kwargs:
        node.update_kwarg("pad", tuple(widths))
    else:
        node.args = (node.args[0], tuple(widths), *node.args[2:])


def _pad_fits(node: fx.Node, record: Record) -> bool:
    widths: Any = _arguments(node, 1, ("pad",), 1)[0]
    return isinstance(widths, (tuple, list)) and all(
        isinstance(width, int) and width >= 0 for width in widths
    )


def _stays(node: fx.Node, job: Job) -> None:
    """Nothing that the node is told concerns channels."""


def _unfold_fits(node: fx.Node, record: Record) -> bool:
    """Windows along an axis without labels."""
    source: Any = node.args[0]
    values = record.values.get(source.name, ())
    axis = _arguments(node, 1, ("dimension",), 1)[0]
    if len(values) != 1 or not isinstance(axis, int):
        return False
    return all(axis % len(values[0].shape) not in layer.support for layer in values[0].layers)


def _groups(node: fx.Node, job: Job) -> None:
    """A depthwise convolution has as many groups as channels; other groups stay."""
    place = 6 if "transpose" not in getattr(node.target, "__name__", "") else 6
    channels = job.source.value.shape[1] if len(job.source.value.shape) > 1 else 1
    given = node.args[place] if len(node.args) > place else node.kwargs.get("groups", 1)
    if job.number(given) != channels or not job.source.changes(1):
        return
    if len(node.args) > place:
        node.update_arg(place, job.source.size(1))
    else:
        node.update_kwarg("groups", job.source.size(1))


_SIZES, _FILLED, _SPLIT = Rewrite(_method_sizes), Rewrite(_filled_sizes), Rewrite(_split)
_NARROW, _PAD, _UNFLATTEN = Rewrite(_narrow), Rewrite(_pad, _pad_fits), Rewrite(_unflatten)
_REORDER, _GROUPS = Rewrite(_reorder, _reorder_fits), Rewrite(_groups)

RESIZERS: dict[Any, Rewrite] = {
    "view": _SIZES, "reshape": _SIZES, torch.reshape: _SIZES, "expand": _SIZES, torch.broadcast_to: _SIZES,
    "broadcast_to": _SIZES, "new_zeros": _FILLED, "new_ones": _FILLED, "new_full": _FILLED,
    torch.zeros: _FILLED, torch.ones: _FILLED, torch.full: _FILLED, torch.chunk: _SPLIT, "chunk": _SPLIT,
    torch.split: _SPLIT, "split": _SPLIT, "split_with_sizes": _SPLIT, torch.split_with_sizes: _SPLIT,
    torch.tensor_split: _SPLIT, "tensor_split": _SPLIT, "unsafe_chunk": _SPLIT,
    torch.functional.split: _SPLIT, torch.narrow: _NARROW, "narrow": _NARROW,
    operator.getitem: Rewrite(_subscript, _subscript_fits), functional.pad: _PAD,
    torch.constant_pad_nd: _PAD, torch.roll: _REORDER, "roll": _REORDER, torch.index_select: _REORDER,
    "index_select": _REORDER, "unfold": Rewrite(_stays, _unfold_fits),
    torch.unflatten: _UNFLATTEN, "unflatten": _UNFLATTEN,
}  # fmt: skip
"""Functions and methods that are told sizes, with the way to tell them new ones."""

MODULE_RESIZERS: dict[type[nn.Module], Rewrite] = {nn.Unflatten: Rewrite(_unflatten_module)}
"""Modules that hold sizes of their own."""


def _normalized_shape(node: fx.Node, job: Job) -> None:
    """A norm over the channels is told how many there are."""
    last = len(job.source.value.shape) - 1
    if not job.source.changes(last):
        return
    if len(node.args) > 1:
        node.update_arg(1, (job.source.size(last),))
    else:
        node.update_kwarg("normalized_shape", (job.source.size(last),))


_NORM = Rewrite(_normalized_shape)
NORMS: dict[Any, Rewrite] = {
    functional.layer_norm: _NORM, torch.layer_norm: _NORM, functional.rms_norm: _NORM,
    torch.rms_norm: _NORM,
}  # fmt: skip
"""Norms that are told the number of channels."""

GROUPED: frozenset[Any] = frozenset({
    functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
    functional.conv_transpose2d, functional.conv_transpose3d, torch.conv1d, torch.conv2d, torch.conv3d,
})  # fmt: skip
"""Functions that are told a number of groups, which follows the channels."""


def rewrite_of(gm: fx.GraphModule, node: fx.Node) -> Rewrite | None:
    """The way to resize ``node``, or None."""
    if node.op == "call_module":
        return MODULE_RESIZERS.get(type(gm.get_submodule(str(node.target))))
    if node.target in GROUPED:
        return _GROUPS
    return NORMS.get(node.target) or RESIZERS.get(node.target)


def always_told(node: fx.Node) -> bool:
    """Whether ``node`` is told a number of channels even where it lays nothing out anew."""
    return node.target in GROUPED or node.target in NORMS
