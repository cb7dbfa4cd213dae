"""Give every planned channel group one mask, and put it where a dropped channel must be 0.

The mask is computed from the raw weights that produce the channels. It multiplies the parameter
axes that the channel analysis asks for: a BatchNorm's weight and bias where one follows, the
producer's rows and bias where none does, or the columns of a reader where neither vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import fx, nn

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context, Pass
from pdp_fx.masks import ChannelMask, MaskLayout
from pdp_fx.naming import free_name
from pdp_fx.ops.explicit import mask_axis, reclass
from pdp_fx.ops.kinds import kind_of
from pdp_fx.ops.masked_norm import MASKED
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.expose_parameters import Exposed, masked_slots, swap_modules
from pdp_fx.passes.find_sites import Sites
from pdp_fx.policy import MaskSite, Producer, made
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.weights.sources import computed_with
from pdp_fx.weights.writes import idle_in_eval

Placed = dict[int, tuple[ChannelGroup, fx.Node]]
"""By class: the group that it belongs to, and the node of the group's mask."""


@dataclass(frozen=True)
class MaskChannels(Pass):
    """One mask per group, shared by everything that carries the group's channels."""

    name: ClassVar[str] = "mask-channels"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        slots, plan = masked_slots(ctx), ctx.get(Plan)
        if not plan.groups:
            return False
        found, exposed = ctx.get(ChannelMap), ctx.get(Exposed)
        called = {node.name: node for node in gm.graph.nodes}
        trains = idle_in_eval(gm.graph) if exposed.computed else set[fx.Node]()
        norms = [(called[site.node], site.axis, found.classes[site.ids.numpy()]) for site in found.norms]
        placed: Placed = {}
        masked = set(slots)
        for group, rule in plan.groups:
            carriers = [exposed.nodes[slot.tensor] for slot in group.members if slot in masked]
            carriers += [node for node, _, classes in norms if np.isin(classes, group.classes).any()]
            names = tuple(slot.tensor for slot in group.producers)
            computed = [exposed.computed[name] for name in names if name in exposed.computed]
            before = _gathered(carriers, computed, trains)
            site = MaskSite(
                names,
                rule,
                ctx.spec.softness,
                tuple(gm.get_parameter(name) for name in names),
                tuple(Producer(slot.axis, _places(found.slots[slot], group)) for slot in group.producers),
                group.width,
                group.parts,
                block=_block(found, group),
            )
            mask = made(site, ChannelMask, ChannelPolicy)
            mask.copies = not ctx.get(Sites).trained.isdisjoint(names)
            key = ctx.get(Pruner).add(group.name, mask, rule)
            node = _insert_mask(gm, before, key, mask, exposed.computed)
            placed |= dict.fromkeys(group.classes.tolist(), (group, node))
        for slot in slots:
            _multiply(gm, slot, found, placed, ctx)
        swaps: dict[nn.Module, nn.Module] = {}
        for node, axis, classes in norms:
            _mask_norm(gm, node, axis, classes, placed, ctx, swaps)
        swap_modules(gm, swaps)
        return True


def _block(found: ChannelMap, group: ChannelGroup) -> int:
    """How many channels of a layer go with each of the group's: those of a head, or one."""
    members = [found.slots[slot] for slot in group.members]
    counts = [
        np.unique(classes[np.isin(classes, group.classes)], return_counts=True)[1] for classes in members
    ]
    return int(np.gcd.reduce(np.concatenate(counts)))


def _places(classes: np.ndarray, group: ChannelGroup) -> tuple[int, ...] | None:
    """The channel of the group that each row makes, or None when row i makes channel i."""
    if np.array_equal(classes, group.classes):
        return None
    return _found_in(group.classes, classes)


