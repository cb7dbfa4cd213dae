"""How to update the sizes, positions and counts in a node's arguments once channels are removed.

Each function below updates the arguments of one kind of node. It gets a `Job`, which says which indices of
the node's inputs and outputs stay. The tables at the end map functions, methods and modules to a `Rewrite`.
Its ``fits``, called while labels flow (`resize`), says whether the rewrite can handle a node.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from pdp_fx.channels.counts import ARITHMETIC
from pdp_fx.channels.given_sizes import SHAPE, VIEWS, sizes_given
from pdp_fx.channels.kept import are_distinct, placed_before
from pdp_fx.channels.mixed_views import mixed_axes
from pdp_fx.channels.record import Record
from pdp_fx.channels.resizing import Job, Rewrite
from pdp_fx.channels.rules_attention import FUSED
from pdp_fx.channels.subscripts import chosen, subscript, subscript_fits, varying_axes
from pdp_fx.channels.varying import given_varying
from pdp_fx.channels.written_sizes import hold_to_size, written_out
from pdp_fx.ops.kinds import groups_left
from pdp_fx.ops.products import operation_name

GROUPS = 6
"""The position of ``groups`` among the arguments of a convolution, transposed or not."""


def _arguments(node: fx.Node, first: int, names: tuple[str, ...], count: int) -> list[Any]:
    """``count`` arguments from position ``first`` on, given by position or by name; None if missing."""
    rest = list(node.args[first:])
    return [rest[i] if i < len(rest) else node.kwargs.get(names[i]) for i in range(count)]


def _sizes(node: fx.Node, job: Job, first: int, names: tuple[str, ...]) -> None:
    """Update the sizes that start at argument ``first``, one for each axis of the result."""
    name, packed, given = sizes_given(node, first, names)
    result = job.results[0]
    if not isinstance(given, (tuple, list)) or len(given) != len(result.value.shape):
        return
    new = tuple(job.resized(result, axis, size) for axis, size in enumerate(given))
    if node.target in VIEWS:
        new = written_out(node, job, new)
    if name:
        node.update_kwarg(name, new)
    else:
        node.args = (*node.args[:first], new) if packed else (*node.args[:first], *new)


def _method_sizes(node: fx.Node, job: Job) -> None:
    _sizes(node, job, 1, SHAPE)


def _view_varies(node: fx.Node, record: Record) -> frozenset[int]:
    """The axes whose channels a view spreads over axes that follow other sizes."""
    source: Any = node.args[0] if node.args else None
    values = record.values_of(source)
    _, _, given = sizes_given(node, 1, SHAPE)
    if len(values) != 1 or not isinstance(given, (tuple, list)):
        return frozenset()
    return mixed_axes(tuple(given), source, values[0], record)


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
    behind = len(job.results[0].value.shape) - start - len(new)
    new = written_out(node, job, (*[None] * start, *new, *[None] * behind))[start : start + len(new)]
    node.args, node.kwargs = (node.args[0], axis, new), {}


def _unflatten_varies(node: fx.Node, record: Record) -> frozenset[int]:
    """The axes whose channels are spread over axes that follow other sizes."""
    axis, sizes = _arguments(node, 1, ("dim", "sizes"), 2)
    source: Any = node.args[0]
    values = record.values_of(source)
    if len(values) != 1 or not isinstance(axis, int) or not isinstance(sizes, (tuple, list)):
        return frozenset()
    shape = values[0].shape
    place = axis % len(shape)
    return mixed_axes((*shape[:place], *sizes, *shape[place + 1 :]), source, values[0], record)


def _unflatten_module(node: fx.Node, job: Job) -> None:
    module: Any = node.graph.owning_module.get_submodule(str(node.target))  # pyright: ignore[reportOptionalMemberAccess]
    node.op, node.target = "call_method", "unflatten"
    node.args = (node.args[0], module.dim, tuple(module.unflattened_size))
    _unflatten(node, job)


def _split(node: fx.Node, job: Job) -> None:
    """Turn a chunk or split into a split by the sizes that stay."""
    axis = int(_arguments(node, 1, ("", "dim"), 2)[1] or 0) % len(job.source.value.shape)
    if not job.source.changes(axis):
        return
    node.args, node.kwargs = (node.args[0], [result.size(axis) for result in job.results], axis), {}
    node.target = "split" if node.op == "call_method" else torch.split


def _narrow(node: fx.Node, job: Job) -> None:
    axis, start = _arguments(node, 1, ("dim", "start"), 2)
    place = int(axis) % len(job.source.value.shape)
    if job.source.changes(place):
        hold_to_size(node, job.source, place)
        first = job.source.before(place, int(job.number(start)))
        node.args, node.kwargs = (node.args[0], axis, first, job.results[0].size(place)), {}


def _select(node: fx.Node, job: Job) -> None:
    axis, index = _arguments(node, 1, ("dim", "index"), 2)
    place = int(axis) % len(job.source.value.shape)
    if job.source.changes(place):
        node.args, node.kwargs = (node.args[0], axis, job.source.placed(place, int(job.number(index)))), {}


def _squeeze(node: fx.Node, job: Job) -> None:
    """Keep a squeeze from removing an axis of channels of which a single one is left."""
    shape = job.source.value.shape
    left = {axis for axis in job.source.stays if job.source.size(axis) == 1 < shape[axis]}
    if not left:
        return
    (given,) = _arguments(node, 1, ("dim",), 1)
    named = range(len(shape)) if given is None else [int(job.number(axis)) for axis in _listed(given)]
    axes = tuple(axis for axis in named if axis % len(shape) not in left)
    node.args, node.kwargs = (node.args[0], axes), {}


def _reorder(node: fx.Node, job: Job) -> None:
    """Turn a choice of indices along one axis into the choice of those that stay."""
    changed = [axis for axis in job.source.stays if job.source.changes(axis)]
    if changed:
        (axis,) = changed
        node.op, node.target = "call_function", operator.getitem
        node.args, node.kwargs = (node.args[0], (*([slice(None)] * axis), chosen(job, axis, axis))), {}


def _roll(node: fx.Node, job: Job) -> None:
    """Turn a roll along an axis that shrinks into a choice of indices; keep it along other axes."""
    rank = len(job.source.value.shape)
    shifts, dims = map(_listed, _arguments(node, 1, ("shifts", "dims"), 2))
    others = [(s, d) for s, d in zip(shifts, dims, strict=True) if not job.source.changes(int(d) % rank)]
    rolled = tuple(map(tuple, zip(*others, strict=True)))
    if len(others) == len(dims):
        node.args, node.kwargs = (node.args[0], *rolled), {}
        return
    if others:
        node.update_arg(0, placed_before(node, torch.roll, node.args[0], *rolled))
    _reorder(node, job)


def _places_fit(node: fx.Node, record: Record) -> bool:
    """Fits if the node's sizes and positions are the same at every call."""
    return not given_varying(node, record)


