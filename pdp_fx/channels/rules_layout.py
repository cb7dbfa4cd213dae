"""Layout operations are executed on the labels themselves.

No index arithmetic is written down here: a view, permute or slice of a tensor is the same view,
permute or slice of its labels. What these operations need of sizes written into the program is
checked where the graph node is known (``resize``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdp_fx.channels.flow import Call, LabelFlow, Sized, rule
from pdp_fx.channels.labels import Layer, compress, shaped

aten = torch.ops.aten

SIZED = frozenset({
    aten.index_select, aten.index, aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias,
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.narrow, aten.chunk,
    aten.repeat, aten.unfold, aten.roll, aten.diagonal, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.channel_shuffle, aten.expand, aten.constant_pad_nd,
})  # fmt: skip
"""Operations that are told sizes, positions or counts, which may be those of a channel axis."""


@rule(
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand,
    aten.squeeze, aten.unsqueeze, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind,
    aten.flip, aten.roll, aten.unfold, aten.pixel_unshuffle, aten.repeat, aten.clone, aten.detach,
    aten.alias, aten._to_copy, aten.narrow, aten.diagonal, aten.lift_fresh, aten.contiguous, aten.movedim,
    aten._reshape_alias, aten.chunk, aten.index_select, aten.index,
)  # fmt: skip
def layout(call: Call, flow: LabelFlow) -> None:
    """Run the operation on every label layer of its tensor."""
    source = call.args[0]
    flow.freeze_all(call.tensors()[1:], "these values choose places of another tensor")
    results = [call.result] if isinstance(call.result, Tensor) else list(call.result)
    moved: list[list[Layer]] = [[] for _ in results]
    for layer in _cut_whole(call, flow):
        for index, new in enumerate(_move(layer, tuple(source.shape), call)):
            moved[index].append(new)
            _note_part(layer, new, call, flow)
            if call.func.overloadpacket in SIZED and _laid_out_anew(layer, new):
                flow.sized.append(Sized(layer, new))
    if call.func.overloadpacket is aten.expand:
        moved[0].extend(_broadcast(source, call.result, flow))
    for result, layers in zip(results, moved, strict=True):
        flow.put(result, _without_overlap(layers, flow))


CUTS = frozenset({
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.narrow, aten.chunk,
    aten.index_select,
})  # fmt: skip
"""Operations that cut one axis, which is their argument ``dim``."""


def _cut_whole(call: Call, flow: LabelFlow) -> list[Layer]:
    """The layers of the source, where what is cut across other channels, or picked by number, stays."""
    source, packet = call.args[0], call.func.overloadpacket
    if packet not in CUTS:
        return list(flow.layers(source))
    names = [argument.name for argument in call.func._schema.arguments]
    axis = int((dict(zip(names, call.args, strict=False)) | call.kwargs).get("dim", 0)) % source.ndim
    layers: list[Layer] = []
    for layer in flow.layers(source):
        if axis in layer.support and len(layer.support) > 1:
            cut = flow.without(layer, frozenset({axis}), "these channels are cut apart")
            layers += [] if cut is None else [cut]
            continue
        if layer.support == frozenset({axis}) and packet is aten.unbind:
            flow.freeze(layer.ids, "each of these channels becomes a tensor of its own")
        elif layer.support == frozenset({axis}) and packet is aten.select:
            why = "this channel is picked by its number"
            flow.freeze(layer.ids.select(axis, int(call.args[2])), why, "give it a layer of its own")
        layers.append(layer)
    return layers


def _broadcast(source: Tensor, result: Tensor, flow: LabelFlow) -> list[Layer]:
    """Labels for the axes that ``expand`` makes: all their indices hold the same values."""
    offset = result.ndim - source.ndim
    made = [a for a, n in enumerate(result.shape) if n > 1 and (a < offset or source.shape[a - offset] == 1)]
    return [free_layer(result, axis, False, flow) for axis in made]


def free_layer(tensor: Tensor, axis: int, zero: bool, flow: LabelFlow) -> Layer:
    """New labels for an axis of ``tensor`` along which all values are the same."""
    ids = shaped(flow.record.ties.fresh(tensor.shape[axis]), axis, tensor.ndim)
    layer = Layer(ids, torch.full_like(ids, zero, dtype=torch.bool), free=True)
    flow.sized.append(Sized(layer, layer))
    return layer


def _without_overlap(layers: list[Layer], flow: LabelFlow) -> list[Layer]:
    """Give up labels that share an axis with others; those of a broadcast axis go first."""
    real = [layer for layer in layers if not layer.free]
    kept: list[Layer] = []
    for layer in layers:
        others = real if layer.free else [other for other in real if other is not layer]
        if any(layer.support & other.support for other in others):
            flow.freeze(layer.ids, "the axis of these channels is merged with another axis of channels")
        else:
            kept.append(layer)
    return kept


def _note_part(before: Layer, part: Layer, call: Call, flow: LabelFlow) -> None:
    """Note a part that is cut out of the channels, which must not become empty."""
    cut = call.func.overloadpacket in CUTS and len(part.support) == 1
    if cut and not part.free and part.ids.numel() < before.ids.numel():
        flow.record.parts.append(part.ids.reshape(-1))


def _laid_out_anew(before: Layer, after: Layer) -> bool:
    """Whether the labels' order, number or axis has changed."""
    same = before.support == after.support and before.ids.ndim == after.ids.ndim
    return not same or not torch.equal(before.ids.reshape(-1), after.ids.reshape(-1))


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
    if packet is aten.view and isinstance(call.args[1], torch.dtype):
        return [labels]
    if packet in (aten.view, aten._unsafe_view, aten._reshape_alias):
        return [labels.reshape(call.args[1])]
    moved: Any = call.func(labels, *call.args[1:], **call.kwargs)
    return [moved] if isinstance(moved, Tensor) else list(moved)


