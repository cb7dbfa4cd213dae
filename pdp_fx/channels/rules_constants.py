"""Rules for operations that create tensors: zeros, ones, ranges, random numbers."""

from __future__ import annotations

import torch

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_layout import free_layer
from pdp_fx.channels.rules_pointwise import with_scratch
from pdp_fx.tracing.structure import flat_tensors

aten = torch.ops.aten


@rule(
    aten.zeros,
    aten.ones,
    aten.full,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.scalar_tensor,
)
def factory(call: Call, flow: LabelFlow) -> None:
    """A tensor with one value everywhere can lose any index."""
    result = call.result
    if result.numel() < 2:
        flow.put(result, ())
        return
    zero = bool((result == 0).all()) and _stays_zero(call, flow)
    flow.put(result, [free_layer(result, axis, zero, flow) for axis, n in enumerate(result.shape) if n > 1])


@rule(aten.arange, aten.linspace, aten.eye, aten.tril_indices, aten.triu_indices)
def series(call: Call, flow: LabelFlow) -> None:
    """A tensor whose values follow from their places keeps all, also where they are equal by chance."""
    flow.put(call.result, ())


@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
def like(call: Call, flow: LabelFlow) -> None:
    """A constant or uninitialised tensor in the shape of another carries the other's channels."""
    zero = call.func.overloadpacket is not aten.empty_like and bool((call.result == 0).all())
    zero = zero and _stays_zero(call, flow)
    layers = flow.layers(call.args[0])
    flow.put(call.result, [Layer(layer.ids, torch.full_like(layer.zero, zero)) for layer in layers])


_ZEROS = frozenset({aten.zeros, aten.new_zeros, aten.zeros_like})
"""Operations that fill with 0 without being told."""


def _stays_zero(call: Call, flow: LabelFlow) -> bool:
    """Whether what is filled with 0 is so at the next call, too: by a number that is told if none varies."""
    return call.func.overloadpacket in _ZEROS or not flow.varies


@rule(aten.empty, aten.new_empty, aten.empty_strided)
def unset(call: Call, flow: LabelFlow) -> None:
    """An uninitialised tensor can lose any index."""
    result = call.result
    flow.put(result, [free_layer(result, axis, False, flow) for axis, n in enumerate(result.shape) if n > 1])


@rule(aten.randint, aten.randperm)
def drawn_places(call: Call, flow: LabelFlow) -> None:
    """Random indices carry no channels."""
    flow.put(call.result, ())


@rule(
    aten.rand, aten.randn, aten.rand_like, aten.randn_like,
    aten.bernoulli, aten.bernoulli_, aten.normal, aten.normal_, aten.uniform_, aten.exponential_,
    aten.native_dropout,
)  # fmt: skip
def drawn(call: Call, flow: LabelFlow) -> None:
    """Freeze the channels of random numbers: with fewer of them the others would be drawn differently."""
    why = "random numbers are drawn here in eval mode, too, and for fewer channels they would be others"
    flow.freeze_all(call.tensors(), why)
    for result in flat_tensors(call.result):
        layers = [free_layer(result, axis, False, flow) for axis, n in enumerate(result.shape) if n > 1]
        for layer in layers:
            flow.freeze(layer.ids, why)
        flow.put(result, layers)


@rule(aten.rrelu_with_noise, aten.rrelu_with_noise_)
def leaky(call: Call, flow: LabelFlow) -> None:
    """A leaky ReLU, whose slopes are drawn if it is told that it trains."""
    (drawn if call.argument(4, "training", False) else with_scratch)(call, flow)


@rule(aten.zero_, aten.fill_)
def filled(call: Call, flow: LabelFlow) -> None:
    """Filling with one value keeps the channels; only filled with zeros is it 0 for dropped channels."""
    zero = flow.fills_with_zero(call)
    layers = flow.layers(call.args[0])
    flow.put(
        call.result, [Layer(layer.ids, torch.full_like(layer.zero, zero), layer.needs) for layer in layers]
    )
