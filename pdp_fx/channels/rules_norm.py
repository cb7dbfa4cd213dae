"""Normalisation and reductions.

BatchNorm works channel by channel: whatever reaches it, its own weight and bias decide the
channel's value, so a mask on these two makes the channel 0. Norms whose statistics run over the
channels themselves change when a channel is dropped, unless they are given a mask of the channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, from_front, shaped
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_compute import axis_layer, channel_layer, consume
from pdp_fx.channels.rules_pointwise import pointwise

aten = torch.ops.aten


@rule(
    aten.native_batch_norm, aten._native_batch_norm_legit_no_training, aten.cudnn_batch_norm,
    aten._native_batch_norm_legit, aten._batch_norm_no_update, aten.miopen_batch_norm,
)  # fmt: skip
def batch_norm(call: Call, flow: LabelFlow) -> None:
    """Tie weight, bias and running statistics to the channels; weight and bias decide what is 0."""
    source = call.args[0]
    result = call.result[0]
    read = channel_layer(source, 1, flow, "it lies along an axis that BatchNorm averages over")
    given = [tensor for tensor in call.args[1:5] if isinstance(tensor, Tensor)]
    if read is None:
        flow.freeze_all(given, "BatchNorm of values that have no channels")
        flow.put(result, ())
        return
    for tensor in given:
        _tie_affine(tensor, read, flow)
    affine = [axis_layer(t, 0, flow) for t in call.args[1:3] if isinstance(t, Tensor)]
    scale = [layer for layer in affine if layer is not None]
    ids = read.ids.reshape(-1)
    needs = tuple(scale)
    zero = torch.zeros_like(ids, dtype=torch.bool)
    if len(scale) == 2:
        zero = (scale[0].zero & scale[1].zero).reshape(-1)
    elif _uses_own_statistics(call) and not scale:
        zero, needs = read.zero.reshape(-1), (read,)
    flow.put(result, [Layer(shaped(ids, 1, result.ndim), shaped(zero, 1, result.ndim), needs)])


def _uses_own_statistics(call: Call) -> bool:
    """Whether the input's own mean is subtracted, as instance norm does: zeros stay zeros."""
    own = (aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm)
    return call.func.overloadpacket in own and bool(call.argument(5, "training", False))


@rule(aten.native_layer_norm, aten.native_group_norm, aten._fused_rms_norm)
def channel_statistics(call: Call, flow: LabelFlow) -> None:
    """If statistics run over the channels themselves, the norm needs a mask, or every channel stays."""
    source, result = call.args[0], call.result[0]
    name = call.func.overloadpacket.__name__.removeprefix("native_").removeprefix("_fused_")
    affine = [tensor for tensor in call.args[1:] if isinstance(tensor, Tensor)]
    why = f"the statistics of {name} run over these channels"
    normalised, groups = _normalised_axes(call), _groups(call)
    axis = 1 if groups else source.ndim - 1
    over_channels = groups > 0 or normalised == frozenset({axis})
    kept: list[Layer] = []
    masked = False
    for layer in flow.layers(source):
        is_normalised = over_channels and layer.support == frozenset({axis})
        if is_normalised and groups > 1:
            _keep_even(layer.ids.reshape(groups, -1), flow)
        if is_normalised and flow.normalise(layer, axis, why, gated=not groups):
            masked = True
            kept.append(Layer(layer.ids, torch.ones_like(layer.zero)))
            for tensor in affine:
                _tie_affine(tensor, layer, flow)
            continue
        moved = flow.without(layer, normalised, why)
        if moved is not None:
            zero = moved.zero & (not _adds(call))
            kept.append(Layer(moved.ids, zero, (moved,), free=moved.free))
    if not masked:
        flow.freeze_all(affine, why)
    flow.put(result, kept)


def _keep_even(grid: Tensor, flow: LabelFlow) -> None:
    """Keep groups of equal size: whole groups go if each is one class, else the same positions of all."""
    classes = flow.classes(grid)
    if (classes != classes[:, :1]).any():
        flow.bind(grid, grid[:1])


