"""Finding the channel groups of a traced graph.

`analyse` runs the graph once with labels (`flow`), solves the ties, and returns a `ChannelMap`:
which channels go together, which must stay and why, and where masks have to sit so that a dropped
channel is exactly 0 wherever it is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pdp_fx.channels import (
    rules_attention,
    rules_compute,
    rules_constants,
    rules_joining,
    rules_layout,
    rules_norm,
)
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.flow import RULES, LabelFlow, Rule
from pdp_fx.channels.labels import Layer, Reason, Slot
from pdp_fx.channels.record import Call, Production, Record
from pdp_fx.channels.rectangles import make_rectangular
from pdp_fx.channels.resize import check_sizes
from pdp_fx.channels.rules_pointwise import is_pointwise, pointwise
from pdp_fx.channels.running import place_arguments, run
from pdp_fx.channels.streams import keep_streams
from pdp_fx.ops.kinds import kind_of
from pdp_fx.ops.masked_norm import MASKED

RULE_MODULES = (rules_attention, rules_compute, rules_constants, rules_joining, rules_layout, rules_norm)
"""Imported so that their rules are registered."""

RETURNED = "the model returns these channels"
UNUSED = "the model cuts these rows off and never uses them"

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def analyse(
    gm: fx.GraphModule,
    inputs: Inputs,
    maskable: frozenset[str],
    through_norms: bool = False,
    grouped: frozenset[str] = frozenset(),
) -> ChannelMap:
    """Run ``gm`` on ``inputs`` once, in eval mode, and return its channel structure.

    Args:
        gm: a traced graph; nothing in it changes.
        inputs: positional and keyword arguments.
        maskable: names of the parameters that a mask can be put on.
        through_norms: whether residual streams that LayerNorm, RMSNorm or a mean runs over may go.
        grouped: weights of grouped convolutions, also where each group has a single channel left.
    """
    flow = LabelFlow(gm, maskable, rule_of)
    flow.record.grouped |= grouped

    def after(node: fx.Node, flow: LabelFlow, result: Any) -> None:
        _settle_norm(flow, result)
        check_sizes(gm, node, flow, result)
        if node.op == "output":
            flow.freeze_all([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)], RETURNED)

    def can_mask(node: fx.Node) -> bool:
        if node.op == "call_module":
            kind = kind_of(gm.get_submodule(str(node.target)))
            return kind is not None and kind.takes_mask
        return node.target in MASKED

    record = run(gm, inputs, flow, after, can_mask)
    tensors = [leaf for leaf in tree_leaves(place_arguments(gm, inputs)) if isinstance(leaf, Tensor)]
    batch = tensors[0].shape[0] if tensors and tensors[0].ndim else 1
    return _solve(record, batch, None if through_norms else gm.graph)


def _settle_norm(flow: LabelFlow, result: Any) -> None:
    """A norm that is given a mask multiplies by it: what it gives is 0 where a channel is dropped."""
    masked = [site.ids for site in flow.record.norms if site.node == flow.node]
    if not masked or not isinstance(result, Tensor):
        return
    known = {int(label) for ids in masked for label in ids}
    layers = [
        Layer(layer.ids, torch.ones_like(layer.zero))
        if set(layer.ids.reshape(-1).tolist()) <= known
        else layer
        for layer in flow.layers(result)
    ]
    flow.put(result, layers)


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


def _solve(record: Record, batch: int, gated: fx.Graph | None) -> ChannelMap:
    """Turn what the run has collected into classes and groups; in ``gated`` residual streams stay."""
    classes = make_rectangular(record.grids, record.ties)
    for ids, axis, reason in record.counted:
        grid = classes[ids.numpy()]
        if (grid != np.take(grid, [0], axis)).any():
            record.ties.freeze(ids, reason)
    if gated is not None:
        keep_streams(record, gated, classes)
    reasons = record.ties.frozen(classes)
    slots = {slot: classes[ids.numpy()] for slot, ids in record.slots.items()}
    makes = _makes(record)
    makers = _makers(makes, classes, slots)
    _keep_unused(makes, makers, slots, reasons)
    carried = [layer.ids for values in record.values.values() for value in values for layer in value.layers]
    parts = [frozenset(np.unique(classes[ids.numpy()]).tolist()) for ids in [*record.parts, *carried]]
    groups = _with_parts(_groups(makers, slots, reasons), parts, makers, reasons)
    return ChannelMap(
        groups=tuple(group for group in groups if not group.reasons),
        frozen=tuple(group for group in groups if group.reasons),
        slots=slots,
        ids={slot: ids.numpy() for slot, ids in record.slots.items()},
        pairs=record.ties.joined(),
        stays=np.array(sorted(reasons), dtype=np.int64),
        grouped=frozenset(record.grouped),
        masked=_masked(record.demands),
        norms=tuple(record.norms),
        contractions=tuple(record.contractions),
        shapes=record.shapes,
        values=record.values,
        resized=tuple(record.resized),
        numbers=record.numbers,
        taint={name: [ids for _, _, ids in entries] for name, entries in record.taint.items()},
        batch=batch,
        classes=classes,
    )


Makers = dict[int, tuple[Slot, ...]]


def _makes(record: Record) -> list[Production]:
    """What makes channels of data: not what is only a part of a computed weight."""
    outer = {made.slot for made in record.producers if not made.inner}
    inner = record.weighing - outer
    return [made for made in record.producers if not made.inner or made.slot not in inner]


def _makers(producers: list[Production], classes: np.ndarray, slots: dict[Slot, np.ndarray]) -> Makers:
    """The weight axes that make each class."""
    makers: dict[int, dict[Slot, None]] = {}
    for made in producers:
        carried = set(slots[made.slot].tolist())
        for root in dict.fromkeys(classes[made.ids.numpy()].tolist()):
            if root in carried:
                makers.setdefault(root, {})[made.slot] = None
    return {root: tuple(made_by) for root, made_by in makers.items()}


def _keep_unused(
    makes: list[Production], makers: Makers, slots: dict[Slot, np.ndarray], reasons: dict[int, list[Reason]]
) -> None:
    """Let what is cut off a weight before its use stay, and say so."""
    for slot in dict.fromkeys(made.slot for made in makes):
        for root in dict.fromkeys(slots[slot].tolist()):
            if root not in makers:
                makers[root] = (slot,)
                reasons.setdefault(root, []).append(Reason(slot.tensor, "", UNUSED))


def _with_parts(
    groups: list[ChannelGroup], parts: list[frozenset[int]], makers: Makers, reasons: dict[int, list[Reason]]
) -> list[ChannelGroup]:
    """Note in each group which of its channels are cut apart from the others.

    A part needs no care if one of its channels stays anyway: because it is frozen, because nothing
    makes it, or because the part holds a whole group, of which one channel always stays.
    """
    loose = [part for part in dict.fromkeys(parts) if all(r in makers and r not in reasons for r in part)]
    whole = [frozenset(group.classes.tolist()) for group in groups]
    found: list[ChannelGroup] = []
    for group, inside in zip(groups, whole, strict=True):
        places = {root: place for place, root in enumerate(group.classes.tolist())}
        mine = [
            part & inside for part in loose if part & inside and not any(other <= part for other in whole)
        ]
        found.append(
            replace(
                group,
                parts=tuple(tuple(sorted(places[root] for root in part)) for part in dict.fromkeys(mine)),
            )
        )
    return found


def _groups(
    makers: Makers, slots: dict[Slot, np.ndarray], reasons: dict[int, list[Reason]]
) -> list[ChannelGroup]:
    """Collect classes made by the same producers; frozen ones apart from prunable ones."""
    found: dict[tuple[tuple[Slot, ...], bool], list[int]] = {}
    for root, made_by in makers.items():
        found.setdefault((made_by, root in reasons), []).append(root)
    carriers: dict[int, list[Slot]] = {}
    for slot, ids in slots.items():
        for root in np.unique(ids).tolist():
            carriers.setdefault(root, []).append(slot)
    names: list[str] = []
    return [
        _group(made_by, roots, carriers, reasons if is_frozen else {}, names)
        for (made_by, is_frozen), roots in found.items()
    ]


def _group(
    made_by: tuple[Slot, ...],
    roots: list[int],
    carriers: dict[int, list[Slot]],
    reasons: dict[int, list[Reason]],
    names: list[str],
) -> ChannelGroup:
    """The group of these classes; ``names`` are the first producers of the groups so far."""
    members = dict.fromkeys(slot for root in roots for slot in carriers[root])
    why = dict.fromkeys(reason for root in roots for reason in reasons.get(root, []))
    first = made_by[0].tensor.rpartition(".")[0] or made_by[0].tensor
    names.append(first)
    name = first if names.count(first) == 1 else f"{first} ({names.count(first)})"
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
