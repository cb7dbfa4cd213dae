"""The channel structure of a model as a networkx graph.

The graph is bipartite: parameter axes on one side, channel groups on the other, and an edge wherever an axis
carries channels of a group. Attributes are strings and integers, which every exporter of networkx accepts.
"""

from __future__ import annotations

from typing import TypeAlias

import networkx as nx
import numpy as np
from torch import fx, nn

from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.errors import StateError
from pdp_fx.granularity import rule_text
from pdp_fx.ops.kinds import input_axis, kind_of
from pdp_fx.pruner import Pruner, find_one

Graph: TypeAlias = "nx.Graph[str]"

AXIS, GROUP = 0, 1
"""The two sides, as networkx's bipartite algorithms name them."""


NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
)  # fmt: skip


def axis_name(slot: Slot) -> str:
    """A parameter axis as ``layer1.0.conv1.weight[0]``."""
    return f"{slot.tensor}[{slot.axis}]"


def owner_of(slot: Slot) -> str:
    """The module that owns a slot's parameter, by name; for a parameter of the model itself, its own name."""
    return slot.tensor.rpartition(".")[0] or slot.tensor


def roles(gm: fx.GraphModule, channels: ChannelMap) -> dict[Slot, str]:
    """What each axis does with its channels: producer, reader, norm or carrier (`channel_graph`)."""
    producers = {slot for group in (*channels.groups, *channels.frozen) for slot in group.producers}
    contracted = {contraction.weight for contraction in channels.contractions}
    return {slot: "producer" if slot in producers else _role(gm, slot, contracted) for slot in channels.slots}


def _role(gm: fx.GraphModule, slot: Slot, contracted: set[str]) -> str:
    module = gm.get_submodule(slot.tensor.rpartition(".")[0])
    if isinstance(module, NORMS):
        return "norm"
    kind = kind_of(module)
    reads = kind is None or slot.axis == input_axis(module)
    return "reader" if slot.tensor in contracted and reads else "carrier"


def channel_graph(model: nn.Module) -> Graph:
    """The channel structure of a prepared model: which parameter axes carry which channels.

    A node is a parameter axis, such as ``layer1.0.conv1.weight[0]``, the axis of a constant, named by the
    graph's node that makes it, such as ``%arange[0]``, or a channel group, named by the module that makes
    it first. Nodes come in the order in which the model uses them. Every node has

    * ``name``: the node itself, for exporters that number the nodes;
    * ``bipartite``: 0 for an axis, 1 for a group;
    * ``kind``: of a group "group" or "frozen"; of an axis "producer" (a weight that makes channels),
      "reader" (a weight that is contracted with them), "norm" or "carrier" (anything else, such as a bias);
    * ``width``: the number of channels of a group, the length of an axis;
    * ``reasons``: why channels of a group, or all channels of an axis, must stay; one a line, or empty.

    An axis also has ``tensor``, ``module`` and ``axis``; a group has ``rule``, the rule of the spec that
    prunes it, or the empty string. An edge has ``channels``: how many of the group's channels the axis
    carries.

    Raises:
        StateError: the model was never prepared, or without example inputs, or holds several prepared models.

    Example:
        >>> from pdp_fx import Channels, PruneSpec, prepare
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> graph = channel_graph(prepare(net, PruneSpec(Channels(ratio=0.5)), torch.ones(1, 4)))
        >>> sorted(graph["0"])
        ['0.bias[0]', '0.weight[0]', '2.weight[1]']
    """
    gm, pruner = find_one(model, "channel_graph")
    if pruner.channels is None:
        raise StateError(
            "the model was prepared without example inputs, so its channels are not known; "
            "write prepare(model, spec, example_inputs)"
        )
    return _built(gm, pruner, pruner.channels)


def _built(gm: fx.GraphModule, pruner: Pruner, channels: ChannelMap) -> Graph:
    graph: Graph = nx.Graph(name=type(gm).__name__)
    groups, role = _groups(pruner, channels), roles(gm, channels)
    rules = {group.name: rule_text(rule) for group, rule in pruner.groups}
    carried: dict[Slot, list[ChannelGroup]] = {}
    for group in groups:
        for slot in group.members:
            carried.setdefault(slot, []).append(group)
    for slot, classes in channels.slots.items():
        if slot in carried:
            graph.add_node(axis_name(slot), **_axis(slot, len(classes), role[slot], carried[slot]))
    for group in groups:
        kind = "frozen" if group.reasons else "group"
        facts = {"name": group.name, "bipartite": GROUP, "kind": kind, "width": group.width}
        graph.add_node(group.name, **facts, reasons=_text(group), rule=rules.get(group.name, ""))
        for slot in group.members:
            count = len(np.intersect1d(channels.slots[slot], group.classes))
            graph.add_edge(axis_name(slot), group.name, channels=count)
    return graph


def _groups(pruner: Pruner, channels: ChannelMap) -> list[ChannelGroup]:
    """All groups in the order in which the model makes them, with what keeps them."""
    kept = {group.name: group for group in pruner.kept}
    place = {slot: index for index, slot in enumerate(channels.slots)}
    groups = sorted((*channels.groups, *channels.frozen), key=lambda group: place[group.producers[0]])
    return [kept.get(group.name, group) for group in groups]


def _axis(slot: Slot, width: int, role: str, groups: list[ChannelGroup]) -> dict[str, str | int]:
    reasons = dict.fromkeys(_text(group) for group in groups)
    return {
        "name": axis_name(slot),
        "bipartite": AXIS,
        "kind": role,
        "width": width,
        "reasons": "" if "" in reasons else "\n".join(reasons),
        "tensor": slot.tensor,
        "module": owner_of(slot),
        "axis": slot.axis,
    }


def _text(group: ChannelGroup) -> str:
    return "\n".join(str(reason) for reason in group.reasons)
