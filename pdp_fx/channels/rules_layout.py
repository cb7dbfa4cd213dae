"""Rules for layout operations, which are executed on the labels themselves.

There is no index arithmetic here: a view, permute or slice of a tensor is the same view, permute or slice of
its labels. Sizes in the arguments of these operations are handled where the graph node is known (`resize`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, compress, from_front, shaped
from pdp_fx.channels.record import Call, Sized

aten = torch.ops.aten

SIZED = frozenset({
    aten.index_select, aten.index, aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias,
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.narrow, aten.chunk,
    aten.repeat, aten.unfold, aten.roll, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.channel_shuffle, aten.expand, aten.constant_pad_nd, aten.unsafe_split,
    aten.unsafe_split_with_sizes,
})  # fmt: skip
"""Operations with sizes, positions or counts as arguments, which may be those of a channel axis."""

SHAPED = frozenset({aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.expand})
"""Those of them that have a shape as an argument."""

REORDERED = frozenset({aten.permute, aten.transpose, aten.t, aten.movedim})
"""Operations that put axes into another order."""

UNCUT = REORDERED | {
    aten.expand, aten.unsqueeze, aten.clone, aten.contiguous, aten.detach, aten.alias, aten._to_copy,
    aten.lift_fresh,
}  # fmt: skip
"""Operations that keep all axes as long as they are, but for copies along those of one index."""


@rule(
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand,
    aten.squeeze, aten.unsqueeze, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind,
    aten.flip, aten.roll, aten.unfold, aten.pixel_unshuffle, aten.repeat, aten.clone, aten.detach,
    aten.alias, aten._to_copy, aten.narrow, aten.lift_fresh, aten.contiguous, aten.movedim,
    aten._reshape_alias, aten.chunk, aten.index_select, aten.index, aten.unsafe_split,
    aten.unsafe_split_with_sizes,
)  # fmt: skip
def layout(call: Call, flow: LabelFlow) -> None:
    """Run the operation on every label layer of its tensor."""
    source, packet = call.args[0], call.func.overloadpacket
    flow.record.reorders = flow.record.reorders or packet in REORDERED
    flow.freeze_all(call.tensors()[1:], "these values choose places of another tensor")
    if packet is aten.roll and not call.argument(2, "dims", ()):
        flow.freeze_all([source], "it is rolled along all axes at once", "name the axis to roll along")
        flow.put(call.result, ())
        return
    if packet is aten.view and isinstance(call.args[1], torch.dtype):
        # The bits of -0.0 are not all 0, so a dropped channel need not be 0 as another type.
        flow.freeze_all([source], "its bits are read as another type")
        flow.put(call.result, ())
        return
    results = [call.result] if isinstance(call.result, Tensor) else list(call.result)
    moved: list[list[Layer]] = [[] for _ in results]
    cut = _cut_whole(call, flow)
    # Where a tensor has no rows, its channels are those along its other axes.
    shape = tuple(size or int(packet in UNCUT) for size in source.shape)
    for layer in cut:
        for index, new in enumerate(_move(layer, shape, call)):
            moved[index].append(new)
            _note_part(layer, new, call, flow)
            if packet in SIZED and _is_told(layer, new, index, call):
                flow.sized.append(Sized(layer, new, packet in SHAPED))
                if packet is aten.slice and _picks(call):
                    flow.note_gapped(call.result, layer.ids)
    if packet in (aten.expand, aten.repeat):
        moved[0].extend(_broadcast(source, call.result, flow))
    for result, layers in zip(results, moved, strict=True):
        if not source.numel():
            _keep_lost(cut, layers, flow)
        elif not result.numel():
            layers = _of_emptied(result, cut, call, flow)
        flow.put(result, _without_overlap(layers, flow))


def _of_emptied(result: Tensor, cut: list[Layer], call: Call, flow: LabelFlow) -> list[Layer]:
    """The layers of an empty tensor, for example because an index has found nothing; most channels stay.

    What is cut off behind the last channel of each head, as where all of a head is rotated, has heads still.
    """
    source, packet = call.args[0], call.func.overloadpacket
    same = result.ndim == source.ndim
    emptied = frozenset(axis for axis, size in enumerate(result.shape) if not size and same)
    inner = min(emptied, default=0) if packet in CUTS else 0
    heads = [layer for layer in cut if max(layer.support, default=inner) < inner]
    always = packet is aten.slice and not flow.varies and _is_always_empty(call)
    for layer in () if always else flow.layers(source):
        followed = any(layer is each for head in heads for each in (head, *head.needs))
        if not followed and not layer.support <= emptied:
            flow.freeze(layer.ids, *EMPTIED)
    return heads


def _is_always_empty(call: Call) -> bool:
    """Whether a slice ends where it starts, such as one from 0 to 0, whatever it is taken of."""
    start, end = call.argument(2, "start"), call.argument(3, "end")
    return end is not None and 0 <= end <= (start or 0)


def _keep_lost(before: list[Layer], after: list[Layer], flow: LabelFlow) -> None:
    """Freeze channels of an empty tensor that are not seen in what is laid out of it."""
    followed = [need for layer in after if layer.support for need in layer.needs]
    for layer in before:
        if layer.support and all(layer is not each for each in followed):
            flow.freeze(layer.ids, *EMPTIED)


EMPTIED = (
    "nothing of these channels is left on the example inputs",
    "give example inputs of which something is",
)
"""Why channels stay that go into an empty tensor, and what would change it."""

PICKED, PICKED_REMEDY = "this channel is picked by its number", "give it a layer of its own"

CUTS = frozenset({
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.narrow, aten.chunk,
    aten.index_select, aten.unsafe_split, aten.unsafe_split_with_sizes,
})  # fmt: skip
"""Operations that cut one axis, which is their argument ``dim``."""


def _cut_whole(call: Call, flow: LabelFlow) -> list[Layer]:
    """The layers of the source; labels that are cut across other channels or picked by number are frozen."""
    source, packet = call.args[0], call.func.overloadpacket
    if packet is aten.pixel_unshuffle:
        swept = frozenset({source.ndim - 2, source.ndim - 1})
        return flow.all_without(flow.layers(source), swept, "these pixels become channels")
    if packet not in CUTS:
        return list(flow.layers(source))
    axis = from_front(call.named().get("dim", 0), source.ndim)
    layers: list[Layer] = []
    for layer in flow.layers(source):
        if axis in layer.support and len(layer.support) > 1:
            cut = flow.without(layer, frozenset({axis}), "these channels are cut apart")
            layers += [] if cut is None else [cut]
            continue
        if layer.support == frozenset({axis}) and packet is aten.unbind:
            flow.freeze(layer.ids, "each of these channels becomes a tensor of its own")
        elif layer.support == frozenset({axis}) and packet is aten.select:
            flow.freeze(layer.ids.select(axis, int(call.args[2])), PICKED, PICKED_REMEDY)
        layers.append(layer)
    return layers


def _broadcast(source: Tensor, result: Tensor, flow: LabelFlow) -> list[Layer]:
    """Labels for the axes that copies make of one index: all their indices hold the same values."""
    offset = result.ndim - source.ndim
    made = [a for a, n in enumerate(result.shape) if n > 1 and (a < offset or source.shape[a - offset] == 1)]
    return [free_layer(result, axis, False, flow) for axis in made]


def free_layer(tensor: Tensor, axis: int, zero: bool, flow: LabelFlow) -> Layer:
    """New labels for an axis of ``tensor`` along which all values are the same."""
    ids = shaped(flow.record.ties.fresh(tensor.shape[axis]), axis, tensor.ndim)
    layer = Layer(ids, torch.full_like(ids, zero, dtype=torch.bool), free=True)
    flow.sized.append(Sized(layer, layer, shaped=True))
    return layer


def _without_overlap(layers: list[Layer], flow: LabelFlow) -> list[Layer]:
    """At most one layer for each axis: of merged axes the outermost keeps its labels, the others are frozen.

    If what is outermost must stay anyhow, the innermost keeps them (`choices`). Labels of broadcast axes give
    way to all others.
    """
    real = sorted((layer for layer in layers if not layer.free), key=_first_axis)
    outer = [
        layer for layer in real if any(layer.support & other.support for other in real if other is not layer)
    ]
    if outer and flow.takes_inner(outer[0].ids):
        real.reverse()
    kept: list[Layer] = []
    for layer in real + [layer for layer in layers if layer.free]:
        if any(layer.support & other.support for other in kept):
            flow.freeze(layer.ids, "the axis of these channels is merged with another axis of channels")
        else:
            kept.append(layer)
    return kept


def _first_axis(layer: Layer) -> int:
    """The first axis along which the labels lay before the operation."""
    return min(min(source.support, default=0) for source in layer.needs)


def _note_part(before: Layer, part: Layer, call: Call, flow: LabelFlow) -> None:
    """Note channels that are split off or picked out of others: one of them must stay.

    On a broadcast axis that is necessary only for a single index, which will be broadcast again.
    """
    chosen = call.func.overloadpacket in CUTS or call.func.overloadpacket is aten.index
    some = part.ids.numel() != before.ids.numel() and (not part.free or part.ids.numel() == 1)
    if chosen and len(before.support) == 1 and some:
        if part.ids.numel() == 1 and not part.free:
            # What is left of the axis carries no labels, so this one stays whatever is done with it.
            flow.freeze(part.ids, PICKED, PICKED_REMEDY)
        flow.record.parts.append(part.ids.reshape(-1))
    if part.ids.numel() == 1 < before.ids.numel() and _picks(call):
        # An axis with one index carries no labels, from which the index could be updated.
        flow.freeze(before.ids, PICKED, PICKED_REMEDY)


def _picks(call: Call) -> bool:
    """Whether the operation picks indices one by one, or with gaps between them."""
    if call.func.overloadpacket is aten.slice:
        return int(call.argument(4, "step", 1)) > 1
    return call.func.overloadpacket in (aten.index, aten.index_select)


def laid_out_anew(before: Layer, after: Layer) -> bool:
    """Whether the labels' order, number or axis has changed."""
    same = before.support == after.support and before.ids.ndim == after.ids.ndim
    return not same or not torch.equal(before.ids.reshape(-1), after.ids.reshape(-1))


