"""Rules for operations that only compute weights."""

from __future__ import annotations

import torch

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer
from pdp_fx.channels.record import Call

aten = torch.ops.aten


@rule(aten._weight_norm_interface)
def weight_norm(call: Call, flow: LabelFlow) -> None:
    """Every row of the direction is scaled to the length that it is given.

    A row vanishes with its length. The length of the direction is that of all its columns, so a column
    that goes has to be masked there, too.
    """
    direction, lengths = call.args[:2]
    axis = int(call.argument(2, "dim", 0)) % direction.ndim
    given = next((layer for layer in flow.layers(lengths) if layer.support == frozenset({axis})), None)
    if lengths in flow.stored:
        flow.record.lengths[flow.stored.name(lengths)] = direction.numel() // direction.shape[axis]
    kept: list[Layer] = []
    for layer in flow.layers(direction):
        if axis not in layer.support and layer.all_zero:
            flow.demand(layer)
            kept.append(Layer(layer.ids, layer.zero, (layer,)))
        elif layer.support == frozenset({axis}) and given is not None:
            flow.tie(layer.ids, given.ids)
            kept.append(Layer(given.ids, given.zero, (given,)))
        else:
            flow.freeze(layer.ids, "the length of a row of the weight depends on these channels")
    weight, norms = call.result
    flow.put(weight, kept)
    flow.put(norms, ())
