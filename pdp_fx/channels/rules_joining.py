"""Rules for operations that lay channels side by side: cat, stack, padding."""

from __future__ import annotations

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, shaped
from pdp_fx.channels.record import Call, Sized
from pdp_fx.channels.rules_layout import laid_out_anew
from pdp_fx.channels.rules_pointwise import BARE_REMEDY, meeting

aten = torch.ops.aten

SHARED = "these channels are joined with those inside others, such as heads, which all have these"
BARE = "these channels are joined with values that have none along this axis"


@rule(aten.cat)
def cat(call: Call, flow: LabelFlow) -> None:
    """Lay labels side by side along the joined axis, and tie them along the others."""
    tensors: list[Tensor] = [tensor for tensor in call.args[0] if tensor.shape != (0,)]
    if not tensors:
        flow.put(call.result, [])
        return
    axis = int(call.argument(1, "dim", 0)) % call.result.ndim
    _join(tensors, axis, call.result, flow)


@rule(aten.stack)
def stack(call: Call, flow: LabelFlow) -> None:
    """Tie the labels of all tensors, so that all lose the same channels."""
    tensors: list[Tensor] = list(call.args[0])
    axis = int(call.argument(1, "dim", 0)) % call.result.ndim
    views = [tensor.unsqueeze(axis) for tensor in tensors]
    for tensor, view in zip(tensors, views, strict=True):
        flow.put(view, [_unsqueezed(layer, axis) for layer in flow.layers(tensor)])
    _join(views, axis, call.result, flow)


def _unsqueezed(layer: Layer, axis: int) -> Layer:
    return Layer(layer.ids.unsqueeze(axis), layer.zero.unsqueeze(axis), (layer,), free=layer.free)


def _join(tensors: list[Tensor], axis: int, result: Tensor, flow: LabelFlow) -> None:
    """Concatenate labels along ``axis``: layers along other axes must agree, those along it line up."""
    across = [[layer for layer in flow.layers(t) if axis not in layer.support] for t in tensors]
    joined = [[layer for layer in flow.layers(t) if axis in layer.support] for t in tensors]
    _keep_one_axis(joined, across, axis, flow)
    layers = tie_across(across, flow)
    if any(joined):
        pieces = [_piece(found, t, axis, flow) for found, t in zip(joined, tensors, strict=True)]
        layers.append(_concatenate(pieces, axis))
    flow.put(result, layers)


def _keep_one_axis(joined: list[list[Layer]], across: list[list[Layer]], axis: int, flow: LabelFlow) -> None:
    """Where what is inside heads is joined with what all heads share, whole heads can go, or else that.

    Args:
        joined: for each tensor its layers along the joined axis; changed.
        across: for each tensor its other layers; changed.
        axis: the joined axis.
        flow: the labels.
    """
    wide = [layer for layers in joined for layer in layers if len(layer.support) > 1]
    outer = frozenset[int]().union(*(layer.support for layer in wide)) - {axis}
    if not outer or all(any(outer <= layer.support for layer in layers) for layers in joined):
        return
    inner = flow.takes_inner(torch.cat([layer.ids.reshape(-1) for layer in wide]))
    given_up = outer if inner else frozenset({axis})
    for place, layers in enumerate(joined):
        kept = flow.all_without(layers, given_up, SHARED)
        joined[place] = [layer for layer in kept if axis in layer.support]
        across[place] += [layer for layer in kept if axis not in layer.support]


def tie_across(across: list[list[Layer]], flow: LabelFlow) -> list[Layer]:
    """Tie layers that lie along the same axes in every tensor; freeze the others."""
    across = _without_bare_axes(across, flow)
    merged: list[Layer] = []
    for layer in across[0]:
        peers = [next((p for p in layers if p.support == layer.support), None) for layers in across]
        found = [peer for peer in peers if peer is not None]
        if len(found) < len(across):
            continue
        for peer in found[1:]:
            flow.tie(layer.ids, peer.ids)
        zero = torch.stack(torch.broadcast_tensors(*(peer.zero for peer in found))).all(dim=0)
        merged.append(Layer(layer.ids, zero, tuple(found), free=all(peer.free for peer in found)))
    matched = {id(peer) for new in merged for peer in new.needs}
    for layers in across:
        for layer in layers:
            if id(layer) not in matched:
                flow.freeze(layer.ids, BARE, BARE_REMEDY)
    return merged


def _without_bare_axes(across: list[list[Layer]], flow: LabelFlow) -> list[list[Layer]]:
    """Forbid dropping along an axis on which another tensor has no labels.

    If channels also lie along another axis, as those of heads do, whole slices across the axis can still go.
    """

    def bare(covered: list[frozenset[int]]) -> frozenset[int]:
        return frozenset[int]().union(*covered) - covered[0].intersection(*covered)

    return meeting(across, bare, BARE, flow)


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
    zeros = flow.is_zero(call.argument(2, "value", 0))
    layers: list[Layer] = []
    for layer in flow.layers(source):
        ids, zero = layer.ids, layer.zero & zeros
        for index in range(0, len(widths), 2):
            axis = source.ndim - 1 - index // 2
            if axis in layer.support and (widths[index] or widths[index + 1]):
                ids, zero = _padded(ids, zero, axis, (widths[index], widths[index + 1]), zeros, flow)
        layers.append(Layer(ids, zero, (layer,)))
        if laid_out_anew(layer, layers[-1]):
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
            flags.insert(0 if front else len(flags), torch.full(shape, is_zero, device="cpu"))
    return torch.cat(parts, dim=axis), torch.cat(flags, dim=axis)