@rule(aten.cat)
def cat(call: Call, flow: LabelFlow) -> None:
    """Lay labels side by side along the joined axis, and tie them along the others."""
    tensors: list[Tensor] = [tensor for tensor in call.args[0] if tensor.shape != (0,)]
    axis = int(call.argument(1, "dim", 0)) % call.result.ndim
    _join(tensors, axis, call.result, flow)


@rule(aten.stack)
def stack(call: Call, flow: LabelFlow) -> None:
    """Tie the labels of all tensors: none can lose a channel alone."""
    tensors: list[Tensor] = list(call.args[0])
    axis = int(call.argument(1, "dim", 0)) % call.result.ndim
    views = [tensor.unsqueeze(axis) for tensor in tensors]
    for tensor, view in zip(tensors, views, strict=True):
        flow.put(view, [_unsqueezed(layer, axis) for layer in flow.layers(tensor)])
    _join(views, axis, call.result, flow)


def _unsqueezed(layer: Layer, axis: int) -> Layer:
    return Layer(layer.ids.unsqueeze(axis), layer.zero.unsqueeze(axis), (layer,))


def _join(tensors: list[Tensor], axis: int, result: Tensor, flow: LabelFlow) -> None:
    """Concatenate labels along ``axis``: layers along other axes must agree, those along it line up."""
    across = [[layer for layer in flow.layers(t) if axis not in layer.support] for t in tensors]
    layers = _tie_across(across, flow)
    joined = [[layer for layer in flow.layers(t) if axis in layer.support] for t in tensors]
    if any(joined):
        pieces = [_piece(found, t, axis, flow) for found, t in zip(joined, tensors, strict=True)]
        layers.append(_concatenate(pieces, axis))
    flow.put(result, layers)


def _tie_across(across: list[list[Layer]], flow: LabelFlow) -> list[Layer]:
    """Tie layers that lie along the same axes in every tensor; freeze the others."""
    merged: list[Layer] = []
    for layer in across[0]:
        peers = [next((p for p in layers if p.support == layer.support), None) for layers in across]
        found = [peer for peer in peers if peer is not None]
        if len(found) < len(across):
            continue
        for peer in found[1:]:
            flow.tie(layer.ids, peer.ids)
        zero = torch.stack(torch.broadcast_tensors(*(peer.zero for peer in found))).all(dim=0)
        merged.append(Layer(layer.ids, zero, tuple(found)))
    matched = {id(peer) for new in merged for peer in new.needs}
    for layers in across:
        for layer in layers:
            if id(layer) not in matched:
                why = "these channels are joined with values that have none along this axis"
                flow.freeze(layer.ids, why, "send those values through a layer of their own first")
    return merged


def _piece(found: list[Layer], tensor: Tensor, axis: int, flow: LabelFlow) -> Layer:
    """The one layer of ``tensor`` along ``axis``; values without labels get frozen ones."""
    for extra in found[1:]:
        flow.freeze(extra.ids, "these channels lie along an axis that is joined")
    if found:
        return found[0]
    ids = shaped(flow.record.ties.fresh(tensor.shape[axis]), axis, tensor.ndim)
    flow.freeze(ids, "these values are not the channels of any layer")
    return Layer(ids, torch.zeros_like(ids, dtype=torch.bool))


