"""Which values may differ at the next call of the same graph.

They depend on inputs, weights, random numbers, or sizes of axes that no weight has. If such a value chooses
channels, the choice cannot be rewritten for the channels that stay.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional

from pdp_fx.channels.counts import has_fixed_size
from pdp_fx.channels.record import Record
from pdp_fx.ops.kinds import attribute
from pdp_fx.weights.sources import asks_kind, asks_size, sources_of


def note_varying(gm: fx.GraphModule, node: fx.Node, record: Record, drew: bool) -> None:
    """Note whether the result of ``node`` may differ at the next call.

    Args:
        gm: the graph module that runs.
        node: a node that has run.
        record: what is known of the nodes before it.
        drew: whether it drew random numbers.
    """
    if drew or node.op in ("placeholder", "call_module") or node.meta.get("opaque"):
        record.varying.add(node.name)
    elif node.op == "get_attr":
        stored = attribute(gm, node.target)
        # `convert` checks that tables of whole numbers are those of `prepare`.
        if isinstance(stored, nn.Parameter) or (isinstance(stored, Tensor) and stored.is_floating_point()):
            record.varying.add(node.name)
    elif node.target == "item" and any(source.op == "get_attr" for source in sources_of(node)):
        # A counter, not a table.
        record.varying.add(node.name)
    elif asks_size(node):
        _note_size(gm, node, record)
    elif not asks_kind(node) and any(_is_varying(source, node, record) for source in node.all_input_nodes):
        record.varying.add(node.name)


def _note_size(gm: fx.GraphModule, node: fx.Node, record: Record) -> None:
    """Note whether a size that ``node`` reads may differ: only axes of channels and of weights cannot."""
    source: Any = node.args[0]
    asked = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    values = record.values.get(source.name, ()) if isinstance(source, fx.Node) else ()
    if node.target == "dim" or asked == "ndim" or not values:
        return
    rank = len(values[0].shape)
    channels = frozenset(axis for axis in range(rank) if has_fixed_size(source, axis, record))
    free = frozenset(range(rank)) - channels - _axes_of_weights(gm, source, rank)
    if node.target == "size" and isinstance(asked, int):
        free &= {asked % rank}
    elif node.target == "size" or asked == "shape":
        record.free_axes[node.name] = (free, rank)
        return
    if free:
        record.varying.add(node.name)


def _axes_of_weights(gm: fx.GraphModule, tensor: fx.Node, rank: int) -> frozenset[int]:
    """The axes of a tensor that have the sizes of weights, because layers that read it take no others."""
    axes = set[int]()
    for user in tensor.users:
        if user.args[:1] != (tensor,):
            continue
        if user.target in _OF_LAYERS and len(user.args) > 1:
            weight = user.args[1]
            if isinstance(weight, fx.Node) and weight.op == "get_attr":
                axes.add(rank - _OF_LAYERS[user.target])
        if user.op != "call_module":
            continue
        layer = gm.get_submodule(str(user.target))
        if isinstance(layer, nn.Linear):
            axes.add(rank - 1)
        elif isinstance(layer, nn.modules.conv._ConvNd):
            axes.add(rank - 1 - len(layer.kernel_size))
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            axes.update(range(rank - len(layer.normalized_shape), rank))
    return frozenset(axes)


_OF_LAYERS: dict[Any, int] = {
    functional.linear: 1,
    functional.conv1d: 2,
    functional.conv2d: 3,
    functional.conv3d: 4,
}
"""Functions that layers compute by, and which axis, counted from the last, has the size of their weight."""


def _is_varying(source: fx.Node, user: fx.Node, record: Record) -> bool:
    """Whether what ``user`` reads of ``source`` varies; of a shape it may read a single size."""
    if source.name not in record.free_axes:
        return source.name in record.varying
    free, rank = record.free_axes[source.name]
    place = user.args[1] if user.target is operator.getitem else None
    return place % rank in free if isinstance(place, int) else bool(free)


def given_varying(node: fx.Node, record: Record) -> bool:
    """Whether any argument of ``node`` but the first varies."""
    source = node.args[0] if node.args else None
    return any(given.name in record.varying for given in node.all_input_nodes if given is not source)