def _is_told(before: Layer, after: Layer, place: int, call: Call) -> bool:
    """Whether the operation depends on sizes or positions of these labels, and needs new ones for fewer.

    That can be so even if no label has moved: in a view by the tensor's own shape, or a roll by its length.
    """
    if laid_out_anew(before, after):
        return True
    shape = call.args[0].shape
    counts = [(axis, gone) for axis in before.support for gone in (1, 2, 3) if gone < shape[axis]]
    return any(not _keeps_up(before, axis, shape[axis] - left, place, call) for axis, left in counts)


def _keeps_up(layer: Layer, axis: int, left: int, place: int, call: Call) -> bool:
    """Whether an operation that moves no label moves none, either, with ``left`` labels along the axis."""
    ids = layer.ids.narrow(axis, 0, left)
    shape = [left if at == axis else size for at, size in enumerate(call.args[0].shape)]
    try:
        moved = _apply(call, ids.expand(shape))
    except (RuntimeError, IndexError):
        return False
    return place < len(moved) and moved[place].shape[axis] == left and bool((moved[place] == ids).all())


def _move(layer: Layer, shape: tuple[int, ...], call: Call) -> list[Layer]:
    """Apply the operation to a layer's labels, laid out over the whole tensor."""
    ids = _apply(call, layer.ids.expand(shape))
    zero = _apply(call, layer.zero.expand(shape))
    pairs = [compress(i, z) for i, z in zip(ids, zero, strict=True)]
    return [Layer(i, z, (layer,), layer.slot, layer.free) for i, z in pairs]


