"""Make the hard masks permanent: write the masked values into the parameters, and drop the mask nodes.

Channels stay in place for now, as zeros; `shrink_channels` removes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context, Pass
from pdp_fx.example_inputs import trial
from pdp_fx.masks import MaskOwnWeight
from pdp_fx.ops.explicit import mask_axis, reclass
from pdp_fx.ops.kinds import ModuleKind, attribute, kind_of, owned_names
from pdp_fx.ops.masked_norm import PLAIN
from pdp_fx.passes.expose_parameters import swap_modules
from pdp_fx.planning import parameters_of
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.weights.writes import left_by_eval


@dataclass(frozen=True)
class Dropped:
    """The channels to remove: for each weight axis that produces channels, the indices that go."""

    rows: dict[Slot, tuple[int, ...]]


@dataclass(frozen=True)
class HardenMasks(Pass):
    """Leaves a graph without masks, and puts a `Dropped` into the context."""

    name: ClassVar[str] = "harden-masks"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        gm.eval()
        _settle(gm)
        ctx.put(Dropped(_dropped_rows(gm, ctx.get(Pruner))))
        _harden_inside(gm)
        for node in gm.graph.nodes:
            _unmask_norm(gm, node)
        with torch.no_grad():
            _write_masked(gm, _evaluated(gm))
        delattr(gm, CHILD)
        return True


def _settle(gm: fx.GraphModule) -> None:
    """Write to parameters what the model itself writes to them, as by `clamp_`, before masks rank them."""
    with trial(gm):
        left = left_by_eval(gm, owned_names(gm))
    with torch.no_grad():
        for name, value in left.items():
            gm.get_parameter(name).copy_(value)


@dataclass(frozen=True)
class _Evaluated:
    """The value of a node that depends on parameters and masks only.

    Attributes:
        value: the value.
        read: the ``get_attr`` node of the parameter that is masked; of a mask, of the first that it reads.
    """

    value: Tensor
    read: fx.Node


def _evaluated(gm: fx.GraphModule) -> dict[fx.Node, _Evaluated]:
    """The values of all reads of parameters, masks, and parameters multiplied by masks."""
    found: dict[fx.Node, _Evaluated] = {}
    for node in gm.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr":
            value = attribute(gm, target)
            if isinstance(value, nn.Parameter):
                found[node] = _Evaluated(value, node)
            continue
        if node.op == "call_module" and str(target).startswith(f"{CHILD}."):
            value = gm.get_submodule(str(target))(*(found[arg].value for arg in node.all_input_nodes))
        elif node.op == "call_function" and target is mask_axis:
            parameter, mask, axis = cast(tuple[fx.Node, fx.Node, int], node.args)
            value = mask_axis(found[parameter].value, found[mask].value, axis)
        else:
            continue
        found[node] = _Evaluated(value, found[node.all_input_nodes[0]].read)
    return found


def _write_masked(gm: fx.GraphModule, found: Mapping[fx.Node, _Evaluated]) -> None:
    """Give each masked parameter the value that layers have read, and erase all mask nodes."""
    masked = {node: each for node, each in found.items() if node.op != "get_attr"}
    outer = [node for node in masked if any(user not in masked for user in node.users)]
    final = {str(masked[node].read.target): (masked[node].value, node.target is mask_axis) for node in outer}
    for node in reversed(masked):
        if node in outer:
            # The original read of the parameter is kept, because the channel map knows it by its name.
            node.replace_all_uses_with(masked[node].read, delete_user_cb=lambda user: user not in masked)
        gm.graph.erase_node(node)
    old = {name: gm.get_parameter(name) for name in final}
    swap_tensors(gm, {old[name]: frozen_as(old[name], *given) for name, given in final.items()})


def frozen_as(old: nn.Parameter, value: Tensor, fresh: bool = False) -> nn.Parameter:
    """A parameter with this value, in the memory format of ``old``, and trainable if ``old`` is.

    Args:
        old: the parameter that will be replaced.
        value: the new value, same shape.
        fresh: whether nothing else refers to the memory of ``value``; then it is copied only if its format
            differs.
    """
    if not (fresh and value.stride() == old.stride() and value.dtype == old.dtype):
        value = torch.empty_like(old).copy_(value)
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _harden_inside(gm: fx.GraphModule) -> None:
    """Write masked weights into the layers that get them from a hook, inside modules kept whole."""
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
    """Turn a norm over masked channels into a plain one: the masked channels will be removed."""
    if node.op == "call_function" and node.target in PLAIN:
        node.target = PLAIN[node.target]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("mask", "axis")}
    elif node.op == "call_module":
        # A user's own module may have an argument called mask.
        kind = kind_of(gm.get_submodule(str(node.target)))
        if kind is not None and kind.takes_mask:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "mask"}


def _dropped_rows(gm: fx.GraphModule, pruner: Pruner) -> dict[Slot, tuple[int, ...]]:
    """For each weight axis that produces masked channels, the indices whose channels the masks prune."""
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
    """Replace each key by its value in all modules of ``root`` that hold it."""
    for module in list(root.modules()):
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in (*own, *module.named_buffers(recurse=False, remove_duplicate=False)):
            if tensor in swaps:
                setattr(module, name, swaps[tensor])