def _tie_affine(tensor: Tensor, layer: Layer, flow: LabelFlow) -> None:
    """Tie what a norm multiplies with, adds or subtracts for each channel to the channels."""
    own = axis_layer(tensor, 0, flow)
    if own is not None:
        flow.tie(own.ids.reshape(-1), layer.ids.reshape(-1))
    elif tensor.numel() > 1:
        flow.freeze(layer.ids, "a norm scales or shifts them by values that have no channels")


def _adds(call: Call) -> bool:
    """Whether a norm adds a bias in the end."""
    place = {aten.native_layer_norm: 3, aten.native_group_norm: 2}.get(call.func.overloadpacket)
    return place is not None and isinstance(call.args[place], Tensor)


def _groups(call: Call) -> int:
    """The number of groups of a group norm, or 0."""
    return int(call.args[6]) if call.func.overloadpacket is aten.native_group_norm else 0


def _normalised_axes(call: Call) -> frozenset[int]:
    source: Tensor = call.args[0]
    if call.func.overloadpacket is aten.native_group_norm:
        return frozenset(range(1, source.ndim))
    return frozenset(range(source.ndim - len(call.args[1]), source.ndim))


SPATIAL = {
    aten.max_pool2d_with_indices: 2, aten.max_pool3d_with_indices: 3, aten.avg_pool2d: 2,
    aten.avg_pool3d: 3, aten._adaptive_avg_pool2d: 2, aten._adaptive_avg_pool3d: 3,
    aten.adaptive_max_pool2d: 2, aten.adaptive_max_pool3d: 3, aten.upsample_nearest1d: 1,
    aten.upsample_nearest2d: 2, aten.upsample_nearest3d: 3, aten._upsample_nearest_exact2d: 2,
    aten._upsample_nearest_exact1d: 1, aten._upsample_nearest_exact3d: 3,
    aten.upsample_bilinear2d: 2, aten.upsample_bicubic2d: 2, aten.upsample_linear1d: 1,
    aten.upsample_trilinear3d: 3, aten._upsample_bilinear2d_aa: 2, aten._upsample_bicubic2d_aa: 2,
    aten.reflection_pad2d: 2, aten.replication_pad2d: 2, aten.reflection_pad1d: 1,
    aten.replication_pad1d: 1, aten.reflection_pad3d: 3, aten.replication_pad3d: 3, aten.max_pool2d: 2,
    aten.adaptive_avg_pool1d: 1, aten.avg_pool1d: 1,
}  # fmt: skip
"""Operations on the last axes only, with the number of these axes; zero stays zero in all of them."""


@rule(*SPATIAL)
def spatial(call: Call, flow: LabelFlow) -> None:
    """Pooling, resampling and border padding keep the channels, and freeze labels along the axes they sweep.

    Max pooling also returns the indices of the largest values, which are not 0 for dropped channels.
    """
    source = call.args[0]
    results = [call.result] if isinstance(call.result, Tensor) else list(call.result)
    swept = frozenset(range(source.ndim - SPATIAL[call.func.overloadpacket], source.ndim))
    why = f"{call.func.overloadpacket.__name__} sweeps over these channels"
    moved = flow.all_without(flow.layers(source), swept, why)
    for result in results:
        vanishes = result.is_floating_point()
        flow.put(
            result, [Layer(layer.ids, layer.zero & vanishes, (layer,), free=layer.free) for layer in moved]
        )


@rule(aten.max_unpool2d, aten.max_unpool3d)
def unpooling(call: Call, flow: LabelFlow) -> None:
    """Unpooling puts values back to the indices they came from, with zeros elsewhere, channel by channel."""
    source, places = call.args[:2]
    axis = source.ndim - (3 if call.func.overloadpacket is aten.max_unpool2d else 4)
    why = "it lies along an axis that is unpooled"
    read, where = (channel_layer(tensor, axis, flow, why) for tensor in (source, places))
    if read is None or where is None:
        flow.freeze_all([source, places], "unpooling joins these channels with values that have none")
        flow.put(call.result, ())
        return
    flow.tie(read.ids, where.ids)
    flow.put(call.result, [Layer(read.ids, read.zero, (read,))])


