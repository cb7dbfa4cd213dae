"""Match the spec with the sites and channel groups found: which of them are pruned, by which rule."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import fx

from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.grouping import distinct
from pdp_fx.channels.labels import Reason, Slot
from pdp_fx.channels.running import is_opaque, why_unseen
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import SpecError
from pdp_fx.granularity import NM, Channels, Rule, Unstructured, rule_text
from pdp_fx.ops.kinds import kind_of, owned_names
from pdp_fx.overrides import key_text, winner
from pdp_fx.passes.find_sites import Site, Sites, given_to_unknown
from pdp_fx.tracing.objects import MethodOf

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What will be masked, and what of the spec's wishes will not.

    Attributes:
        weights: weights pruned one by one or N:M, each with its rule.
        groups: channel groups to prune, each with its rule.
        kept: channel groups that stay, with the reasons.
        skipped: what the spec asks for but does not fit, as (name, reason) pairs.
    """

    weights: tuple[tuple[Site, Unstructured | NM], ...]
    groups: tuple[tuple[ChannelGroup, Channels], ...]
    kept: tuple[ChannelGroup, ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ChooseTargets(Pass):
    """Puts a `Plan` into the context."""

    name: ClassVar[str] = "choose-targets"

    def requires(self, gm: fx.GraphModule, ctx: Context) -> None:
        rules = [ctx.spec.default, *(rule for _, rule in ctx.spec.overrides)]
        if any(isinstance(rule, Channels) for rule in rules) and ctx.find(ChannelMap) is None:
            raise SpecError(
                "Channels needs example_inputs: channel dependencies are found by running the model once; "
                "write prepare(model, spec, example_inputs)"
            )

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        asked = _rules_by_owner(gm, ctx)
        rules = {name: _agreed(by_owner) for name, by_owner in asked.items()}
        weights: list[tuple[Site, Unstructured | NM]] = []
        skipped: list[tuple[str, str]] = []
        for site in ctx.get(Sites).weights:
            rule = rules[site.parameter]
            reason = _dispute(asked[site.parameter]) or _misfit(gm, site, rule)
            if reason:
                skipped.append((site.owner or site.parameter, reason))
            elif isinstance(rule, (Unstructured, NM)):
                weights.append((site, rule))
        skipped += (_kept_whole(gm, rules) | _out_of_reach(gm, ctx)).items()
        found = ctx.find(ChannelMap)
        groups, kept = _sort_groups(found, rules, weights) if found else ([], [])
        if found:
            _annotate(gm, found, [group for group, _ in groups])
        told = {name for name, _ in skipped} | {slot.tensor for group in kept for slot in group.producers}
        pruned = {site.parameter for site, _ in weights} | {
            slot.tensor for group, _ in groups for slot in group.producers
        }
        if pruned:
            skipped += _without_effect(ctx, asked, pruned, told)
        ctx.put(Plan(tuple(weights), tuple(groups), tuple(kept), tuple(skipped)))
        return False

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        plan = ctx.get(Plan)
        if not plan.weights and not plan.groups:
            reasons = [f"  {name}: {why}" for name, why in plan.skipped]
            reasons += [f"  {group.name}: {reason}" for group in plan.kept for reason in group.reasons]
            if not reasons:
                reasons = [
                    "  its rules name no weight of a conv or linear layer, nor several channels of one"
                ]
            raise SpecError("nothing in the model can be pruned by this spec:\n" + "\n".join(reasons))


def _without_effect(
    ctx: Context, asked: dict[str, Asked], pruned: set[str], told: set[str]
) -> Iterator[tuple[str, str]]:
    """Warn of overrides whose rules prune nothing; those of which nothing is told so far, with the reason.

    Args:
        ctx: the context.
        asked: the rules of all parameters.
        pruned: the parameters that are pruned.
        told: the parameters and modules that it is said of why they are not.
    """
    overrides = ctx.spec.overrides
    owners: dict[str, set[str]] = {key_text(key): set() for key, rule in overrides if rule is not None}
    for parameter, by_owner in asked.items() if owners else ():
        for owner in by_owner:
            found = winner(overrides, owner, type(ctx.modules[owner]))
            if found is not None and found[1] is not None:
                owners[key_text(found[0])].update((parameter, owner))
    for key, rule in overrides:
        if rule is None or not (mine := owners[key_text(key)]).isdisjoint(pruned):
            continue
        _log.warning("the rule %s of the override %r prunes nothing", rule_text(rule), key_text(key))
        if mine.isdisjoint(told):
            yield key_text(key), f"what it names has nothing that {rule_text(rule)} prunes"


def _kept_whole(gm: fx.GraphModule, rules: dict[str, Rule | None]) -> dict[str, str]:
    """Modules and methods that were not looked into, and so keep all channels in them; with the reason."""
    names, found, named = owned_names(gm), dict[str, str](), dict(gm.named_parameters(remove_duplicate=False))
    for node in gm.graph.find_nodes(op="call_module"):
        if not is_opaque(gm, node):
            continue
        target = str(node.target)
        module = gm.get_submodule(target)
        used = module.uses if isinstance(module, MethodOf) else ()
        held = [*module.parameters(), *(named[name] for name in used if name in named)]
        if any(p.ndim > 1 and isinstance(rules.get(names[id(p)]), Channels) for p in held):
            found[target] = f"{why_unseen(module, node)[0]}, so the channels in it stay"
    return found


def _out_of_reach(gm: fx.GraphModule, ctx: Context) -> dict[str, str]:
    """Modules with a rule whose matrices no mask can reach, as unknown code uses them; with the reason."""
    names, sites = owned_names(gm), {site.parameter for site in ctx.get(Sites).weights}
    found: dict[str, str] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        target = str(node.target)
        module = gm.get_submodule(target)
        missed = [p for p in module.parameters() if p.ndim > 1 and names[id(p)] not in sites]
        if missed and kind_of(module) is None and ctx.spec.rule_for(target, module) is not None:
            how = f": it {node.meta['opaque']}" if node.meta.get("opaque") else ""
            kind = type(module).__name__
            found[target] = f"{kind} uses its weights inside itself, out of reach of a mask{how}"
    for parameter, why in given_to_unknown(gm, ctx).items():
        owner = parameter.rpartition(".")[0]
        if ctx.spec.rule_for(owner, ctx.modules[owner]) is not None:
            found.setdefault(owner or parameter, f"no mask can be put on its weight, {why}")
    return found


def _annotate(gm: fx.GraphModule, found: ChannelMap, groups: list[ChannelGroup]) -> None:
    """Note on every node its shape and the groups whose channels it carries, for printouts."""
    group_of = np.full(len(found.classes), -1)
    for number, group in enumerate(groups):
        group_of[group.classes] = number
    for node in gm.graph.nodes:
        values = found.values.get(node.name, ())
        carried: set[int] = set()
        for layer in (layer for value in values for layer in value.layers):
            carried.update(distinct(group_of[found.classes[layer.ids.numpy()]]).tolist())
        names = [groups[number].name for number in carried if number >= 0]
        node.meta["shape"] = values[0].shape if len(values) == 1 else ()
        node.meta["group"] = names[0] if len(names) == 1 else f"{len(names)} groups" if names else ""


Asked = dict[str, Rule | None]
"""The spec's rule for each module that owns a tensor, by the module's name."""


def _rules_by_owner(gm: fx.GraphModule, ctx: Context) -> dict[str, Asked]:
    """What the spec asks for every parameter and buffer, by name; a shared tensor has several owners."""
    names = owned_names(gm)
    asked: dict[str, Asked] = {name: {} for name in names.values()}
    for owner, module in ctx.modules.items():
        rule = ctx.spec.rule_for(owner, module)
        for _, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) in names:
                asked[names[id(tensor)]][owner] = rule
    return asked