def _apply(call: Call, labels: Tensor) -> list[Tensor]:
    packet = call.func.overloadpacket
    if packet in (aten.clone, aten.contiguous, aten._to_copy, aten.lift_fresh):
        return [labels]
    if packet in (aten.view, aten._unsafe_view, aten._reshape_alias):
        return [labels.reshape(call.args[1])]
    args, kwargs = tree_map_only(Tensor, Tensor.cpu, (call.args[1:], call.kwargs))
    moved: Any = call.func(labels, *args, **kwargs)
    return [moved] if isinstance(moved, Tensor) else list(moved)


@rule(aten.channel_shuffle, aten.native_channel_shuffle)
def channel_shuffle(call: Call, flow: LabelFlow) -> None:
    """Groups stay equal: channels at the same place of every group are tied."""
    tie_blocks(call, 1, int(call.args[1]), True, flow)
    layout(call, flow)


@rule(aten.pixel_shuffle)
def pixel_shuffle(call: Call, flow: LabelFlow) -> None:
    """The channels that make up one output channel go together."""
    source, axis = call.args[0], call.args[0].ndim - 3
    blocks = source.shape[axis] // int(call.args[1]) ** 2
    tie_blocks(call, axis, blocks, False, flow)
    layers: list[Layer] = []
    for layer in flow.layers(source):
        kept = flow.without(
            layer, frozenset({axis + 1, axis + 2}), "pixel_shuffle spreads other channels over this axis"
        )
        if kept is not None and axis in kept.support:
            shape = [*kept.ids.shape[:axis], blocks, -1, *kept.ids.shape[axis + 1 :]]
            ids, zero = kept.ids.reshape(shape), kept.zero.reshape(shape)
            kept = Layer(ids.select(axis + 1, 0), zero.all(dim=axis + 1), (layer,))
            keep_single(layer, kept, flow)
        if kept is not None:
            layers.append(kept)
    flow.put(call.result, layers)


