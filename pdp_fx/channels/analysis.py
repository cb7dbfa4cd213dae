"""Finding the channel groups of a traced graph.

`analyse` runs the graph with labels (`observe`), solves the ties (`structure`), and returns a
`ChannelMap`: which channels go together, which must stay and why, and where masks are needed so that a
dropped channel is exactly 0 wherever it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pdp_fx.channels import (
    rules_attention,
    rules_compute,
    rules_constants,
    rules_indexing,
    rules_joining,
    rules_layout,
    rules_norm,
    rules_pointwise,
    rules_regions,
    rules_slices,
    rules_weights,
)
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.choices import choose
from pdp_fx.channels.flow import RULES, LabelFlow, Rule
from pdp_fx.channels.grouping import Make, Stay, collect_groups, concatenated, distinct
from pdp_fx.channels.labels import Layer, Reason, Slot, origins
from pdp_fx.channels.record import Call, Labelled, Production, Record, StandIn, Use, stored
from pdp_fx.channels.rectangles import make_rectangular
from pdp_fx.channels.resize import check_sizes
from pdp_fx.channels.rewrites import NORMS
from pdp_fx.channels.rules_pointwise import is_pointwise, pointwise
from pdp_fx.channels.running import run
from pdp_fx.channels.streams import streams
from pdp_fx.channels.varying import note_varying
from pdp_fx.held_hooks import NONE_HELD, Held
from pdp_fx.ops.kinds import kind_of
from pdp_fx.ops.masked_norm import MASKED
from pdp_fx.raw_reads import READS_RAW
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.inputs import place_arguments
from pdp_fx.tracing.modes import in_eval_form
from pdp_fx.tracing.structure import children, has_tensors, tensors
from pdp_fx.weights.writes import unused_in_eval

RULE_MODULES = (
    rules_attention,
    rules_compute,
    rules_constants,
    rules_indexing,
    rules_joining,
    rules_layout,
    rules_norm,
    rules_pointwise,
    rules_regions,
    rules_slices,
    rules_weights,
)
"""The rule files; importing them registers their rules."""

RETURNED = "the model returns these channels"
TOGETHER = "all of these channels go together, and some must stay"
SINGLE = "no other channel is made and read by the same layers, and one of such must stay"
HOOKED = "a hook of this layer fails, or computes something else, once channels are gone"
HOOKED_REMEDY = "write the hook without the number of channels and their places"
UNUSED = "the model cuts these rows off and never uses them"


def analyse(
    gm: fx.GraphModule,
    inputs: Inputs,
    through_norms: bool = False,
) -> ChannelMap:
    """Run ``gm`` on ``inputs`` in eval mode, again if choices turn out useless; return its channel structure.

    Args:
        gm: a traced graph; nothing in it changes.
        inputs: positional and keyword arguments.
        through_norms: whether residual streams that norms or statistics run over may go.
    """

    def follow(inner: frozenset[str]) -> Record:
        return observe(gm, inputs, {}, inner=inner).record

    def solve(record: Record) -> ChannelMap:
        return structure(record, gm, inputs, through_norms)

    with in_eval_form(gm.graph):
        return solve(choose(follow(frozenset()), solve, follow))


def structure(record: Record, gm: fx.GraphModule, inputs: Inputs, through_norms: bool) -> ChannelMap:
    """The channel structure, from the record of a run of ``gm`` on ``inputs``."""
    shapes = [tensor.shape for tensor in tensors(place_arguments(gm, inputs))]
    batch = shapes[0][0] if shapes and shapes[0] else 1
    return _solve(record, batch, any(1 in shape for shape in shapes), gm.graph, through_norms)


@dataclass(frozen=True)
class Observed:
    """The record of a run with labels, and the run's output."""

    record: Record
    output: Any