def _agreed(asked: Asked) -> Rule | None:
    """The rule that all owners have, or None."""
    rules = set(asked.values())
    return rules.pop() if len(rules) == 1 else None


def _dispute(asked: Asked) -> str:
    """Which different rules the owners of a shared weight have, or the empty string."""
    if len(set(asked.values())) < 2:
        return ""
    texts = [f"{owner}: {'skip' if rule is None else rule_text(rule)}" for owner, rule in asked.items()]
    return f"its weight is shared by layers to which the spec gives different rules ({', '.join(texts)})"


def _misfit(gm: fx.GraphModule, site: Site, rule: Rule | None) -> str:
    """Why a weight cannot take its rule, or the empty string."""
    weight = gm.get_parameter(site.parameter)
    if isinstance(rule, Unstructured):
        return site.unfit or ("it has a single weight" if weight.numel() < 2 else "")
    if not isinstance(rule, NM):
        return ""
    if site.unfit_for_groups:
        return site.unfit_for_groups
    inputs = weight.shape[site.axis]
    if inputs % rule.of:
        return f"{inputs} input channels do not divide into groups of {rule.of}"
    return ""


def _sort_groups(
    found: ChannelMap, rules: dict[str, Rule | None], weights: list[tuple[Site, Unstructured | NM]]
) -> tuple[list[tuple[ChannelGroup, Channels]], list[ChannelGroup]]:
    """The groups that the spec prunes, and the groups that it asks for but that must stay."""
    fixed, normed = _read_by_nm(found, weights), found.norms_by_group()
    groups: list[tuple[ChannelGroup, Channels]] = []
    kept = [group for group in found.frozen if _wanted(group, rules)]
    for group in found.groups:
        wanted = _wanted(group, rules)
        if not wanted:
            continue
        reason = _conflict(group, rules, fixed) or _unread(group, found, normed)
        reasons = (reason,) if reason else () if wanted[0].through_norms else group.streams
        if reasons:
            kept.append(replace(group, reasons=reasons))
        else:
            groups.append((group, wanted[0]))
    return groups, kept


