"""Finding the channel groups of a traced graph.

`analyse` runs the graph once with labels (`flow`), solves the ties, and returns a `ChannelMap`:
which channels go together, which must stay and why, and where masks have to sit so that a dropped
channel is exactly 0 wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pdp_fx.channels import rules_compute, rules_layout, rules_norm
from pdp_fx.channels.flow import RULES, Call, Contraction, LabelFlow, Record, Rule, place_arguments, run
from pdp_fx.channels.labels import Layer, Reason, Slot
from pdp_fx.channels.resize import freeze_written_sizes
from pdp_fx.channels.rules_pointwise import is_pointwise, pointwise

RULE_MODULES = (rules_compute, rules_layout, rules_norm)
"""Imported so that their rules are registered."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that the same weights produce, and that are ranked against each other.

    Attributes:
        name: the module that produces them first.
        classes: the class of each channel, shape (width,), in the order of the first producer.
        producers: the weight axes that make these channels.
        members: every parameter and buffer axis that carries some of them.
        reasons: why channels of this group must stay; empty when all can be removed.
    """

    name: str
    classes: np.ndarray
    producers: tuple[Slot, ...]
    members: tuple[Slot, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def width(self) -> int:
        """Number of channels."""
        return len(self.classes)


@dataclass(frozen=True)
class ChannelMap:
    """The channel structure of one graph.

    Attributes:
        groups: prunable groups, in graph order.
        frozen: groups whose channels stay, each with its reasons.
        slots: the class of every index of every parameter and buffer axis.
        masked: the parameter axes that must be masked so that dropped channels are 0.
        contractions: where weights are multiplied, for counting.
        shapes: the shape of every parameter and buffer.
        nodes: per node, the shape of its result and the classes along each axis that has them.
        batch: the size of the first axis of the first input tensor.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: tuple[ChannelGroup, ...]
    slots: dict[Slot, np.ndarray]
    masked: frozenset[Slot]
    contractions: tuple[Contraction, ...]
    shapes: dict[str, tuple[int, ...]]
    nodes: dict[str, tuple[tuple[int, ...], dict[int, np.ndarray]]]
    batch: int
    classes: np.ndarray = field(repr=False)


def analyse(gm: fx.GraphModule, inputs: Inputs, maskable: frozenset[str]) -> ChannelMap:
    """Run ``gm`` on ``inputs`` once, in eval mode, and return its channel structure.

    Args:
        gm: a traced graph; nothing in it changes.
        inputs: positional and keyword arguments.
        maskable: names of the parameters that a mask can be put on.
    """
    flow = LabelFlow(gm, maskable, rule_of)
    record = run(gm, inputs, flow, _after_node)
    tensors = [leaf for leaf in tree_leaves(place_arguments(gm, inputs)) if isinstance(leaf, Tensor)]
    batch = tensors[0].shape[0] if tensors and tensors[0].ndim else 1
    return _solve(record, batch)


def rule_of(call: Call) -> Rule:
    """The rule of an operation: its own, the pointwise one, or the one for unknown operations."""
    known = RULES.get(call.func.overloadpacket)
    if known is not None:
        return known
    return pointwise if is_pointwise(call.func) else _unknown


def _unknown(call: Call, flow: LabelFlow) -> None:
    """Nothing unknown is followed: whatever goes in stays."""
    why = f"no channel rule for {call.func.overloadpacket.__name__}"
    flow.freeze_all(call.tensors(), why)
    for leaf in tree_leaves(call.result):
        if isinstance(leaf, Tensor):
            flow.put(leaf, ())


def _after_node(node: fx.Node, flow: LabelFlow, result: Any) -> None:
    freeze_written_sizes(node, flow, result)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if node.op == "output":
        flow.freeze_all(tensors, "the model returns these channels")
        return
    for tensor in tensors:
        for layer in flow.layers(tensor):
            if len(layer.support) > 1:
                flow.freeze(layer.ids, "these channels are spread over several axes here")