def _narrow_fits(node: fx.Node, record: Record) -> bool:
    """Fits if the start is a number that is the same at every call."""
    (start,) = _arguments(node, 2, ("start",), 1)
    known = isinstance(start, int) or getattr(start, "name", "") in record.numbers
    return known and _places_fit(node, record)


def _select_fits(node: fx.Node, record: Record) -> bool:
    """Fits beside the channels, and along them if the index is a number that is the same at every call."""
    axis, index = _arguments(node, 1, ("dim", "index"), 2)
    values = record.values_of(node.args[0])
    if len(values) != 1 or not isinstance(axis, int):
        return False
    along = any(axis % len(values[0].shape) in layer.support for layer in values[0].layers)
    known = isinstance(index, int) or getattr(index, "name", "") in record.numbers
    return not along or (known and _places_fit(node, record))


def _roll_fits(node: fx.Node, record: Record) -> bool:
    """Fits if the axes are named and `_reorder_fits`."""
    return _arguments(node, 2, ("dims",), 1)[0] is not None and _reorder_fits(node, record)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (tuple, list)) else [given]


def _reorder_fits(node: fx.Node, record: Record) -> bool:
    """Fits along one axis of distinct labels, if the node's positions are the same at every call."""
    source: Any = node.args[0]
    values = record.values_of(source)
    layers = values[0].layers if values else ()
    if len(layers) != 1 or len(layers[0].support) != 1:
        return False
    return are_distinct(layers[0].ids) and _places_fit(node, record)