def _concatenate(pieces: list[Layer], axis: int) -> Layer:
    ndim = pieces[0].ids.ndim
    wide = [max(piece.ids.shape[a] for piece in pieces) for a in range(ndim)]

    def spread(labels: Tensor) -> Tensor:
        return labels.expand([labels.shape[a] if a == axis else wide[a] for a in range(ndim)])

    ids = torch.cat([spread(piece.ids) for piece in pieces], dim=axis)
    zero = torch.cat([spread(piece.zero) for piece in pieces], dim=axis)
    return Layer(ids, zero, tuple(pieces))


@rule(aten.constant_pad_nd)
def constant_pad_nd(call: Call, flow: LabelFlow) -> None:
    """Padding along an axis without labels keeps them; along a labelled axis it makes new channels."""
    source, widths = call.args[0], list(call.args[1])
    value = call.argument(2, "value", 0)
    layers: list[Layer] = []
    for layer in flow.layers(source):
        ids, zero = layer.ids, layer.zero & (value == 0)
        for index in range(0, len(widths), 2):
            axis = source.ndim - 1 - index // 2
            if axis in layer.support and (widths[index] or widths[index + 1]):
                ids, zero = _padded(ids, zero, axis, (widths[index], widths[index + 1]), value == 0, flow)
        layers.append(Layer(ids, zero, (layer,)))
        if _laid_out_anew(layer, layers[-1]):
            flow.sized.append(Sized(layer, layers[-1]))
    flow.put(call.result, layers)


def _padded(
    ids: Tensor, zero: Tensor, axis: int, widths: tuple[int, int], is_zero: bool, flow: LabelFlow
) -> tuple[Tensor, Tensor]:
    """Add fresh labels on both sides of ``axis``; a negative width crops."""
    low, high = widths
    ids = ids.narrow(axis, max(-low, 0), ids.shape[axis] - max(-low, 0) - max(-high, 0))
    zero = zero.narrow(axis, max(-low, 0), ids.shape[axis])
    parts, flags = [ids], [zero]
    for width, front in ((low, True), (high, False)):
        if width > 0:
            side = shaped(flow.record.ties.fresh(width), axis, ids.ndim)
            shape = [width if a == axis else size for a, size in enumerate(ids.shape)]
            parts.insert(0 if front else len(parts), side.expand(shape))
            flags.insert(0 if front else len(flags), torch.full(shape, is_zero))
    return torch.cat(parts, dim=axis), torch.cat(flags, dim=axis)


@rule(aten.zero_)
def zero(call: Call, flow: LabelFlow) -> None:
    """Zeros belong to the same channels."""
    layers = flow.layers(call.args[0])
    flow.put(call.result, [Layer(layer.ids, torch.ones_like(layer.zero), layer.needs) for layer in layers])


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
        if kept is not None:
            layers.append(kept)
    flow.put(call.result, layers)


def tie_blocks(call: Call, axis: int, blocks: int, across: bool, flow: LabelFlow) -> None:
    """Cut the axis into blocks and tie labels at the same place of all blocks, or within each block."""
    for layer in flow.layers(call.args[0]):
        if axis in layer.support:
            grid = layer.ids.movedim(axis, 0)
            grid = grid.reshape(blocks, -1, *grid.shape[1:])
            flow.bind(grid, grid[:1] if across else grid[:, :1])


@rule(
    aten.zeros, aten.ones, aten.full, aten.new_zeros, aten.new_ones, aten.new_full, aten.scalar_tensor,
    aten.arange, aten.linspace, aten.eye, aten.tril_indices, aten.triu_indices,
)  # fmt: skip
def factory(call: Call, flow: LabelFlow) -> None:
    """A tensor of one value throughout loses any index; one of different values keeps them all."""
    result = call.result
    first = result.reshape(-1)[:1]
    if result.numel() < 2 or not bool((result == first).all()):
        flow.put(result, ())
        return
    zero = bool(first == 0)
    flow.put(result, [free_layer(result, axis, zero, flow) for axis, n in enumerate(result.shape) if n > 1])


@rule(aten.zeros_like, aten.ones_like, aten.full_like)
def like(call: Call, flow: LabelFlow) -> None:
    """A tensor of one value in the shape of another carries the other's channels."""
    zero = bool((call.result == 0).all())
    layers = flow.layers(call.args[0])
    flow.put(call.result, [Layer(layer.ids, torch.full_like(layer.zero, zero)) for layer in layers])


@rule(
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.rand, aten.randn, aten.randint,
    aten.rand_like, aten.randn_like, aten.randperm,
)  # fmt: skip
def unknown_values(call: Call, flow: LabelFlow) -> None:
    """Random numbers and unset memory carry no channels."""
    flow.put(call.result, ())
