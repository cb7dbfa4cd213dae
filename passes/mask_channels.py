"""Give every planned channel group one mask, and put it where a dropped channel must be 0.

The mask is computed from the raw weights that produce the channels. It multiplies the parameter
axes that the channel analysis asks for: a BatchNorm's weight and bias where one follows, the
producer's rows and bias where none does, or the columns of a reader where neither vanishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import fx

from pdp_fx.channels.analysis import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context, Pass
from pdp_fx.masks import ChannelMask, MaskLayout, Producer
from pdp_fx.ops.explicit import mask_axis
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.expose_parameters import Exposed, masked_slots
from pdp_fx.pruner import CHILD, Pruner

Placed = list[tuple[ChannelGroup, fx.Node]]


@dataclass(frozen=True)
class MaskChannels(Pass):
    """One `ChannelMask` per group, shared by everything that carries the group's channels."""

    name: ClassVar[str] = "mask-channels"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        slots = masked_slots(ctx)
        found = ctx.get(ChannelMap) if slots else None
        if found is None:
            return False
        order = {node: place for place, node in enumerate(gm.graph.nodes)}
        exposed = ctx.get(Exposed)
        placed: Placed = []
        for group, rule in ctx.get(Plan).groups:
            carriers = [exposed.nodes[slot.tensor] for slot in slots if slot in group.members]
            before = min(carriers, key=lambda node: order.get(node, len(order)))
            mask = ChannelMask(
                tuple(slot.tensor for slot in group.producers),
                ctx.spec.tau,
                tuple(Producer(slot.axis, _places(found.slots[slot], group)) for slot in group.producers),
                group.width,
            )
            key = ctx.get(Pruner).add(group.name, mask, rule)
            placed.append((group, _insert_mask(gm, before, key, mask)))
        for slot in slots:
            _multiply(gm, slot, found, placed, ctx)
        return True


def _places(classes: np.ndarray, group: ChannelGroup) -> tuple[int, ...] | None:
    """The channel of the group that each row makes, or None when row i makes channel i."""
    if np.array_equal(classes, group.classes):
        return None
    place = {root: index for index, root in enumerate(group.classes.tolist())}
    return tuple(place.get(root, -1) for root in classes.tolist())


def _insert_mask(gm: fx.GraphModule, before: fx.Node, key: str, mask: ChannelMask) -> fx.Node:
    """Compute the group's mask ahead of the first parameter that it multiplies."""
    with gm.graph.inserting_before(before):
        reads = tuple(gm.graph.get_attr(name) for name in mask.parameters_read)
        node = gm.graph.create_node("call_module", f"{CHILD}.masks.{key}", reads, name=f"{key}_mask")
    for created in (*reads, node):
        created.meta = {"source": before.meta.get("source", "")}
    return node


def _multiply(gm: fx.GraphModule, slot: Slot, found: ChannelMap, placed: Placed, ctx: Context) -> None:
    """Multiply one parameter axis by the masks of the groups that it carries."""
    exposed = ctx.get(Exposed)
    read = exposed.nodes[slot.tensor]
    here = [(group, node) for group, node in placed if slot in group.members]
    index = _layout(found.slots[slot], [group for group, _ in here])
    place = read
    mask = here[0][1]
    if len(here) > 1 or index != tuple(range(here[0][0].width)):
        name = f"{slot.tensor.replace('.', '_')}_{slot.axis}"
        ctx.get(Pruner).layouts[name] = MaskLayout(index)
        with gm.graph.inserting_after(read):
            nodes = tuple(node for _, node in here)
            place = mask = gm.graph.create_node(
                "call_module", f"{CHILD}.layouts.{name}", nodes, name=f"{name}_mask"
            )
        mask.meta = dict(read.meta)
    with gm.graph.inserting_after(place):
        name = f"{slot.tensor.replace('.', '_')}_masked"
        masked = gm.graph.create_node("call_function", mask_axis, (read, mask, slot.axis), name=name)
    masked.meta = dict(read.meta)
    exposed.wrap(slot.tensor, masked)


def _layout(classes: np.ndarray, groups: list[ChannelGroup]) -> tuple[int, ...]:
    """For every index of an axis its place among the groups' channels, or -1."""
    place: dict[int, int] = {}
    for group in groups:
        for root in group.classes.tolist():
            place[root] = len(place)
    return tuple(place.get(root, -1) for root in classes.tolist())