def _wanted(group: ChannelGroup, rules: dict[str, Rule | None]) -> list[Channels]:
    """The `Channels` rules that the spec gives to the producers of a group."""
    asked = [rules.get(slot.tensor) for slot in group.producers]
    return [rule for rule in asked if isinstance(rule, Channels)]


def _read_by_nm(found: ChannelMap, weights: list[tuple[Site, Unstructured | NM]]) -> dict[int, str]:
    """The channel classes that a weight pruned N:M reads, each with the name of that weight."""
    return {
        root: site.parameter
        for site, rule in weights
        if isinstance(rule, NM) and Slot(site.parameter, site.axis) in found.slots
        for root in found.slots[Slot(site.parameter, site.axis)].tolist()
    }


def _unread(group: ChannelGroup, found: ChannelMap, normed: Container[int]) -> Reason | None:
    """Why a group stays that nothing reads in eval mode, or None if something does."""
    if int(group.classes[0]) in normed or any(slot in found.masked for slot in group.members):
        return None
    return Reason(group.name, "", "nothing reads these channels in eval mode")


def _conflict(group: ChannelGroup, rules: dict[str, Rule | None], fixed: dict[int, str]) -> Reason | None:
    """Why the spec's own rules keep a group, or None."""
    first = group.producers[0].tensor
    others = [slot.tensor for slot in group.producers if rules.get(slot.tensor) != rules.get(first)]
    if others or not isinstance(rules.get(first), Channels):
        odd = (others or [first])[0]
        return Reason(
            _holder(odd),
            "",
            f"the spec gives {_holder(first)} and {_holder(odd)} different rules, "
            "but their channels go together",
            "give both the same Channels rule",
        )
    reader = next((fixed[root] for root in np.unique(group.classes).tolist() if root in fixed), None)
    if reader is None:
        return None
    return Reason(
        _holder(reader),
        "",
        f"{reader} is pruned N:M along these channels; removing some would break its pattern",
        "give that layer another rule",
    )


def _holder(tensor: str) -> str:
    """The module that has a tensor; the tensor itself if that is the model."""
    return tensor.rpartition(".")[0] or tensor
