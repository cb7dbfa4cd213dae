"""Operations that choose places along one axis by an index, and leave channels along the others alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, shaped
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_compute import axis_layer
from pdp_fx.channels.rules_joining import tie_across

aten = torch.ops.aten

CHOSEN = "its places along the axis of these channels are chosen by an index"


@rule(aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_)
def rows_by_index(call: Call, flow: LabelFlow) -> None:
    """Whole slices go where a vector says, as messages go to the nodes of a graph."""
    into, axis, index, source = call.args[:4]
    flow.freeze_all([index], CHOSEN)
    _chosen(call, axis, [into, source], [], flow)


@rule(aten.scatter_add, aten.scatter_add_, aten.scatter, aten.scatter_)
def scatter(call: Call, flow: LabelFlow) -> None:
    """Every element goes where its own index says, along one axis."""
    into, axis, index, source = call.args[:4]
    if isinstance(source, Tensor) and not call.kwargs:
        _chosen(call, axis, [into, source], [index], flow)
    else:
        flow.freeze_all(call.tensors(), CHOSEN)
        flow.put(call.result, ())


@rule(aten.scatter_reduce, aten.scatter_reduce_)
def scatter_reduce(call: Call, flow: LabelFlow) -> None:
    """As `scatter`, and what meets at one place is reduced: nothing but zeros gives 0, whatever the way."""
    into, axis, index, source = call.args[:4]
    _chosen(call, axis, [into, source], [index], flow)


@rule(aten.gather)
def gather(call: Call, flow: LabelFlow) -> None:
    """Every element is picked by its own index, along one axis."""
    source, axis, index = call.args[:3]
    _chosen(call, axis, [source], [index], flow)


@rule(aten.diagonal)
def diagonal(call: Call, flow: LabelFlow) -> None:
    """Of both axes the same places go, or none: a diagonal beside the main one would move."""
    source, result = call.args[0], call.result
    first, second = (int(call.argument(at + 1, f"dim{at}", at - 1)) % source.ndim for at in (1, 2))
    both = frozenset({first, second})
    ends = [layer for axis in (first, second) if (layer := axis_layer(source, axis, flow)) is not None]
    layers: list[Layer] = []
    if len(ends) == 2 and call.result.shape[-1] == source.shape[first] == source.shape[second]:
        flow.tie(ends[0].ids.reshape(-1), ends[1].ids.reshape(-1))
        needs = tuple(layer for layer in ends if layer.all_zero)[:1] or tuple(ends)
        zero = torch.stack([layer.zero.reshape(-1) for layer in ends]).any(dim=0)
        ids = shaped(ends[0].ids.reshape(-1), result.ndim - 1, result.ndim)
        layers.append(Layer(ids, shaped(zero, result.ndim - 1, result.ndim), needs))
    else:
        ends = []
    for layer in flow.layers(source):
        moved = None if layer in ends else flow.without(layer, both, "a diagonal runs across these channels")
        if moved is not None:
            ids, zero = (labels.diagonal(0, first, second) for labels in (moved.ids, moved.zero))
            layers.append(Layer(ids, zero, (moved,)))
    flow.put(result, layers)


def _chosen(call: Call, axis: int, values: list[Tensor], indices: list[Tensor], flow: LabelFlow) -> None:
    """Tie the labels of all operands along the other axes; zeros are those of the values."""
    axis %= max(call.result.ndim, 1)
    operands = [*values, *indices]
    shapes = {tuple(size for at, size in enumerate(tensor.shape) if at != axis) for tensor in operands}
    if len(shapes) > 1:
        flow.freeze_all(operands, CHOSEN)
        flow.put(call.result, ())
        return
    kept = [
        [flow.without(layer, frozenset({axis}), CHOSEN) for layer in flow.layers(tensor)]
        for tensor in operands
    ]
    across = [[layer for layer in layers if layer is not None] for layers in kept]
    layers: list[Layer] = []
    for merged in tie_across(across, flow):
        made_of = merged.needs[: len(values)]
        zero = torch.stack(torch.broadcast_tensors(*(layer.zero for layer in made_of))).all(dim=0)
        layers.append(Layer(merged.ids, zero, made_of))
    flow.put(call.result, layers)
