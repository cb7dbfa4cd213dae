"""Rules for operations on slices along some axes: running sums, sorting, Fourier transforms.

Channels along these axes stay; channels along the other axes do not mix and can go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, from_front
from pdp_fx.channels.record import Call
from pdp_fx.tracing.structure import tensors

aten = torch.ops.aten

NEVER_ZERO = frozenset({aten.logcumsumexp, aten.logsumexp})
"""Those that make something else of a slice of zeros."""


@rule(
    aten.cumsum, aten.cumsum_, aten.cumprod, aten.cumprod_, aten.cummax, aten.cummin, aten.sort, aten.topk,
    aten.kthvalue, aten.median, aten.nanmedian, aten.mode, aten.argmax, aten.argmin, aten.argsort,
    aten.logcumsumexp, aten.logsumexp, aten._fft_r2c, aten._fft_c2r, aten._fft_c2c, aten.rot90,
)  # fmt: skip
def slices(call: Call, flow: LabelFlow) -> None:
    """Freeze channels along the slices, and keep others; indices that are returned need not be 0 for 0."""
    source: Tensor = call.args[0]
    axes, packet = _axes(call), call.func.overloadpacket
    why = f"{packet.__name__.removeprefix('_')} runs over these channels"
    moved = flow.all_without(flow.layers(source), axes, why)
    for result in tensors(call.result):
        vanishes = packet not in NEVER_ZERO and (result.is_floating_point() or result.is_complex())
        gone = axes if result.ndim < source.ndim else frozenset[int]()
        flow.put(result, [_sliced(layer, gone, vanishes) for layer in moved])


def _axes(call: Call) -> frozenset[int]:
    """The axes that an operation runs along: those it names, its default, or all."""
    given, default = call.named(), {a.name: a.default_value for a in call.func._schema.arguments}
    named: Any = given.get("dims", given.get("dim", default.get("dim", default.get("dims"))))
    ndim = call.args[0].ndim
    listed = range(ndim) if named is None else [named] if isinstance(named, int) else named
    return frozenset(from_front(axis, ndim) for axis in listed)


def _sliced(layer: Layer, gone: frozenset[int], vanishes: bool) -> Layer:
    shape = [size for axis, size in enumerate(layer.ids.shape) if axis not in gone]
    zero = layer.zero if vanishes else torch.zeros_like(layer.zero)
    return Layer(layer.ids.reshape(shape), zero.reshape(shape), (layer,))


@rule(aten.tril, aten.triu)
def triangle(call: Call, flow: LabelFlow) -> None:
    """One half of every matrix along the last two axes is 0."""
    source: Tensor = call.args[0]
    matrix = frozenset({source.ndim - 2, source.ndim - 1})
    why = "these channels lie along an axis of a matrix of which one half is 0"
    flow.put(call.result, flow.all_without(flow.layers(source), matrix, why))


@rule(aten.renorm)
def renorm(call: Call, flow: LabelFlow) -> None:
    """The norm of every slice across one axis is limited: what is 0 stays 0."""
    source, axis = call.args[0], int(call.args[2])
    others = frozenset(range(source.ndim)) - {from_front(axis, source.ndim)}
    why = "renorm takes a norm over these channels"
    flow.put(call.result, flow.all_without(flow.layers(source), others, why))


@rule(aten._conj, aten.resolve_conj, aten._neg_view, aten.resolve_neg)
def other_form(call: Call, flow: LabelFlow) -> None:
    """The same numbers in memory, or their conjugates."""
    flow.put(call.result, [Layer(layer.ids, layer.zero, (layer,)) for layer in flow.layers(call.args[0])])


@rule(aten.view_as_complex)
def view_as_complex(call: Call, flow: LabelFlow) -> None:
    """The two numbers of the last axis become one."""
    source: Tensor = call.args[0]
    last = frozenset({source.ndim - 1})
    why = "these channels are the two parts of complex numbers"
    moved = flow.all_without(flow.layers(source), last, why)
    flow.put(call.result, [_sliced(layer, last, True) for layer in moved])


@rule(aten.view_as_real)
def view_as_real(call: Call, flow: LabelFlow) -> None:
    """A number becomes two, which vanish with it."""
    layers = flow.layers(call.args[0])
    flow.put(
        call.result, [Layer(layer.ids.unsqueeze(-1), layer.zero.unsqueeze(-1), (layer,)) for layer in layers]
    )
