"""Apply the hard masks for good: write the masked values into the parameters, drop the mask nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context, Pass
from pdp_fx.masks import MaskOwnWeight
from pdp_fx.ops.explicit import mask_axis, reclass
from pdp_fx.ops.kinds import ModuleKind, attribute, kind_of
from pdp_fx.ops.masked_norm import PLAIN
from pdp_fx.passes.expose_parameters import swap_modules
from pdp_fx.planning import parameters_of
from pdp_fx.pruner import CHILD, Pruner


@dataclass(frozen=True)
class Dropped:
    """The channels that go: for each producing weight axis the rows to remove."""

    rows: dict[Slot, tuple[int, ...]]


@dataclass(frozen=True)
class HardenMasks(Pass):
    """Leaves the channels to remove as `Dropped`, and a graph without any mask."""

    name: ClassVar[str] = "harden-masks"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        gm.eval()
        ctx.put(Dropped(_dropped_rows(gm, ctx.get(Pruner))))
        _harden_inside(gm)
        for node in gm.graph.nodes:
            _unmask_norm(gm, node)
        values: dict[fx.Node, Tensor] = {}
        reads: dict[fx.Node, fx.Node] = {}
        with torch.no_grad():
            for node in gm.graph.nodes:
                _fold(gm, node, values, reads)
        masked = [node for node in values if node.op != "get_attr"]
        self._replace(gm, masked, values, reads)
        delattr(gm, CHILD)
        return True

    def _replace(
        self,
        gm: fx.GraphModule,
        masked: list[fx.Node],
        values: dict[fx.Node, Tensor],
        reads: dict[fx.Node, fx.Node],
    ) -> None:
        inside = set(masked)
        outer = [node for node in masked if any(user not in inside for user in node.users)]
        final = {str(reads[node].target): (values[node], node.target is mask_axis) for node in outer}
        for node in reversed(masked):
            if node in outer:
                # The same node reads the parameter as before, so that what is known of it by its name holds.
                node.replace_all_uses_with(reads[node], delete_user_cb=lambda user: user not in inside)
            gm.graph.erase_node(node)
        old = {name: gm.get_parameter(name) for name in final}
        with torch.no_grad():
            swap_tensors(gm, {old[name]: frozen_as(old[name], *given) for name, given in final.items()})


def frozen_as(old: nn.Parameter, value: Tensor, fresh: bool = False) -> nn.Parameter:
    """A parameter of this value, in the memory format of ``old`` and trainable if ``old`` is.

    A ``fresh`` value is in memory that nobody else has, so it need not be copied if its format is right.
    """
    if not (fresh and value.stride() == old.stride() and value.dtype == old.dtype):
        value = torch.empty_like(old).copy_(value)
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _harden_inside(gm: fx.GraphModule) -> None:
    """Write masked weights into the layers that read them by a hook."""
    hooked: dict[nn.Module, ModuleKind] = {}
    for layer in gm.modules():
        hooks: dict[int, Any] = vars(layer)["_forward_pre_hooks"]
        for key, hook in list(hooks.items()):
            kind = kind_of(layer)
            if not isinstance(hook, MaskOwnWeight) or kind is None:
                continue
            old = layer.get_parameter(hook.name)
            with torch.no_grad():
                swap_tensors(gm, {old: frozen_as(old, hook.mask(old))})
            del hooks[key]
            vars(layer)["_forward_pre_hooks_with_kwargs"].pop(key, None)
            hooked[layer] = kind
    swap_modules(gm, {layer: reclass(layer, kind.plain) for layer, kind in hooked.items()})


def _unmask_norm(gm: fx.GraphModule, node: fx.Node) -> None:
    """Take the mask from a norm: its channels will be gone."""
    if node.op == "call_function" and node.target in PLAIN:
        node.target = PLAIN[node.target]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("mask", "axis")}
    elif node.op == "call_module":
        # A user's module may be given a mask of its own.
        kind = kind_of(gm.get_submodule(str(node.target)))
        if kind is not None and kind.takes_mask:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "mask"}


def _fold(
    gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Tensor], reads: dict[fx.Node, fx.Node]
) -> None:
    """Evaluate a read of a parameter, or a node of ours that only reads evaluated ones."""
    target: Any = node.target
    if node.op == "get_attr":
        value = attribute(gm, node.target)
        if isinstance(value, nn.Parameter):
            values[node], reads[node] = value, node
    elif node.op == "call_module" and str(target).startswith(f"{CHILD}."):
        values[node] = gm.get_submodule(str(target))(*(values[arg] for arg in node.all_input_nodes))
    elif node.op == "call_function" and target is mask_axis:
        parameter, mask, axis = node.args
        values[node] = mask_axis(values[parameter], values[mask], axis)  # pyright: ignore[reportArgumentType]
    if node in values and node.op != "get_attr" and node.all_input_nodes[0] in reads:
        reads[node] = reads[node.all_input_nodes[0]]


def _dropped_rows(gm: fx.GraphModule, pruner: Pruner) -> dict[Slot, tuple[int, ...]]:
    rows: dict[Slot, tuple[int, ...]] = {}
    for _, mask in pruner.mask_items():
        if not isinstance(mask, ChannelPolicy):
            continue
        gone = mask.pruned(*parameters_of(gm, mask)).tolist()
        for name, producer in zip(mask.parameters_read, mask.producers, strict=True):
            places = producer.places if producer.places is not None else range(mask.width)
            slot = Slot(name, producer.axis)
            here = tuple(row for row, place in enumerate(places) if place >= 0 and gone[place])
            rows[slot] = rows.get(slot, ()) + here
    return rows


def swap_tensors(root: nn.Module, swaps: Mapping[Tensor, Tensor]) -> None:
    """Put each value in place of its key everywhere in ``root``, wherever the key is shared."""
    for module in list(root.modules()):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor in swaps:
                setattr(module, name, swaps[tensor])
