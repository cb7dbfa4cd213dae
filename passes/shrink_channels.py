"""Remove the dropped channels from every parameter and buffer that carries them.

The channel map says for each index of each axis which class it belongs to; slicing keeps the indices whose
class stays. The channel analysis is run again if the model has changed since it was prepared.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from pdp_fx.channels.analysis import analyse
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.counts import Counts
from pdp_fx.channels.kept import placed_after, placed_before
from pdp_fx.channels.labels import Slot
from pdp_fx.channels.record import Labelled
from pdp_fx.channels.resizing import Job, Rewrite
from pdp_fx.channels.rewrites import rewrite_of
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import PassError
from pdp_fx.example_inputs import fresh, trial
from pdp_fx.naming import free_name
from pdp_fx.ops.kinds import kind_of, owned_names
from pdp_fx.passes.harden_masks import Dropped, swap_tensors
from pdp_fx.tracing.erasing import erase
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.inputs import place_arguments
from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.tracing.leaves import stores_tensors


@dataclass(frozen=True)
class Shrunk:
    """The channel structure before channels were removed, and for every class whether it is gone."""

    found: ChannelMap
    gone: np.ndarray


@dataclass(frozen=True)
class ShrinkChannels(Pass):
    """Slices tensors and updates the sizes of their modules."""

    name: ClassVar[str] = "shrink-channels"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        rows = {slot: gone for slot, gone in ctx.get(Dropped).rows.items() if gone}
        if not rows:
            return False
        if ctx.example_inputs is None:
            raise PassError(
                "channels can only be removed with the example inputs that the model was prepared on; "
                "prepare it with example_inputs"
            )
        found = ctx.find(ChannelMap)
        if found is None or not found.covers(gm):
            with trial(gm):
                found = analyse(gm, fresh(ctx.example_inputs), ctx.spec.through_norms)
        gone = _gone_classes(found, rows)
        _keep_beyond_projections(gm, found, gone)
        _resize_nodes(gm, found, gone)
        _choose_of_constants(gm, found, gone)
        _slice_tensors(gm, found, gone)
        _refresh_modules(gm, found, gone)
        _refresh_bare_norms(gm, ctx.example_inputs)
        ctx.put(Shrunk(found, gone))
        return True


def _gone_classes(found: ChannelMap, rows: dict[Slot, tuple[int, ...]]) -> np.ndarray:
    """For every class whether it is dropped.

    Raises:
        PassError: a class is dropped that has to stay.
    """
    # Weights that only training mode uses, such as those of auxiliary heads, are in the graph no longer.
    rows = {slot: indices for slot, indices in rows.items() if slot in found.slots}
    gone = np.zeros(len(found.classes), dtype=bool)
    for slot, indices in rows.items():
        gone[found.slots[slot][list(indices)]] = True
    for group in found.frozen:
        if gone[group.classes].any():
            raise PassError(f"channels of {group.name} were to be removed, but must stay: {group.reasons[0]}")
    return gone


def _keep_beyond_projections(gm: fx.GraphModule, found: ChannelMap, gone: np.ndarray) -> None:
    """Let LSTMs have more hidden units than projected ones: as many as need be stay, though they are 0.

    Torch takes an LSTM with as many of both for one without a projection.
    """
    for slot, hidden in found.slots.items():
        path, _, name = slot.tensor.rpartition(".")
        if slot.axis == 1 and name.startswith("weight_hr") and isinstance(gm.get_submodule(path), nn.LSTM):
            projected = found.slots[Slot(slot.tensor, 0)]
            missing = 1 + int((~gone[projected]).sum()) - int((~gone[hidden]).sum())
            gone[hidden[gone[hidden]][: max(missing, 0)]] = False


def _shortened(found: ChannelMap, gone: np.ndarray, constant: bool) -> dict[str, dict[int, np.ndarray]]:
    """The axes of constants, or of parameters and buffers, that lose indices, each with those that stay."""
    by_tensor: dict[str, dict[int, np.ndarray]] = {}
    for slot, classes in found.slots.items():
        stays = np.flatnonzero(~gone[classes])
        if bool(slot.constant) == constant and len(stays) < len(classes):
            by_tensor.setdefault(slot.constant or slot.tensor, {})[slot.axis] = stays
    return by_tensor


def _choose_of_constants(gm: fx.GraphModule, found: ChannelMap, gone: np.ndarray) -> None:
    """Behind each constant that meets removed channels, insert a choice of what stays."""
    nodes = {node.name: node for node in gm.graph.nodes}
    for name, axes in _shortened(found, gone, constant=True).items():
        # Nodes that only training mode needs are in the graph no longer.
        if name in nodes:
            made, users = nodes[name], list(nodes[name].users)
            for axis, stays in axes.items():
                made = placed_after(made, operator.getitem, made, (*[slice(None)] * axis, stays.tolist()))
            for user in users:
                user.replace_input_with(nodes[name], made)


def _slice_tensors(gm: fx.GraphModule, found: ChannelMap, gone: np.ndarray) -> None:
    tensors: dict[str, Tensor] = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    swaps: dict[Tensor, Tensor] = {}
    for name, axes in _shortened(found, gone, constant=False).items():
        old = tensors[name]
        new = old.detach()
        for axis, stays in axes.items():
            new = new.index_select(axis, torch.from_numpy(stays).to(old.device))
        new = _laid_out_like(new, old)
        parameter = isinstance(old, nn.Parameter)
        swaps[old] = nn.Parameter(new, requires_grad=old.requires_grad) if parameter else new
    swap_tensors(gm, swaps)


def _laid_out_like(new: Tensor, old: Tensor) -> Tensor:
    """A copy of ``new`` whose axes lie in memory in the order of those of ``old``, as in channels_last."""
    order = sorted(range(old.ndim), key=old.stride, reverse=True)
    back = sorted(range(old.ndim), key=order.__getitem__)
    return new.permute(order).contiguous().permute(back)


def _check_as_before(node: fx.Node, counts: Counts) -> None:
    """Insert a copy of the check ``node`` in which numbers of channels have their old values.

    It fails for the same inputs as ``node`` did before channels were removed.
    """
    args = counts.with_before(node.args, node)
    if any(isinstance(leaf, fx.Node) for leaf in tree_leaves(args)):
        placed_before(node, torch._assert, *args)


def _resize_nodes(gm: fx.GraphModule, found: ChannelMap, gone: np.ndarray) -> None:
    """Write new sizes into the nodes that have sizes of channel axes among their arguments."""
    nodes = {node.name: node for node in gm.graph.nodes}
    changing = frozenset(
        name for name, ids in found.taint.items() if any(gone[found.classes[i.numpy()]].any() for i in ids)
    )
    counts = Counts(found, gone, changing)
    for node in gm.graph.find_nodes(op="call_function", target=torch._assert):
        # A check of a number of channels would fail now. The analysis has shown that nothing else depends on
        # the number, so only the check of the other sizes in it is kept.
        if counts.told(node):
            _check_as_before(node, counts)
            erase(node, lambda source: source.name in changing)
    # Nodes that only training mode needs are in the graph no longer.
    for name in [name for name in found.resized if name in nodes]:
        node = nodes[name]
        rewrite = rewrite_of(gm, node)
        if rewrite is None:
            raise PassError(
                f"%{name} must be resized for the channels that stay, but no rewrite can do that; convert "
                "the model as prepare has returned it"
            )
        _resize(node, rewrite, found, gone, counts)


def _resize(node: fx.Node, rewrite: Rewrite, found: ChannelMap, gone: np.ndarray, counts: Counts) -> None:
    """Rewrite the arguments of ``node``; the numbers of channels that it leaves are those from before."""
    read = [value for source in node.all_input_nodes for value in found.given(source) or ()]
    source = found.kept(read[0] if read else Labelled((), ()), gone)
    results = tuple(found.kept(value, gone) for value in found.given(node) or ())
    stand_ins: dict[fx.Node, fx.Node] = {}
    for number in counts.told(node):
        stand_in = placed_before(node, operator.pos, number)
        node.replace_input_with(number, stand_in)
        stand_ins[stand_in] = number
    known = {stand_in.name: found.numbers[number.name] for stand_in, number in stand_ins.items()}
    rewrite.apply(node, Job(node, source, results, {**found.numbers, **known}, stand_ins, counts))
    for stand_in, number in stand_ins.items():
        for user in list(stand_in.users):
            before = counts.before(number, node)
            user.args, user.kwargs = map_arg(
                (user.args, user.kwargs), lambda leaf, old=stand_in, new=before: new if leaf is old else leaf
            )
        node.graph.erase_node(stand_in)


def _refresh_modules(gm: fx.GraphModule, found: ChannelMap, gone: np.ndarray) -> None:
    """Update the sizes that modules store, such as ``in_channels``."""

    def stays(ids: Tensor) -> np.ndarray:
        return ~gone[found.classes[ids.numpy()]]

    inputs = {use.weight: stays(use.inputs) for use in found.contractions if use.inputs is not None}
    sites = {site.node: stays(site.ids) for site in found.norms}
    calls = list(gm.graph.find_nodes(op="call_module"))
    _part_norms(gm, calls, sites)
    normalised = {gm.get_submodule(str(n.target)): sites[n.name] for n in calls if n.name in sites}
    names = owned_names(gm)
    for module in gm.modules():
        kind = kind_of(module)
        if kind is not None:
            weight = names.get(id(getattr(module, "weight", None)), "")
            kind.refresh(module, normalised.get(module, inputs.get(weight)))


def _part_norms(gm: fx.GraphModule, calls: list[fx.Node], sites: dict[str, np.ndarray]) -> None:
    """Give calls of a norm without tensors that keep different channels a norm each.

    Args:
        gm: the graph module.
        calls: its calls of modules.
        sites: by norm, which of the channels that its statistics run over stay.
    """
    norms = {gm.get_submodule(str(node.target)) for node in calls if node.name in sites}
    paths: dict[nn.Module, dict[bytes, str]] = {norm: {} for norm in norms if not stores_tensors(norm)}
    for node in calls:
        path = str(node.target)
        norm = gm.get_submodule(path)
        if norm not in paths:
            continue
        stays = sites.get(node.name)
        kept = b"" if stays is None or stays.all() else stays.tobytes()
        if paths[norm] and kept not in paths[norm]:
            owner, _, name = path.rpartition(".")
            path = f"{owner}.{free_name(gm.get_submodule(owner), name)}".removeprefix(".")
            gm.add_submodule(path, copy.deepcopy(norm))
        node.target = paths[norm].setdefault(kept, path)


def _refresh_bare_norms(gm: fx.GraphModule, inputs: Inputs) -> None:
    """Update the number of channels of each `InstanceNorm` without tensors, which only its input tells.

    It warns at each call if that is another number.
    """
    if not any(map(_is_bare_norm, gm.modules())):
        return
    run = _Widths(gm)
    with trial(gm):
        run.run(*place_arguments(gm, fresh(inputs)))
    for norm, width in run.found.items():
        norm.num_features = width


def _is_bare_norm(module: nn.Module) -> bool:
    return isinstance(module, _InstanceNorm) and not module.affine and not module.track_running_stats


class _Widths(Interpreter):
    """Runs a graph and notes the number of channels that each bare norm meets."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: dict[Any, int] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.fetch_attr(target)
        if _is_bare_norm(module):
            given = args[0] if args else kwargs["input"]
            module.num_features = self.found[module] = given.shape[given.ndim - module._get_no_batch_dim()]
        return super().call_module(target, args, kwargs)
