"""`explain`: what a prepared model prunes, what it keeps and why, and what would change that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tabulate import tabulate
from torch import fx, nn

from pdp_fx.alike import collected, few, pattern, patterns, skeleton
from pdp_fx.channel_graph import axis_name, owner_of, roles
from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.channels.record import NormSite
from pdp_fx.granularity import rule_text
from pdp_fx.pruner import Pruner, find_one

Item = TypeVar("Item")

MANY = 40
"""In a table with more rows than this, rows whose names differ only in their numbers are merged."""

COUNTS = ("at least", "groups", "weights")
"""Columns that are left out if all their values are 1."""

STILL_POSSIBLE = "Where channels stay, Unstructured and NM still prune the weights one by one."


@dataclass(frozen=True)
class PrunedWeight:
    """A parameter whose weights are pruned one by one or N:M: its name, its rule, its number of weights."""

    name: str
    rule: str
    size: int


@dataclass(frozen=True)
class PrunedGroup:
    """Channels that are ranked against each other, and go or stay together in all their layers.

    Attributes:
        name: the module that produces them first.
        rule: the rule of the spec.
        width: number of channels.
        least: how many of them stay in any case, because of the rule or the model.
        producers: the modules that produce them.
        masked: where the mask is applied: modules, their inputs, or the statistics of a norm.
        members: every axis of a parameter or buffer that carries some of them, as ``conv1.weight[0]``.
    """

    name: str
    rule: str
    width: int
    least: int
    producers: tuple[str, ...]
    masked: tuple[str, ...]
    members: tuple[str, ...]


@dataclass(frozen=True)
class KeptChannels:
    """Channels that stay, for one reason, although the spec has a rule for them.

    Attributes:
        group: the module that produces them first.
        width: number of channels.
        nodes: the nodes of the graph that need them.
        sources: the lines of the model's code that these nodes come from.
        why: the reason.
        remedy: what would change it, or the empty string.
    """

    group: str
    width: int
    nodes: tuple[str, ...]
    sources: tuple[str, ...]
    why: str
    remedy: str

    def __str__(self) -> str:
        nodes = few([f"%{name}" for name in patterns(self.nodes)])
        lines = f" ({few(patterns(self.sources))})" if self.sources else ""
        remedy = f"\n    to change this: {self.remedy}" if self.remedy else ""
        return f"  {nodes}{lines}: {self.why}{remedy}"


@dataclass(frozen=True)
class ComputedWeight:
    """A computed weight that is pruned in the place of a parameter; `convert` writes its value there.

    Attributes:
        parameter: the parameter that it is written into.
        node: the node of the graph that computes it.
        source: the line of the model's code that this node comes from.
    """

    parameter: str
    node: str
    source: str


@dataclass(frozen=True)
class Explanation:
    """What a prepared model prunes and what it keeps, in the order of the graph; ``str`` gives the text.

    Attributes:
        weights: the weights that are pruned one by one or N:M.
        groups: the channel groups that are pruned.
        kept: channels that stay although the spec asks, one entry for each group and reason.
        computed: the weights among these that are computed from several parameters.
        skipped: (layer, reason) of layers that the spec's rule does not fit.
    """

    weights: tuple[PrunedWeight, ...]
    groups: tuple[PrunedGroup, ...]
    kept: tuple[KeptChannels, ...]
    computed: tuple[ComputedWeight, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        sections = [_weight_table(weights) for weights in collected(self.weights, lambda weight: weight.rule)]
        sections += [_group_table(groups) for groups in collected(self.groups, lambda group: group.rule)]
        if self.computed:
            sections.append(_computed_table(self.computed))
        if self.kept:
            sections.append("\n".join(["Channels that stay", *_kept_lines(self.kept), STILL_POSSIBLE]))
        if self.skipped:
            rows = collected(self.skipped, lambda row: (skeleton(row[0]), row[1]))
            texts = [(pattern([name for name, _ in alike]), alike[0][1]) for alike in rows]
            sections.append(_table("Layers left out", ("layer", "why"), texts))
        return "\n\n".join(sections)


def explain(model: nn.Module) -> Explanation:
    """Say what the prepared ``model`` prunes and what it keeps, with the reason for each.

    Raises:
        StateError: the model was never prepared, or holds several prepared models.
    """
    gm, pruner = find_one(model, "explain")
    return Explanation(
        _weights(gm, pruner),
        tuple(_pruned(gm, pruner)),
        tuple(kept for group in pruner.kept for kept in _kept(group)),
        _computed(gm, pruner),
        pruner.skipped,
    )


def _weights(gm: fx.GraphModule, pruner: Pruner) -> tuple[PrunedWeight, ...]:
    masks = [(key, mask) for key, mask in pruner.mask_items() if not isinstance(mask, ChannelPolicy)]
    names = [(key, mask.parameters_read[0]) for key, mask in masks]
    return tuple(
        PrunedWeight(name, rule_text(pruner.rules[key]), gm.get_parameter(name).numel())
        for key, name in names
    )


def _computed(gm: fx.GraphModule, pruner: Pruner) -> tuple[ComputedWeight, ...]:
    sources = {node.name: str(node.meta.get("source", "")) for node in gm.graph.nodes}
    return tuple(ComputedWeight(name, node, sources[node]) for name, node in pruner.computed.items())


def _pruned(gm: fx.GraphModule, pruner: Pruner) -> Iterator[PrunedGroup]:
    channels = pruner.channels
    if channels is None:
        return
    role, norms = roles(gm, channels), channels.norms_by_group()
    masks = [mask for _, mask in pruner.mask_items() if isinstance(mask, ChannelPolicy)]
    for (group, rule), mask in zip(pruner.groups, masks, strict=True):
        yield PrunedGroup(
            group.name,
            rule_text(rule),
            group.width,
            min(mask.fewest(rule.min_channels), group.width),
            tuple(dict.fromkeys(owner_of(slot) for slot in group.producers)),
            _masked_at(group, channels, role, norms.get(int(group.classes[0]), ())),
            tuple(axis_name(slot) for slot in group.members),
        )


def _masked_at(
    group: ChannelGroup, channels: ChannelMap, role: dict[Slot, str], norms: Sequence[NormSite]
) -> tuple[str, ...]:
    """The modules whose parameters the group's mask multiplies, and the norms that it is given to."""
    slots = [slot for slot in group.members if slot in channels.masked]
    places = [owner_of(slot) + (" (inputs)" if role[slot] == "reader" else "") for slot in slots]
    places += [f"%{site.node} (statistics)" for site in norms]
    return tuple(dict.fromkeys(places))


