"""Give every planned channel group one mask, and apply it where a dropped channel must be 0.

The mask is computed from the unmasked weights that produce the channels. It multiplies the parameter axes
that the channel analysis has found (`ChannelMap.masked`): the weight and bias of a BatchNorm if one follows,
else the rows and bias of the producer, or the columns of a reader if what it reads cannot be made 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.channels.record import ALIGNED
from pdp_fx.compiler import Context, Pass
from pdp_fx.granularity import Channels
from pdp_fx.masks import ChannelMask, MaskLayout
from pdp_fx.naming import free_name
from pdp_fx.ops.explicit import mask_axis, reclass
from pdp_fx.ops.kinds import kind_of
from pdp_fx.ops.masked_norm import MASKED, OFF, STATISTICS, correction_of
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.expose_parameters import Exposed, masked_slots, swap_modules
from pdp_fx.passes.find_sites import Sites
from pdp_fx.policy import MaskSite, Producer, make_mask
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.tracing.blocks import MAY_WAIT
from pdp_fx.tracing.modes import When, called_module, function_of
from pdp_fx.weights.sources import computed_with
from pdp_fx.weights.without_gradients import part_to_leave, switches_off
from pdp_fx.weights.writes import idle_in_eval

Placed = dict[int, tuple[ChannelGroup, fx.Node]]
"""By channel class: the group that it belongs to, and the node of the group's mask."""


@dataclass(frozen=True)
class _Norm:
    """A node whose statistics run over channels, the axis of these channels, and their classes.

    The axis is one of ``axes``.
    """

    node: fx.Node
    axis: int
    axes: int
    classes: np.ndarray


@dataclass(frozen=True)
class MaskChannels(Pass):
    """One mask per group, shared by everything that carries the group's channels."""

    name: ClassVar[str] = "mask-channels"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        plan = ctx.get(Plan)
        if not plan.groups:
            return False
        found, slots = ctx.get(ChannelMap), masked_slots(ctx)
        masked, by_group = frozenset(slots), found.norms_by_group()
        norms = _norms(gm, found)
        placed: Placed = {}
        parts, grouped = switches_off(gm.graph), _grouped(found)
        for group, rule in plan.groups:
            mine = [norms[id(site)] for site in by_group.get(int(group.classes[0]), ())]
            node = _mask_group(gm, ctx, group, rule, _carriers(ctx, group, masked), mine, parts, grouped)
            placed |= dict.fromkeys(group.classes.tolist(), (group, node))
        for slot in slots:
            _multiply(gm, slot, placed, ctx)
        swaps: dict[nn.Module, nn.Module] = {}
        for norm in norms.values():
            _mask_norm(gm, norm, placed, ctx, swaps)
        swap_modules(gm, swaps)
        return True


VARIANCES: frozenset[Any] = frozenset({torch.var, "var", torch.std, "std"})
"""Functions and methods that may give no number for a single channel, which has no variance without bias."""


def _norms(gm: fx.GraphModule, found: ChannelMap) -> dict[int, _Norm]:
    """The nodes that run over channels, by the id of their site."""
    nodes = {node.name: node for node in gm.graph.nodes}
    return {
        id(site): _Norm(nodes[site.node], site.axis, site.axes, found.classes[site.ids.numpy()])
        for site in found.norms
    }


def _carriers(ctx: Context, group: ChannelGroup, masked: frozenset[Slot]) -> list[fx.Node]:
    """The nodes of the parameters that the group's mask will multiply."""
    nodes = ctx.get(Exposed).nodes
    return [nodes[slot.tensor] for slot in group.members if slot in masked]