def _gathered(carriers: list[fx.Node], computed: list[fx.Node], trains: set[fx.Node]) -> fx.Node:
    """Where a mask can be computed: ahead of what it multiplies, and behind the computed weights it reads.

    These are computed earlier if they have to be, with the steps of training that belong to them: they depend
    on nothing that the model is given.
    """
    chain = [source for weight in computed for source in computed_with(weight, trains)]
    users = [user for weight in computed for user in weight.users]
    before = min(node for node in [*carriers, *users] if node not in chain)
    for source in chain:
        if before < source:
            before.prepend(source)
    return before


def _insert_mask(
    gm: fx.GraphModule, before: fx.Node, key: str, mask: ChannelPolicy, computed: Mapping[str, fx.Node]
) -> fx.Node:
    """Compute the group's mask ahead of the first parameter that it multiplies."""
    with gm.graph.inserting_before(before):
        reads = tuple(computed.get(name) or gm.graph.get_attr(name) for name in mask.parameters_read)
        node = gm.graph.create_node("call_module", f"{CHILD}.masks.{key}", reads, name=f"{key}_mask")
    for created in {*reads, node} - {*computed.values()}:
        created.meta = {"source": before.meta.get("source", "")}
    return node


def _multiply(gm: fx.GraphModule, slot: Slot, found: ChannelMap, placed: Placed, ctx: Context) -> None:
    """Multiply one parameter axis by the masks of the groups that it carries."""
    read = ctx.get(Exposed).nodes[slot.tensor]
    after, mask = _mask_along(gm, read, found.slots[slot], f"{slot.tensor}.{slot.axis}", placed, ctx)
    with gm.graph.inserting_after(after):
        name = f"{slot.tensor.replace('.', '_')}_masked"
        masked = gm.graph.create_node("call_function", mask_axis, (read, mask, slot.axis), name=name)
    masked.meta = dict(read.meta)
    ctx.get(Exposed).wrap(slot.tensor, masked)


def _mask_along(
    gm: fx.GraphModule, after: fx.Node, classes: np.ndarray, name: str, placed: Placed, ctx: Context
) -> tuple[fx.Node, fx.Node]:
    """The mask along an axis of these classes, and the node behind which it and ``after`` are computed."""
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
    mask.meta = dict(after.meta)
    return mask, mask


def _mask_norm(
    gm: fx.GraphModule,
    node: fx.Node,
    axis: int,
    classes: np.ndarray,
    placed: Placed,
    ctx: Context,
    swaps: dict[nn.Module, nn.Module],
) -> None:
    """Give a node whose statistics run over channels their mask; ``swaps`` collects what takes one."""
    if not _masks_along(classes, placed):
        return
    _, mask = _mask_along(gm, node.prev, classes, f"{node.name}.{axis}", placed, ctx)
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        kind = kind_of(module)
        if kind is not None and type(module) is kind.plain and module not in swaps:
            swaps[module] = reclass(module, kind.explicit)
        node.update_kwarg("mask", mask)
        return
    if node.op == "call_method" or node.target is torch.mean:
        node.update_kwarg("axis", axis)
    node.op, node.target = "call_function", MASKED[node.target]
    node.update_kwarg("mask", mask)


def _masks_along(classes: np.ndarray, placed: Placed) -> list[tuple[ChannelGroup, fx.Node]]:
    """The groups whose channels lie along an axis, with the nodes of their masks, each once."""
    found = [placed[root] for root in classes.tolist() if root in placed]
    return list({node: (group, node) for group, node in found}.values())


def _layout(classes: np.ndarray, groups: list[ChannelGroup]) -> tuple[int, ...]:
    """For every index of an axis its place among the groups' channels, or -1."""
    return _found_in(np.concatenate([group.classes for group in groups]), classes)


def _found_in(channels: np.ndarray, classes: np.ndarray) -> tuple[int, ...]:
    """For every class its place among the channels, each of which is another class, or -1."""
    order = np.argsort(channels)
    place = order[np.searchsorted(channels, classes, sorter=order).clip(max=len(channels) - 1)]
    return tuple(np.where(channels[place] == classes, place, -1).tolist())