def _kept(group: ChannelGroup) -> list[KeptChannels]:
    """The reasons of a group; reasons that differ only in the node are merged."""
    merged = collected(group.reasons, lambda reason: (reason.why, reason.remedy))
    return [
        KeptChannels(
            group.name,
            group.width,
            tuple(dict.fromkeys(reason.node for reason in reasons)),
            tuple(dict.fromkeys(reason.source for reason in reasons if reason.source)),
            reasons[0].why,
            reasons[0].remedy,
        )
        for reasons in merged
    ]


def _weight_table(weights: list[PrunedWeight]) -> str:
    rows = _rows(weights, lambda weight: (skeleton(weight.name), weight.size))
    texts = [(pattern([w.name for w in alike]), f"{alike[0].size:,}", str(len(alike))) for alike in rows]
    return _table(f"Weights, {weights[0].rule}", ("weight", "size", "weights"), texts)


def _group_table(groups: list[PrunedGroup]) -> str:
    rows = _rows(groups, lambda group: (skeleton(group.name), group.width, group.least, len(group.producers)))
    texts = [
        (
            pattern([group.name for group in alike]),
            str(alike[0].width),
            str(alike[0].least),
            few(patterns(name for group in alike for name in group.producers)),
            few(patterns(name for group in alike for name in group.masked)),
            str(len(alike)),
        )
        for alike in rows
    ]
    headers = ("group", "channels", "at least", "made by", "masked at", "groups")
    return _table(f"Channel groups, {groups[0].rule}", headers, texts)


def _computed_table(weights: Sequence[ComputedWeight]) -> str:
    rows = collected(
        weights, lambda weight: (skeleton(weight.parameter), skeleton(weight.node), weight.source)
    )
    texts = [
        (
            pattern([w.parameter for w in alike]),
            few([f"%{name}" for name in patterns(w.node for w in alike)]),
            alike[0].source,
        )
        for alike in rows
    ]
    headers = ("written into", "computed by", "in")
    return _table("Computed weights, pruned as they are computed and written down by convert", headers, texts)


def _rows(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    return collected(items, key) if len(items) > MANY else [[item] for item in items]


def _kept_lines(kept: Sequence[KeptChannels]) -> list[str]:
    """The groups that stay, each followed by its reasons; groups that are alike are one."""
    groups = collected(kept, lambda entry: entry.group)
    alike = collected(groups, lambda entries: tuple(_likeness(entry) for entry in entries))
    return [line for same in alike for line in _lines_of(same)]


def _likeness(entry: KeptChannels) -> tuple[object, ...]:
    nodes = tuple(dict.fromkeys(skeleton(node) for node in entry.nodes))
    return skeleton(entry.group), entry.width, nodes, entry.why, entry.remedy


def _lines_of(same: list[list[KeptChannels]]) -> list[str]:
    """Groups that are alike, as one: a line with their names, then each reason with all its nodes."""
    name, width = pattern([entries[0].group for entries in same]), same[0][0].width
    count = f"{width} channels" if len(same) == 1 else f"{len(same)} groups of {width} channels"
    lines = [f"{name}: {count}"]
    for entries in zip(*same, strict=True):
        nodes = tuple(dict.fromkeys(node for entry in entries for node in entry.nodes))
        sources = tuple(dict.fromkeys(source for entry in entries for source in entry.sources))
        first = entries[0]
        lines.append(str(KeptChannels(first.group, width, nodes, sources, first.why, first.remedy)))
    return lines


def _table(title: str, headers: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    """A table under a title, without the counts that are 1 throughout."""
    shown = [
        index
        for index, header in enumerate(headers)
        if header not in COUNTS or any(row[index] != "1" for row in rows)
    ]
    texts = [[row[index] for index in shown] for row in rows]
    names = [headers[index] for index in shown]
    return f"{title}\n{tabulate(texts, headers=names, tablefmt='simple', disable_numparse=True)}"