def _chosen_varies(node: fx.Node, record: Record) -> frozenset[int]:
    """The axes along which a split, narrow, roll or choice of indices is told places that may be others."""
    values, given = record.values_of(node.args[0] if node.args else None), dict[str, Any](node.kwargs)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    names = _CHOICES.get(name)
    if len(values) != 1 or names is None or not given_varying(node, record):
        return frozenset()
    given |= dict(zip(names, node.args[1:], strict=False))
    rank = max(len(values[0].shape), 1)
    dims = given.get("dim", given.get("dims", None if name == "roll" else 0))
    named = [dim % rank for dim in _listed(dims) if isinstance(dim, int)]
    return frozenset(named or range(rank))


def _padding_varies(node: fx.Node, record: Record) -> frozenset[int]:
    """The axes along which a padding is told widths that may be others."""
    widths: Any = _arguments(node, 1, ("pad",), 1)[0]
    values = record.values_of(node.args[0])
    if len(values) != 1 or not isinstance(widths, (tuple, list)):
        return frozenset()
    last = len(values[0].shape) - 1
    varying = (place for place, width in enumerate(widths) if getattr(width, "name", "") in record.varying)
    return frozenset(last - place // 2 for place in varying)


_CHOICES = {
    "narrow": ("dim", "start", "length"),
    **dict.fromkeys(("select", "index_select"), ("dim", "index")),
    "roll": ("shifts", "dims"),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), ("sizes", "dim")),
    **dict.fromkeys(("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"), ("sizes", "dim")),
}
"""The arguments, behind the first, of functions that choose entries along axes."""


def _pad(node: fx.Node, job: Job) -> None:
    """Shrink the padding of a channel axis, which makes channels of zeros, to those that stay.

    A negative width crops; it becomes the number of the cropped channels that stay.
    """
    widths = list(_arguments(node, 1, ("pad",), 1)[0])
    for place, width in enumerate(widths):
        at, many = (job.results[0], width) if width >= 0 else (job.source, -width)
        axis = len(at.value.shape) - 1 - place // 2
        behind = at.value.shape[axis] - many
        stay = at.size(axis) - at.before(axis, behind) if place % 2 else at.before(axis, many)
        widths[place] = stay if width >= 0 else -stay
    if "pad" in node.kwargs:
        node.update_kwarg("pad", tuple(widths))
    else:
        node.args = (node.args[0], tuple(widths), *node.args[2:])


def _pad_fits(node: fx.Node, record: Record) -> bool:
    widths: Any = _arguments(node, 1, ("pad",), 1)[0]
    return isinstance(widths, (tuple, list)) and all(isinstance(width, int) for width in widths)


def _stays(node: fx.Node, job: Job) -> None:
    """Change nothing: numbers of channels among the arguments are to be those from before."""


def _unfold_fits(node: fx.Node, record: Record) -> bool:
    """Fits if the windows run along an axis without labels."""
    source: Any = node.args[0]
    values = record.values_of(source)
    axis = _arguments(node, 1, ("dimension",), 1)[0]
    if len(values) != 1 or not isinstance(axis, int):
        return False
    return all(axis % len(values[0].shape) not in layer.support for layer in values[0].layers)


def _counts_fit(node: fx.Node, record: Record) -> bool:
    """Fits tensors with which a number of channels is computed."""
    return any(map(record.values_of, node.all_input_nodes))


def _constant_fits(node: fx.Node, record: Record) -> bool:
    """Fits a constant that a number of channels is told for; what stays of it is chosen behind it."""
    return not any(map(record.values_of, node.all_input_nodes))


def _number_fits(node: fx.Node, record: Record) -> bool:
    """Fits a number of channels that becomes a tensor, alone or in a list."""
    *others, told = node.args or (None,)
    nodes = [each for each in (told if isinstance(told, list) else [told]) if isinstance(each, fx.Node)]
    alone = len(others) == (node.op == "call_method")
    return alone and bool(nodes) and all(each.name in record.numbers for each in nodes)