def observe(
    gm: fx.GraphModule,
    inputs: Inputs,
    out_of_reach: Mapping[str, str],
    grouped: Mapping[tuple[str, str], bool] = MappingProxyType({}),
    stand_ins: Iterable[StandIn] = (),
    inner: frozenset[str] = frozenset(),
    element_by_element: Collection[str] = (),
    read_raw: Collection[str] = (),
    held: Held = NONE_HELD,
) -> Observed:
    """Run ``gm`` on ``inputs`` once, in eval mode, and record what happens to the labels.

    Args:
        gm: a traced graph in the form that it has in eval mode (`in_eval_form`); nothing in it changes.
        inputs: positional and keyword arguments.
        out_of_reach: parameters that no mask can be put on, with the reason as a relative clause.
        grouped: by node and weight of a convolution, whether each channel was a group of its own before
            channels were removed. With one channel left in each group this could not be told.
        stand_ins: computed weights that can be pruned in the place of parameters.
        inner: the nodes at which channels inside others are followed (`choices`).
        element_by_element: parameters that the model writes to so that masks do not matter.
        read_raw: parameters that are read by code which is not in the graph, and may hold them itself.
        held: layers whose channels stay for the sake of their hooks.
    """
    flow = LabelFlow(gm, out_of_reach, element_by_element, rule_of, inner)
    flow.grouped_before = grouped
    flow.idle = frozenset(node.name for node in unused_in_eval(gm.graph))
    computed = {by.node: by for by in stand_ins}

    def after(node: fx.Node, flow: LabelFlow, result: Any) -> None:
        hooked = node.op == "call_module" and gm.get_submodule(str(node.target))._forward_hooks
        if node.target in NORMS or (node.op == "call_module" and not hooked):
            _settle_norm(flow, result)
        note_varying(gm, node, flow.record, flow.drew)
        check_sizes(gm, node, flow, result)
        if isinstance(result, Tensor) and node.name not in flow.record.varying:
            flow.label_constant(node.name, result)
        if node.name in computed and flow.stand_in(result, computed[node.name]):
            given = Labelled(tuple(result.shape), flow.layers(result))
            flow.record.values[stored(computed[node.name].parameter)] = (given,)
        for name in read_raw:
            if node.target in (name, name.rpartition(".")[0]):
                flow.freeze_all([gm.get_parameter(name)], READS_RAW.format(name))
        if node.target in held.layers:
            weights = gm.get_submodule(str(node.target)).parameters(recurse=False) if held.inputs else ()
            flow.freeze_all([*tensors(result), *weights], HOOKED, HOOKED_REMEDY)
        if node.op == "output":
            _keep_returned(flow, result)

    def can_mask(node: fx.Node) -> bool:
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            kind, over = kind_of(module), getattr(module, "normalized_shape", ())
            return kind is not None and kind.takes_mask and len(over) < 2
        return node.target in MASKED and not (node.target in NORMS and _is_over_several(node, flow))

    output = run(gm, inputs, flow, after, can_mask, _settle_norm)
    return Observed(flow.record, output)


def _keep_returned(flow: LabelFlow, result: Any) -> None:
    """Freeze the channels that the model returns; for a dict or a record the reason names the part."""
    parts = [(key, list(tensors(part))) for _, key, part in children(result) if has_tensors(part)]
    if len(parts) < 2 or not all(isinstance(key, str) for key, _ in parts):
        flow.freeze_all(list(tensors(result)), RETURNED)
        return
    for place, (key, found) in enumerate(parts):
        remedy = f"have the model leave {key} out, if nobody needs it" if place else ""
        flow.freeze_all(found, f"{RETURNED} in {key}", remedy)


def _is_over_several(node: fx.Node, flow: LabelFlow) -> bool:
    """Whether a norm function runs over several axes at once; then it cannot take a mask of one of them."""
    over: Any = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
    return len(flow.record.numbers.get(over.name, (0, 0)) if isinstance(over, fx.Node) else over) > 1


def _settle_norm(flow: LabelFlow, result: Any) -> None:
    """Note that a norm with masked statistics multiplies by the mask, so that dropped channels are 0."""
    known: dict[int, set[int]] = {}
    for site in flow.norms_here():
        known.setdefault(site.axis, set()).update(site.ids.tolist())
    if not known or not isinstance(result, Tensor):
        return

    def settled(layer: Layer) -> Layer:
        # The same labels may also lie along another axis, as in a product of channels with themselves.
        axis = min(layer.support) if len(layer.support) == 1 else -1
        whole = set(layer.ids.reshape(-1).tolist()) <= known.get(axis, set())
        return Layer(layer.ids, torch.ones_like(layer.zero)) if whole else layer

    flow.put(result, [settled(layer) for layer in flow.layers(result)])


def rule_of(call: Call) -> Rule:
    """The rule of an operation: its own, the pointwise one, or the one for unknown operations."""
    known = RULES.get(call.func.overloadpacket, RULES.get(call.func._schema.name))
    if known is not None:
        return known
    return pointwise if is_pointwise(call.func) else _unknown


def _unknown(call: Call, flow: LabelFlow) -> None:
    """The rule for operations without a rule: freeze all labels that go in."""
    why = f"no channel rule for {call.func.overloadpacket.__name__}"
    flow.freeze_all(call.tensors(), why)
    flow.lose_rows(call)
    for leaf in tree_leaves(call.result):
        if isinstance(leaf, Tensor):
            flow.put(leaf, ())