def _solve(record: Record, batch: int) -> ChannelMap:
    """Turn what the run has collected into classes and groups."""
    classes = record.ties.classes()
    reasons = record.ties.frozen(classes)
    slots = {slot: classes[ids.numpy()] for slot, ids in record.slots.items()}
    groups = _groups(record.producers, slots, reasons)
    return ChannelMap(
        groups=tuple(group for group in groups if not group.reasons),
        frozen=tuple(group for group in groups if group.reasons),
        slots=slots,
        masked=_masked(record.demands),
        contractions=tuple(record.contractions),
        shapes=record.shapes,
        nodes=_node_classes(record, classes),
        batch=batch,
        classes=classes,
    )


def _groups(
    producers: list[Slot], slots: dict[Slot, np.ndarray], reasons: dict[int, list[Reason]]
) -> list[ChannelGroup]:
    """Collect classes made by the same producers; frozen ones apart from prunable ones."""
    makers: dict[int, list[Slot]] = {}
    for slot in producers:
        for root in dict.fromkeys(slots[slot].tolist()):
            makers.setdefault(root, []).append(slot)
    found: dict[tuple[tuple[Slot, ...], bool], list[int]] = {}
    for root, makers_of in makers.items():
        found.setdefault((tuple(makers_of), root in reasons), []).append(root)
    carriers: dict[int, list[Slot]] = {}
    for slot, ids in slots.items():
        for root in np.unique(ids).tolist():
            carriers.setdefault(root, []).append(slot)
    return [
        _group(made_by, roots, carriers, reasons if is_frozen else {}) for (made_by, is_frozen), roots in found.items()
    ]


def _group(
    made_by: tuple[Slot, ...], roots: list[int], carriers: dict[int, list[Slot]], reasons: dict[int, list[Reason]]
) -> ChannelGroup:
    members = dict.fromkeys(slot for root in roots for slot in carriers[root])
    why = dict.fromkeys(reason for root in roots for reason in reasons.get(root, []))
    name = made_by[0].tensor.rpartition(".")[0] or made_by[0].tensor
    return ChannelGroup(name, np.array(roots), made_by, tuple(members), tuple(why))


def _masked(demands: list[Layer]) -> frozenset[Slot]:
    """Follow what must be 0 back to the parameter axes that make it so."""
    found: set[Slot] = set()
    seen: set[int] = set()
    todo = list(demands)
    while todo:
        layer = todo.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if layer.slot is not None:
            found.add(layer.slot)
        else:
            todo.extend(layer.needs)
    return frozenset(found)


def _node_classes(
    record: Record, classes: np.ndarray
) -> dict[str, tuple[tuple[int, ...], dict[int, np.ndarray]]]:
    nodes: dict[str, tuple[tuple[int, ...], dict[int, np.ndarray]]] = {}
    for name, (shape, layers) in record.node_layers.items():
        by_axis: dict[int, np.ndarray] = {}
        for layer in layers:
            if len(layer.support) == 1:
                (axis,) = layer.support
                by_axis[axis] = classes[layer.ids.reshape(-1).numpy()]
        nodes[name] = (shape, by_axis)
    return nodes


def macs(found: ChannelMap, weights: dict[str, Tensor] | None = None) -> dict[str, int]:
    """Multiply-accumulates of each weight for one example (the paper's count: weights only).

    Args:
        found: the channel structure.
        weights: when given, only their non-zero entries count.
    """
    counts: dict[str, int] = {}
    for contraction in found.contractions:
        if weights is not None and contraction.weight in weights:
            size = int(torch.count_nonzero(weights[contraction.weight]))
        else:
            size = int(np.prod(found.shapes[contraction.weight]))
        counts[contraction.weight] = counts.get(contraction.weight, 0) + size * contraction.positions // found.batch
    return counts


