"""Tensors that are made inside the model: zeros, ones, ranges, random numbers."""

from __future__ import annotations

import torch

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_layout import free_layer
from pdp_fx.tracing.structure import flat_tensors

aten = torch.ops.aten


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


@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
def like(call: Call, flow: LabelFlow) -> None:
    """A tensor of one value, or of none yet, in the shape of another carries the other's channels."""
    zero = call.func.overloadpacket is not aten.empty_like and bool((call.result == 0).all())
    layers = flow.layers(call.args[0])
    flow.put(call.result, [Layer(layer.ids, torch.full_like(layer.zero, zero)) for layer in layers])


@rule(aten.empty, aten.new_empty, aten.empty_strided)
def unset(call: Call, flow: LabelFlow) -> None:
    """Unset memory loses any index."""
    result = call.result
    flow.put(result, [free_layer(result, axis, False, flow) for axis, n in enumerate(result.shape) if n > 1])


@rule(aten.randint, aten.randperm)
def drawn_places(call: Call, flow: LabelFlow) -> None:
    """Random places carry no channels."""
    flow.put(call.result, ())


@rule(
    aten.rand, aten.randn, aten.rand_like, aten.randn_like,
    aten.bernoulli, aten.bernoulli_, aten.normal, aten.normal_, aten.uniform_, aten.exponential_,
    aten.native_dropout,
)  # fmt: skip
def drawn(call: Call, flow: LabelFlow) -> None:
    """Each number is drawn in its turn, so that none can be left out."""
    why = "random numbers are drawn here in eval mode, too, and for fewer channels they would be others"
    flow.freeze_all(call.tensors(), why)
    for result in flat_tensors(call.result):
        layers = [free_layer(result, axis, False, flow) for axis, n in enumerate(result.shape) if n > 1]
        for layer in layers:
            flow.freeze(layer.ids, why)
        flow.put(result, layers)


@rule(aten.zero_, aten.fill_)
def filled(call: Call, flow: LabelFlow) -> None:
    """One value everywhere belongs to the same channels; only zeros vanish with them."""
    zero = call.func.overloadpacket is aten.zero_ or (call.func is aten.fill_.Scalar and call.args[1] == 0)
    layers = flow.layers(call.args[0])
    flow.put(
        call.result, [Layer(layer.ids, torch.full_like(layer.zero, zero), layer.needs) for layer in layers]
    )