def _solve(record: Record, batch: int, alone: bool, graph: fx.Graph, through_norms: bool) -> ChannelMap:
    """Turn the record of a run into classes and groups.

    Args:
        record: the record.
        batch: the batch size of the run.
        alone: as in `ChannelMap`.
        graph: the graph that was run.
        through_norms: whether residual streams that norms run over may go.
    """
    masked = record.masked | frozenset(origins(*record.demands))
    for behind, ids, reason in record.unmasked:
        if not behind or behind & masked:
            record.ties.freeze(ids, reason)
    classes = make_rectangular(record.grids, record.ties)
    for ids, axis, reason in record.counted:
        grid = classes[ids.numpy()]
        if (grid != np.take(grid, [0], axis)).any():
            record.ties.freeze(ids, reason)
    normed = streams(record, graph, classes)
    slots = {slot: classes[ids.numpy()] for slot, ids in record.slots.items()}
    makes, unused = _makes(record, slots, classes)
    frozen = [(distinct(classes[ids]), reason) for ids, reason in record.ties.frozen]
    known = np.zeros(len(classes), dtype=bool)
    known[concatenated(roots for roots, _ in frozen)] = True
    found = ((distinct(classes[ids]), reason) for ids, reason in record.elsewhere)
    elsewhere = [(roots[~known[roots]], reason) for roots, reason in found]
    stays = [*frozen, *elsewhere, *([] if through_norms else normed), *unused]
    # Checks that the tracer has found to be too strict since the run are gone, with what they read.
    nodes = {node.name for node in graph.nodes}
    taint = {name: [ids for _, _, ids in met] for name, met in record.taint.items() if name in nodes}
    carried = [layer.ids for values in record.values.values() for value in values for layer in value.layers]
    parts = (classes[ids.numpy()] for ids in [*record.parts, *carried])
    collected = collect_groups(slots, makes, stays, parts, len(classes))
    groups = _with_streams([_explained(each, slots) for each in collected], normed, len(classes))
    alone_in_group = [group.classes for group in groups if len(group.classes) == 1]
    met = np.zeros(len(classes), dtype=bool)
    met[record.ties.joined()] = True
    return ChannelMap(
        groups=tuple(group for group in groups if not group.reasons),
        frozen=tuple(group for group in groups if group.reasons),
        slots=slots,
        # Sending a model to another process moves the memory of its tensors, from under views of it, too.
        ids={slot: ids.numpy().copy() for slot, ids in record.slots.items()},
        met=met,
        stays=distinct(concatenated([*(kept for kept, _ in stays), *alone_in_group])),
        grouped=record.grouped,
        masked=masked,
        norms=tuple(record.norms),
        contractions=tuple(
            replace(each, across=tuple(classes[ids] for ids in each.across)) for each in record.contractions
        ),
        uses=tuple(_with_classes(use, classes) for use in record.uses),
        shapes=record.shapes,
        values=record.values,
        resized=tuple(record.resized),
        numbers=record.numbers,
        taint=taint,
        batch=batch,
        classes=classes,
        stand_ins=record.stand_ins,
        lengths=record.lengths,
        by_sizes=record.by_sizes,
        alone=alone,
        aligned=distinct(classes[concatenated(record.aligned)]),
        inner=record.inner,
    )


def _with_classes(use: Use, classes: np.ndarray) -> Use:
    """The use of a weight with the classes of its labels."""
    return replace(use, axes=tuple(axis if isinstance(axis, int) else classes[axis] for axis in use.axes))


def _explained(group: ChannelGroup, slots: dict[Slot, np.ndarray]) -> ChannelGroup:
    """The group with a reason if it cannot lose anything, because all of it is one channel."""
    if group.reasons or group.width > 1:
        return group
    made_by = group.producers[0]
    several = int((slots[made_by] == group.classes[0]).sum()) > 1
    return replace(group, reasons=(Reason(made_by.tensor, "", TOGETHER if several else SINGLE),))


def _with_streams(groups: list[ChannelGroup], normed: list[Stay], classes: int) -> list[ChannelGroup]:
    """The groups with the norms that run over their channels as those of a residual stream."""
    owner = np.full(classes, -1)
    for number, group in enumerate(groups):
        owner[group.classes] = number
    found: list[dict[Reason, None]] = [{} for _ in groups]
    for roots, reason in normed:
        for number in distinct(owner[roots]):
            if number >= 0:
                found[number][reason] = None
    return [replace(group, streams=tuple(mine)) for group, mine in zip(groups, found, strict=True)]


def _makes(
    record: Record, slots: dict[Slot, np.ndarray], classes: np.ndarray
) -> tuple[list[Make], list[Stay]]:
    """Which weight axes make which classes, and the rows cut off a weight before its use, which must stay."""
    made, carried = np.zeros(len(classes), dtype=bool), np.zeros(len(classes), dtype=bool)
    makes: list[Make] = []
    for production in _productions(record):
        carried[slots[production.slot]] = True
        roots = classes[production.ids.numpy()]
        makes.append((production.slot, roots[carried[roots]]))
        made[makes[-1][1]] = True
        carried[slots[production.slot]] = False
    unused: list[Stay] = []
    for slot in dict.fromkeys(slot for slot, _ in makes):
        rest = slots[slot][~made[slots[slot]]]
        if len(rest):
            makes.append((slot, rest))
            made[rest] = True
            unused.append((distinct(rest), Reason(slot.tensor, "", UNUSED)))
    return makes, unused


def _productions(record: Record) -> list[Production]:
    """The productions of channels of data, without those that only make up a computed weight."""
    outer = {made.slot for made in record.producers if not made.inner}
    inner = record.weighing - outer
    return [made for made in record.producers if not made.inner or made.slot not in inner]