def _repeat(node: fx.Node, job: Job) -> None:
    """Make as many copies of each axis of one index as stay; copies of other axes are as many as before."""
    name, packed, given = sizes_given(node, 1, COPIES)
    result = job.results[0]
    ones = _axes_of_one(job.source.value.shape, len(result.value.shape))
    new = tuple(
        job.resized(result, axis, times) if axis in ones else times for axis, times in enumerate(given)
    )
    if name:
        node.update_kwarg(name, new)
    else:
        node.args = (node.args[0], new) if packed else (node.args[0], *new)


COPIES = ("repeats", "dims")
"""The keywords of how many copies are made of each axis."""


def _axes_of_one(shape: tuple[int, ...], rank: int) -> set[int]:
    """The axes of a result of this rank that copy a single index of a tensor, or the whole of it."""
    offset = rank - len(shape)
    return {axis for axis in range(rank) if axis < offset or shape[axis - offset] == 1}


def _repeat_fits(node: fx.Node, record: Record) -> bool:
    """Fits if a number is told for each axis, and the copies are of no axis that may get shorter for that."""
    source: Any = node.args[0]
    values = record.values_of(source)
    _, _, given = sizes_given(node, 1, COPIES)
    if len(values) != 1 or not isinstance(given, (tuple, list)) or len(given) < len(values[0].shape):
        return False
    offset = len(given) - len(values[0].shape)
    copied = {axis - offset for axis, times in enumerate(given) if times != 1}
    return not any(layer.free and layer.support & copied for layer in values[0].layers)


def _interleave(node: fx.Node, job: Job) -> None:
    """Make as many copies of an axis of one index as stay; of several indices each has as many as before."""
    times, axis = _arguments(node, 1, INTERLEAVED, 2)
    result = job.results[0]
    if job.source.value.shape[axis] > 1:
        return
    node.args = (node.args[0], job.resized(result, axis % len(result.value.shape), times), axis)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name not in INTERLEAVED}


INTERLEAVED = ("repeats", "dim")


def _interleave_fits(node: fx.Node, record: Record) -> bool:
    """Fits copies of an axis of one index, as many as a number says, or of channels by a number of them."""
    source: Any = node.args[0]
    times, axis = _arguments(node, 1, INTERLEAVED, 2)
    values = record.values_of(source)
    number = isinstance(times, int) or getattr(times, "name", "") in record.numbers
    if len(values) != 1 or not isinstance(axis, int) or not number:
        return False
    place = axis % len(values[0].shape)
    counted = getattr(times, "name", "") in record.taint
    free = [layer.free for layer in values[0].layers if place in layer.support]
    return values[0].shape[place] == 1 or (counted and bool(free) and not any(free))


def _scale(node: fx.Node, job: Job) -> None:
    """Write out the scale of attention, which otherwise follows the number of channels of a query."""
    inner = len(job.source.value.shape) - 1
    if job.source.changes(inner) and node.kwargs.get("scale") is None:
        node.update_kwarg("scale", 1 / math.sqrt(job.source.value.shape[inner]))


def _groups(node: fx.Node, job: Job) -> None:
    """Update the groups of a depthwise convolution, one for each channel; other numbers of groups stay."""
    # Its name ends in the number of the axes behind the channels, as in conv2d.
    axis = len(job.source.value.shape) - 1 - int(getattr(node.target, "__name__", "").rstrip("d")[-1])
    given: Any = node.args[GROUPS] if len(node.args) > GROUPS else node.kwargs.get("groups", 1)
    if job.number(given) == job.source.value.shape[axis] and job.source.changes(axis):
        groups = job.resized(job.source, axis, given)
    else:
        return
    if len(node.args) > GROUPS:
        node.update_arg(GROUPS, groups)
    else:
        node.update_kwarg("groups", groups)