@rule(aten.im2col)
def im2col(call: Call, flow: LabelFlow) -> None:
    """Every channel becomes as many as there are pixels in a patch."""
    source, kernel = call.args[0], math.prod(call.args[1])
    channel = source.ndim - 3
    swept = frozenset({channel + 1, channel + 2})
    layers: list[Layer] = []
    for kept in flow.all_without(flow.layers(source), swept, "patches are cut along this axis"):
        ids, zero = (t.flatten(-2) for t in (kept.ids, kept.zero))
        if channel in kept.support:
            ids, zero = (t.repeat_interleave(kernel, channel) for t in (ids, zero))
        layers.append(Layer(ids, zero, (kept,)))
    flow.put(call.result, layers)


@rule(aten.col2im)
def col2im(call: Call, flow: LabelFlow) -> None:
    """The rows that make up one channel go together; patches are added, so zeros stay zeros."""
    source, kernel = call.args[0], math.prod(call.args[2])
    rows = source.ndim - 2
    tie_blocks(call, rows, source.shape[rows] // kernel, False, flow)
    layers: list[Layer] = []
    laid_out = frozenset({rows + 1})
    for kept in flow.all_without(flow.layers(source), laid_out, "patches are laid out along this axis"):
        ids, zero = kept.ids, kept.zero
        if rows in kept.support:
            ids, zero = (t.unflatten(rows, (-1, kernel)) for t in (ids, zero))
            ids, zero = ids.select(rows + 1, 0), zero.all(dim=rows + 1)
        layers.append(Layer(ids.unsqueeze(-1), zero.unsqueeze(-1), (kept,)))
        keep_single(kept, layers[-1], flow)
    flow.put(call.result, layers)


def keep_single(before: Layer, after: Layer, flow: LabelFlow) -> None:
    """Freeze channels all of which make up one, as in the last layer of a net that enlarges grey images."""
    if before.support and not after.support:
        flow.freeze(before.ids, "all of these channels together are one, and one must stay")


def tie_blocks(call: Call, axis: int, blocks: int, across: bool, flow: LabelFlow) -> None:
    """Cut the axis into blocks and tie labels at the same place of all blocks, or within each block."""
    for layer in flow.layers(call.args[0]):
        if axis in layer.support:
            grid = layer.ids.movedim(axis, 0)
            grid = grid.reshape(blocks, -1, *grid.shape[1:])
            flow.bind(grid, grid[:1] if across else grid[:, :1])