def _counted(norm: _Norm, group: ChannelGroup) -> tuple[np.ndarray, int]:
    """The places of a variance's channels in a group, and how many of these it must run over at least.

    It is no number unless it runs over more channels than its correction takes off. One that sees every
    channel several times does with fewer.
    """
    places = np.flatnonzero(np.isin(group.classes, norm.classes))
    found, counts = np.unique(norm.classes, return_counts=True)
    often = int(counts[np.isin(found, group.classes)].min())
    return places, min(-(-(1 + math.floor(_taken_off(norm.node))) // often), len(places))


def _taken_off(node: fx.Node) -> float:
    """What a variance takes off the number of elements; 1 where a node computes it."""
    told: tuple[Any, ...] = node.args[isinstance(node.target, When) :][1:3]
    named: dict[str, Any] = {name: node.kwargs[name] for name in OFF if name in node.kwargs}
    if any(isinstance(each, fx.Node) for each in (*told[1:], *named.values())):
        return 1
    return max(correction_of(*told, **named), 0)


def _fewest(variances: list[_Norm], group: ChannelGroup) -> tuple[int, list[tuple[int, ...]]]:
    """How many channels of a group must stay for its variances, and sets of which one must stay each.

    A variance over some of the channels asks for as many sets of these as it must run over at least.
    """
    least, sets = 1, list[tuple[int, ...]]()
    for places, fewest in (_counted(norm, group) for norm in variances):
        if len(places) == group.width:
            least = max(least, fewest)
        elif fewest > 1:
            sets += [tuple(part.tolist()) for part in np.array_split(places, fewest)]
    return least, sets


def _mask_group(
    gm: fx.GraphModule,
    ctx: Context,
    group: ChannelGroup,
    rule: Channels,
    carriers: list[fx.Node],
    norms: list[_Norm],
    parts: dict[fx.Node, fx.Node],
    grouped: frozenset[str],
) -> fx.Node:
    """Make the mask of a group and compute it ahead of all that reads it; returns its node."""
    readers = [*carriers, *(norm.node for norm in norms)]
    names = tuple(slot.tensor for slot in group.producers)
    found, exposed = ctx.get(ChannelMap), ctx.get(Exposed)
    least, sets = _fewest([norm for norm in norms if function_of(norm.node) in VARIANCES], group)
    site = MaskSite(
        names,
        rule,
        ctx.spec.softness,
        tuple(gm.get_parameter(name) for name in names),
        tuple(
            Producer(slot.axis, _places(found.slots[slot], group), found.lengths.get(slot.tensor, 1))
            for slot in group.producers
        ),
        group.width,
        (*group.parts, *sets),
        block=_block(found, group, grouped),
        multiple=ALIGNED if np.isin(group.classes, found.aligned).any() else 1,
        least=least,
    )
    mask = make_mask(site, ChannelMask, ChannelPolicy)
    sites = ctx.get(Sites)
    mask.copies = not (sites.trained | sites.element_by_element).isdisjoint(names)
    key = ctx.get(Pruner).add(group.name, mask, rule)
    computed = [exposed.computed[name] for name in names if name in exposed.computed]
    trains = idle_in_eval(gm.graph) if computed else set[fx.Node]()
    return _insert_mask(gm, _gathered(readers, computed, trains, parts), key, mask, exposed.computed)


def _grouped(found: ChannelMap) -> frozenset[str]:
    """The weights of grouped convolutions, whose columns are those of one group of the channels."""
    return frozenset(
        use.weight
        for use in found.contractions
        if use.inputs is not None and len(use.inputs) != len(found.slots.get(Slot(use.weight, 1), use.inputs))
    )


def _block(found: ChannelMap, group: ChannelGroup, grouped: frozenset[str]) -> int:
    """How many channels of each layer go with each of the group's: those of a head, or one."""
    members = [found.slots[slot] for slot in group.members if slot.axis != 1 or slot.tensor not in grouped]
    inside = np.zeros(len(found.classes), dtype=bool)
    inside[group.classes] = True
    counts = [np.unique(classes[inside[classes]], return_counts=True)[1] for classes in members]
    return int(np.gcd.reduce(np.concatenate(counts)))


def _places(classes: np.ndarray, group: ChannelGroup) -> tuple[int, ...] | None:
    """The index of the channel that each row produces, as in `Producer.places`."""
    return None if np.array_equal(classes, group.classes) else _found_in(group.classes, classes)


def _gathered(
    readers: list[fx.Node], computed: list[fx.Node], trains: set[fx.Node], parts: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The node ahead of which a mask can be computed: before all that reads it, after all that it reads.

    Computed weights that the mask reads are moved ahead of this node if necessary, together with the training
    steps that belong to them. They can be moved because they do not depend on inputs.

    Args:
        readers: the nodes that will read the mask.
        computed: the computed weights that the mask reads.
        trains: the nodes that do nothing in eval mode.
        parts: what `switches_off` is.
    """
    chain = [source for weight in computed for source in computed_with(weight, trains)]
    users = [user for weight in computed for user in weight.users]
    before = min(node for node in [*readers, *users] if node not in chain)
    if not chain:
        return part_to_leave(before, readers, parts) or before
    for source in chain:
        if before < source:
            before.prepend(source)
    return before


def _insert_mask(
    gm: fx.GraphModule, before: fx.Node, key: str, mask: ChannelPolicy, computed: Mapping[str, fx.Node]
) -> fx.Node:
    """Insert the node of a group's mask, and reads of the parameters that it is computed from."""
    with gm.graph.inserting_before(before):
        reads = tuple(computed.get(name) or gm.graph.get_attr(name) for name in mask.parameters_read)
        node = gm.graph.create_node("call_module", f"{CHILD}.masks.{key}", reads, name=f"{key}_mask")
    for created in {*reads, node} - {*computed.values()}:
        created.meta = {"source": before.meta.get("source", ""), MAY_WAIT: True}
    return node


def _multiply(gm: fx.GraphModule, slot: Slot, placed: Placed, ctx: Context) -> None:
    """Multiply one parameter axis by the masks of the groups that it carries."""
    read, classes = ctx.get(Exposed).nodes[slot.tensor], ctx.get(ChannelMap).slots[slot]
    after, mask = _mask_along(gm, read, classes, f"{slot.tensor}.{slot.axis}", placed, ctx)
    with gm.graph.inserting_after(after):
        name = f"{slot.tensor.replace('.', '_')}_masked"
        masked = gm.graph.create_node("call_function", mask_axis, (read, mask, slot.axis), name=name)
    masked.meta = read.meta | {MAY_WAIT: True}
    ctx.get(Exposed).wrap(slot.tensor, masked)


def _mask_along(
    gm: fx.GraphModule, after: fx.Node, classes: np.ndarray, name: str, placed: Placed, ctx: Context
) -> tuple[fx.Node, fx.Node]:
    """A node after which both ``after`` and the mask are known, and the mask along an axis of these classes.

    Args:
        gm: the graph module.
        after: the node to multiply.
        classes: the channel class of every index of the axis.
        name: of the axis, for a layout module if one is needed.
        placed: the masks.
        ctx: the context.
    """
    here = _masks_along(classes, placed)
    after = max([after, *(node for _, node in here)])
    index = _layout(classes, [group for group, _ in here])
    if len(here) == 1 and index == tuple(range(here[0][0].width)):
        return after, here[0][1]
    layouts = ctx.get(Pruner).layouts
    key = free_name(layouts, name.replace(".", "_"))
    layouts[key] = MaskLayout(index)
    with gm.graph.inserting_after(after):
        nodes = tuple(node for _, node in here)
        mask = gm.graph.create_node("call_module", f"{CHILD}.layouts.{key}", nodes, name=f"{key}_mask")
    mask.meta = after.meta | {MAY_WAIT: True}
    return mask, mask


def _mask_norm(
    gm: fx.GraphModule, norm: _Norm, placed: Placed, ctx: Context, swaps: dict[nn.Module, nn.Module]
) -> None:
    """Pass a norm the mask of the channels that its statistics run over.

    ``swaps`` collects the modules that must be replaced by ones that take a mask.
    """
    if not _masks_along(norm.classes, placed):
        return
    node = norm.node
    _, mask = _mask_along(gm, node.prev, norm.classes, f"{node.name}.{norm.axis}", placed, ctx)
    called = called_module(node)
    if called is not None:
        module = gm.get_submodule(called)
        kind = kind_of(module)
        if kind is not None and type(module) is kind.plain and module not in swaps:
            swaps[module] = reclass(module, kind.explicit)
    else:
        _call_masked(norm)
    node.update_kwarg("mask", mask)


def _call_masked(norm: _Norm) -> None:
    """Have a norm's node call the function that takes a mask in the place of its own.

    One that may run over any axis is told that of the channels as the model names it, from the last axis if
    that does so: inputs may have more axes than the example.
    """
    node = norm.node
    function, conditional = function_of(node), isinstance(node.target, When)
    if function in STATISTICS:
        named = tree_leaves((node.kwargs.get("dim"), node.args[1 + conditional : 2 + conditional]))
        from_last = norm.axis - norm.axes
        node.update_kwarg("axis", from_last if from_last in named else norm.axis)
    masked = MASKED[function]
    node.op, node.target = "call_function", When(masked) if conditional else masked
    if function in (torch.layer_norm, torch.group_norm):
        # Whether to use cuDNN, the last argument, is asked by these functions only.
        node.args = node.args[: 5 + conditional]
        node.kwargs = {key: value for key, value in node.kwargs.items() if not key.startswith("cudnn")}


def _masks_along(classes: np.ndarray, placed: Placed) -> list[tuple[ChannelGroup, fx.Node]]:
    """The groups whose channels lie along an axis of these classes, each once, with the node of its mask."""
    found = [placed[root] for root in classes.tolist() if root in placed]
    return list({node: (group, node) for group, node in found}.values())


def _layout(classes: np.ndarray, groups: list[ChannelGroup]) -> tuple[int, ...]:
    """For every index of an axis its place in the groups' concatenated channels, or -1."""
    return _found_in(np.concatenate([group.classes for group in groups]), classes)


def _found_in(channels: np.ndarray, classes: np.ndarray) -> tuple[int, ...]:
    """For every class its place among ``channels``, whose classes are distinct, or -1."""
    order = np.argsort(channels)
    place = order[np.searchsorted(channels, classes, sorter=order).clip(max=len(channels) - 1)]
    return tuple(np.where(channels[place] == classes, place, -1).tolist())