_SIZES, _FILLED = Rewrite(_method_sizes), Rewrite(_filled_sizes)
_SPLIT = Rewrite(_split, _places_fit, _chosen_varies)
_VIEW = Rewrite(_method_sizes, varies=_view_varies)
_NARROW, _PAD, _UNFLATTEN = (
    Rewrite(_narrow, _narrow_fits, _chosen_varies),
    Rewrite(_pad, _pad_fits, _padding_varies),
    Rewrite(_unflatten, varies=_unflatten_varies),
)
_REORDER, _GROUPS = Rewrite(_reorder, _reorder_fits, _chosen_varies), Rewrite(_groups)
_SELECT = Rewrite(_select, _select_fits, _chosen_varies)
_COUNTED, _SCALED = Rewrite(_stays, _counts_fit), Rewrite(_scale)
_REPEAT, _NUMBER = Rewrite(_repeat, _repeat_fits), Rewrite(_stays, _number_fits)
_INTERLEAVE = Rewrite(_interleave, _interleave_fits)
_CONSTANT = Rewrite(_stays, _constant_fits)
_SQUEEZE, _ROLL, _SUBSCRIPT = (
    Rewrite(_squeeze),
    Rewrite(_roll, _roll_fits, _chosen_varies),
    Rewrite(subscript, subscript_fits, varying_axes),
)

RESIZERS: dict[Any, Rewrite] = {
    "view": _VIEW, "reshape": _VIEW, torch.reshape: _VIEW, "expand": _SIZES, torch.broadcast_to: _SIZES,
    "broadcast_to": _SIZES, "new_zeros": _FILLED, "new_ones": _FILLED, "new_full": _FILLED,
    "new_empty": _FILLED, torch.empty: _FILLED, "sum_to_size": _SIZES,
    torch.zeros: _FILLED, torch.ones: _FILLED, torch.full: _FILLED, torch.chunk: _SPLIT, "chunk": _SPLIT,
    torch.split: _SPLIT, "split": _SPLIT, "split_with_sizes": _SPLIT, torch.split_with_sizes: _SPLIT,
    torch.tensor_split: _SPLIT, "tensor_split": _SPLIT, "unsafe_chunk": _SPLIT,
    torch.unsafe_chunk: _SPLIT, torch.unsafe_split: _SPLIT, "unsafe_split": _SPLIT,
    torch.unsafe_split_with_sizes: _SPLIT, "unsafe_split_with_sizes": _SPLIT,
    torch.functional.split: _SPLIT, torch.narrow: _NARROW, "narrow": _NARROW,
    operator.getitem: _SUBSCRIPT, operator.setitem: _SUBSCRIPT, functional.pad: _PAD,
    torch.constant_pad_nd: _PAD, torch.roll: _ROLL, "roll": _ROLL, torch.index_select: _REORDER,
    "index_select": _REORDER, torch.select: _SELECT, "select": _SELECT,
    "unfold": Rewrite(_stays, _unfold_fits),
    torch.unflatten: _UNFLATTEN, "unflatten": _UNFLATTEN,
    "torchvision::deform_conv2d": Rewrite(_stays), torch.squeeze: _SQUEEZE, "squeeze": _SQUEEZE,
    "squeeze_": _SQUEEZE, "repeat": _REPEAT, "tile": _REPEAT, torch.tile: _REPEAT,
    "repeat_interleave": _INTERLEAVE, torch.repeat_interleave: _INTERLEAVE,
    torch.tensor: _NUMBER, torch.as_tensor: _NUMBER, torch.scalar_tensor: _NUMBER, "new_tensor": _NUMBER,
    torch.arange: _CONSTANT, torch.linspace: _CONSTANT, torch.logspace: _CONSTANT, torch.eye: _CONSTANT,
}  # fmt: skip
"""The rewrites of functions and methods that have sizes or positions among their arguments."""

ATTENTION: frozenset[Any] = frozenset({
    functional.scaled_dot_product_attention,
    *map(operation_name, (torch.ops.aten.scaled_dot_product_attention, *FUSED)),
})  # fmt: skip
"""Attention as one operation, whose scale is that of the number of channels of its query if it gets none."""

MODULE_RESIZERS: dict[type[nn.Module], Rewrite] = {nn.Unflatten: Rewrite(_unflatten_module)}
"""The rewrites of modules that hold sizes of activations."""


def _normalized_shape(node: fx.Node, job: Job) -> None:
    """Update the number of channels that a norm over them is given."""
    last = len(job.source.value.shape) - 1
    if not job.source.changes(last):
        return
    if len(node.args) > 1:
        node.update_arg(1, (job.source.size(last),))
    else:
        node.update_kwarg("normalized_shape", (job.source.size(last),))