def _axes(source: Tensor, axes: Any) -> frozenset[int]:
    if axes is None or (isinstance(axes, (list, tuple)) and not axes):
        return frozenset(range(source.ndim))
    listed = [axes] if isinstance(axes, int) else list(axes)
    return frozenset(from_front(axis, source.ndim) for axis in listed)


@rule(
    aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.prod,
    aten.max, aten.min, aten.any, aten.all, aten.norm, aten.linalg_vector_norm, aten.nansum, aten.aminmax,
    aten.count_nonzero,
)  # fmt: skip
def reduction(call: Call, flow: LabelFlow) -> None:
    """Reducing other axes keeps channels; a sum over channels needs them to be 0; the rest freezes them."""
    packet = call.func.overloadpacket
    if packet in (aten.max, aten.min) and len(call.tensors()) > 1:
        flow.freeze_all(call.tensors(), f"no channel rule for {call.func}")
        return
    source, keepdim, axes = _reduction_arguments(call)
    if packet is aten.linalg_vector_norm and float(call.argument(1, "ord", 2)) < 1:
        flow.freeze_all([source], "a norm of order below 1 runs over it")
    results = [call.result] if isinstance(call.result, Tensor) else list(call.result)
    kept: list[Layer] = []
    for layer in flow.layers(source):
        if layer.support <= axes and packet in (aten.sum, aten.nansum, aten.linalg_vector_norm):
            consume(layer, layer, flow)
            continue
        why = f"{packet.__name__} runs over these channels"
        counts = packet is aten.mean or (packet in (aten.var, aten.std) and not source.is_complex())
        if counts and layer.support <= axes and len(layer.support) == 1:
            flow.normalise(layer, min(layer.support), why, gated=True)
            continue
        moved = flow.without(layer, axes, why)
        if moved is not None:
            kept.append(moved)
    for place, result in enumerate(results):
        # With the greatest or the least come their places.
        vanishing = packet in _VANISHING or (packet in (aten.max, aten.min) and place == 0)
        flow.put(result, [_reduced(layer, axes, keepdim, vanishing) for layer in kept])


def _reduction_arguments(call: Call) -> tuple[Tensor, bool, frozenset[int]]:
    source: Tensor = call.args[0]
    given = call.named()
    return source, bool(given.get("keepdim", False)), _axes(source, given.get("dim"))


_VANISHING = frozenset({
    aten.mean, aten.sum, aten.nansum, aten.amax, aten.amin, aten.aminmax, aten.linalg_vector_norm,
    aten.count_nonzero, aten.prod,
})  # fmt: skip
"""Reductions of zeros that give zero."""


def _reduced(layer: Layer, axes: frozenset[int], keepdim: bool, vanishing: bool) -> Layer:
    ids, zero = layer.ids, layer.zero
    if not keepdim:
        shape = [size for axis, size in enumerate(ids.shape) if axis not in axes]
        ids, zero = ids.reshape(shape), zero.reshape(shape)
    return Layer(ids, zero if vanishing else torch.zeros_like(zero), (layer,), free=layer.free)


@rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss)
def loss(call: Call, flow: LabelFlow) -> None:
    """A pointwise operation, and its mean or sum if the call says so."""
    given = call.named()
    how = {0: None, 1: aten.mean.default, 2: aten.sum.default}[given.pop("reduction", 1)]
    each = Call(call.func, (), given | {"reduction": 0}, call.func(**given, reduction=0))
    pointwise(each, flow)
    if how is None:
        flow.put(call.result, flow.layers(each.result))
    else:
        reduction(Call(how, (each.result,), {}, call.result), flow)


@rule(aten._softmax, aten._log_softmax, aten._safe_softmax)
def softmax(call: Call, flow: LabelFlow) -> None:
    """A softmax over the channels changes with each of them; over another axis it is never 0."""
    source = call.args[0]
    axis = from_front(call.args[1], source.ndim)
    moved = flow.all_without(flow.layers(source), frozenset({axis}), "a softmax runs over these channels")
    flow.put(call.result, [Layer(m.ids, torch.zeros_like(m.zero), (m,), free=m.free) for m in moved])