def _norm_groups(node: fx.Node, job: Job) -> None:
    """Update the number of groups of a group norm: fewer, if whole groups are removed."""
    (given,) = _arguments(node, 1, ("num_groups",), 1)
    if not job.source.changes(1):
        return
    before, stays = job.number(given), job.source.stays.get(1)
    groups = before if stays is None else groups_left(stays, before)
    new = given if groups == before else groups
    if len(node.args) > 1:
        node.update_arg(1, new)
    else:
        node.update_kwarg("num_groups", new)


_NORM, _GROUP_NORM = Rewrite(_normalized_shape), Rewrite(_norm_groups)
NORMS: dict[Any, Rewrite] = {
    functional.layer_norm: _NORM, torch.layer_norm: _NORM, functional.rms_norm: _NORM,
    torch.rms_norm: _NORM,
}  # fmt: skip
"""The rewrites of norm functions that are given the number of channels."""

GROUP_NORMS: dict[Any, Rewrite] = {functional.group_norm: _GROUP_NORM, torch.group_norm: _GROUP_NORM}
"""The rewrites of norm functions that are given the number of groups."""

GROUPED: frozenset[Any] = frozenset({
    functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
    functional.conv_transpose2d, functional.conv_transpose3d, torch.conv1d, torch.conv2d, torch.conv3d,
})  # fmt: skip
"""Functions with an argument ``groups``, which may follow the number of channels."""


ALWAYS_TOLD: frozenset[Any] = frozenset({
    torch.narrow, "narrow", "sum_to_size", torch.squeeze, "squeeze", "squeeze_",
})  # fmt: skip
"""Functions and methods whose sizes matter even if they change nothing on the example inputs."""


def rewrite_of(gm: fx.GraphModule, node: fx.Node) -> Rewrite | None:
    """The rewrite for ``node``, or None if there is none."""
    if node.op == "call_module":
        return MODULE_RESIZERS.get(type(gm.get_submodule(str(node.target))))
    if node.target in GROUPED:
        return _GROUPS
    if node.target in ARITHMETIC:
        return _COUNTED
    if _is_attention(node):
        return _SCALED
    known = NORMS.get(node.target) or GROUP_NORMS.get(node.target) or RESIZERS.get(node.target)
    return known or RESIZERS.get(operation_name(node.target))


def sizes_laid_out(gm: fx.GraphModule, node: fx.Node, rank: int) -> tuple[int, list[Any]] | None:
    """The sizes by which ``node`` lays axes out anew, and the first of these axes.

    Args:
        gm: the graph module of the node.
        node: any node.
        rank: how many axes its input has.

    Returns:
        Whole numbers and nodes, or another tensor whose sizes are taken; None if the node does no such thing.
    """
    if node.op == "call_module":
        module: Any = gm.get_submodule(str(node.target))
        return (module.dim % rank, list(module.unflattened_size)) if type(module) is nn.Unflatten else None
    if node.target in ("view_as", "reshape_as"):
        return 0, list(node.args[1:])
    rewrite = rewrite_of(gm, node)
    if rewrite is _UNFLATTEN:
        axis, sizes = _arguments(node, 1, ("dim", "sizes"), 2)
        return (axis % rank if isinstance(axis, int) else 0), _listed(sizes)
    return (0, _listed(sizes_given(node, 1, SHAPE)[2])) if rewrite is _VIEW else None


def chooses(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether ``node`` chooses, reorders or pads entries of axes by numbers."""
    return rewrite_of(gm, node) in (_SPLIT, _NARROW, _SELECT, _PAD, _REORDER, _ROLL, _SUBSCRIPT)


def always_told(node: fx.Node) -> bool:
    """Whether ``node`` may need new sizes even if it does not change the layout of channels."""
    told = any(node.target in told for told in (GROUPED, NORMS, GROUP_NORMS, ALWAYS_TOLD))
    return told or _is_attention(node)


def _is_attention(node: fx.Node) -> bool:
    return node.target in ATTENTION or operation_name(node.target) in ATTENTION
