"""Which nodes must be given new sizes once channels are removed, and which channels stay because of sizes.

A node that lays channels out by sizes, positions or counts in its arguments no longer fits once channels are
removed. If `rewrites` knows how to update its arguments from the labels that stay, the node is noted in
`Record.resized`; if not, its channels are frozen here. A size that is read off a tensor at run time follows
by itself; if it enters a computation, the number of channels must not change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from pdp_fx.channels.counts import recoverable
from pdp_fx.channels.flow import LabelFlow
from pdp_fx.channels.labels import Layer
from pdp_fx.channels.record import Labelled, Tainted
from pdp_fx.channels.rewrites import always_told, chooses, rewrite_of
from pdp_fx.channels.varying import given_varying
from pdp_fx.tracing.objects import Apply
from pdp_fx.tracing.writer import CONSTANT
from pdp_fx.weights.sources import sources_of

REPEATS: frozenset[Any] = frozenset({
    torch.repeat_interleave, "repeat_interleave", torch.tile, "tile", "repeat",
})  # fmt: skip
"""Functions that make a given number of copies; an axis of copies only keeps its length."""

LIKE_ANOTHER: frozenset[Any] = frozenset({"view_as", "reshape_as", "expand_as"})
"""Methods that take their sizes from another tensor."""

SIZE_FREE: frozenset[Any] = REPEATS | LIKE_ANOTHER | frozenset({
    torch.flatten, "flatten", torch.permute, "permute", torch.einsum, torch.conv1d, torch.conv2d,
    torch.conv3d, torch.tensordot, torch.full_like, torch.cosine_similarity, torch.pixel_shuffle,
    torch.pixel_unshuffle, torch.channel_shuffle, operator.mul, operator.add,
    operator.sub, operator.truediv, torch.where, torch.rms_norm, "unsqueeze", torch.softmax, torch.unbind,
    "unbind", "flip", torch.flip, getattr, torch.take_along_dim, "take_along_dim",
    torch.quantile, "quantile", torch.nanquantile, "nanquantile",
    torch._VF._pad_packed_sequence,
})  # fmt: skip
"""Functions and methods whose numeric arguments are never sizes or positions of a channel axis."""

BY_NUMBER: frozenset[Any] = frozenset({
    functional.group_norm, torch.group_norm, torch.channel_shuffle, torch.pixel_shuffle,
    torch.pixel_unshuffle, functional.channel_shuffle, functional.pixel_shuffle, functional.pixel_unshuffle,
    functional.local_response_norm, torch.diagonal, "diagonal", torch.tril, torch.triu, "tril", "triu",
})  # fmt: skip
"""Functions and methods whose number says which channels belong together; if it varies, none can go."""

FUNCTIONALS: frozenset[Any] = frozenset(value for value in vars(functional).values() if callable(value))

SIZED_FUNCTIONALS = frozenset(
    {functional.fold, functional.unfold, functional.multi_head_attention_forward, functional.pad}
)
"""Functions of `torch.nn.functional` that have sizes among their arguments; the others have none."""

SIZE_FREE_MODULES = (
    nn.Linear, nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Embedding,
    nn.EmbeddingBag, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
    nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.LocalResponseNorm, nn.CosineSimilarity,
    nn.PairwiseDistance, nn.Softmax2d, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm, nn.RNNBase,
    nn.RNNCellBase,
)  # fmt: skip
"""Modules that have no sizes, or whose sizes `shrink_channels` updates."""


def check_sizes(gm: fx.GraphModule, node: fx.Node, flow: LabelFlow, result: Any) -> None:
    """Note that ``node`` must be resized, or freeze the channels that it lays out if that is not possible."""
    if node.target in LIKE_ANOTHER:
        _follow_other(node, flow, result)
    if node.target in BY_NUMBER and flow.record.tells_varying(node):
        given = [layer for value in flow.record.values_of(node.args[0]) for layer in value.layers]
        _freeze_told(gm, node, flow, given)
        _lose(flow, result, given)
    rewrite = rewrite_of(gm, node)
    if rewrite is not None:
        _keep_varying(gm, node, flow, result, rewrite.varies(node, flow.record))
    known = all(recoverable(source, flow.record) for source in node.all_input_nodes)
    fits = rewrite is not None and known and rewrite.fits(node, flow.record)
    _follow_numbers(node, flow, result, fits)
    counted = any(source.name in flow.record.taint for source in node.all_input_nodes)
    if not flow.sized and not counted and not always_told(node):
        return
    if fits:
        flow.record.resized.append(node.name)
        return
    told = flow.sized
    if _is_given_no_number(node, flow):
        # It computes every shape from its tensors.
        told = [sized for sized in told if not sized.shaped]
    if _is_size_free(gm, node, flow):
        told = [sized for sized in flow.sized if sized.before.free and node.target in REPEATS]
    elif isinstance(node.target, Apply):
        # An autograd function returns an input unchanged as a view of all of it, which follows its size.
        told = [sized for sized in told if not torch.equal(sized.before.ids, sized.after.ids)]
    # What it makes besides, such as padding, has labels of its own.
    _freeze_told(gm, node, flow, [layer for sized in told for layer in (sized.before, sized.after)])
    if told and given_varying(node, flow.record):
        _lose(flow, result, [sized.after for sized in told])


def _keep_varying(
    gm: fx.GraphModule, node: fx.Node, flow: LabelFlow, result: Any, axes: frozenset[int]
) -> None:
    """Freeze the channels along these axes: the next call may choose others of them by the same node.

    A choice that leaves all as they are on the example, such as a slice of all, may not at the next call.
    """
    told = [sized for sized in flow.sized if sized.before.support & axes]
    flow.sized = [sized for sized in flow.sized if not sized.before.support & axes]
    _freeze_told(gm, node, flow, [sized.before for sized in told])
    _lose(flow, result, [sized.after for sized in told])
    if chooses(gm, node) and axes:
        given = flow.record.values_of(node.args[0])
        along = [layer for value in given for layer in value.layers if layer.support & axes]
        _freeze_told(gm, node, flow, along)
        _lose(flow, result, along)


def _freeze_told(gm: fx.GraphModule, node: fx.Node, flow: LabelFlow, told: Iterable[Layer]) -> None:
    """Freeze channels that ``node`` lays out by sizes or positions that cannot be updated."""
    hidden = node.op == "call_module" or isinstance(node.target, Apply)
    # A subscript is told places, which no shape has.
    remedy = "" if hidden or node.target is operator.getitem else "read the sizes off a tensor's shape"
    for layer in told:
        flow.freeze(layer.ids, _why_not(gm, node), remedy)


def _lose(flow: LabelFlow, result: Any, lost: Iterable[Layer]) -> None:
    """Remove layers with any of these labels from the result: another call may choose, or order, others."""
    ids = [layer.ids for layer in lost]
    for leaf in tree_leaves(result) if ids else ():
        if isinstance(leaf, Tensor):
            kept = [e for e in flow.layers(leaf) if not any(torch.isin(e.ids, each).any() for each in ids)]
            flow.put(leaf, kept)


def _follow_other(node: fx.Node, flow: LabelFlow, result: Tensor) -> None:
    """Tie the labels of a result to those of the tensor that it takes its sizes from, or freeze both."""
    other = node.args[1] if len(node.args) > 1 else node.kwargs["other"]
    given = flow.record.values_of(other)
    theirs = {layer.support: layer for value in given for layer in value.layers}
    flow.put(result, _widened_alike(flow.layers(result), theirs.values()))
    alone: list[Layer] = []
    for layer in flow.layers(result):
        like = theirs.pop(layer.support, None) or _narrowed(layer, theirs, node, flow)
        if like is None or like.ids.shape != layer.ids.shape:
            alone += [layer] if like is None else [layer, like]
        else:
            flow.bind(layer.ids, like.ids)
    for layer in [*alone, *theirs.values()]:
        flow.freeze(layer.ids, f"{node.target} takes the sizes of a tensor with other channels")


def _narrowed(
    layer: Layer, theirs: dict[frozenset[int], Layer], node: fx.Node, flow: LabelFlow
) -> Layer | None:
    """Of a layer of the other tensor that lies along more axes what is left along those of ``layer``."""
    wider = [support for support in theirs if layer.support < support]
    if len(wider) != 1:
        return None
    like = theirs.pop(wider[0])
    return flow.without(
        like, like.support - layer.support, f"{node.target} takes the sizes of a tensor with them"
    )


def _widened_alike(layers: Iterable[Layer], theirs: Iterable[Layer]) -> list[Layer]:
    """Merge constant layers into one along the axes of a layer of the other tensor, if they match."""
    layers = list(layers)
    for like in theirs:
        inside = [layer for layer in layers if layer.free and layer.support <= like.support]
        covered = frozenset[int]().union(*(layer.support for layer in inside))
        if (
            len(inside) > 1
            and covered == like.support
            and all(layer.ids.numel() == like.ids.shape[axis] for layer in inside for axis in layer.support)
        ):
            layers = [layer for layer in layers if all(layer is not each for each in inside)]
            layers.append(Layer(like.ids, torch.zeros_like(like.zero), free=True))
    return layers


def _why_not(gm: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"{_name_of(gm, node)} has sizes of its own that cannot be updated"
    return f"{_name_of(gm, node)} is told sizes or positions of these channels, which would no longer fit"


def _is_size_free(gm: fx.GraphModule, node: fx.Node, flow: LabelFlow) -> bool:
    if node.target in REPEATS and _is_told_by_tensor(node, flow):
        return False
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        activation = type(module).__module__ == "torch.nn.modules.activation"
        free = isinstance(module, SIZE_FREE_MODULES) or activation
        return free and not isinstance(module, nn.MultiheadAttention)
    if node.op not in ("call_function", "call_method"):
        return True
    if node.target in FUNCTIONALS:
        return node.target not in SIZED_FUNCTIONALS
    return node.target in SIZE_FREE


def _is_told_by_tensor(node: fx.Node, flow: LabelFlow) -> bool:
    """Whether a tensor, and no number, says how many copies of each index are made."""
    repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
    return isinstance(repeats, fx.Node) and repeats.name not in flow.record.numbers


def _is_given_no_number(node: fx.Node, flow: LabelFlow) -> bool:
    """Whether a node calls a function of torch or a method of a tensor without any number as an argument."""
    if node.op == "call_method":
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not flow.record.values.get(source.name):
            return False
    elif node.op != "call_function" or not _is_of_torch(node.target):
        return False
    given = tree_leaves((node.args, node.kwargs))
    return not any(
        # What a mode or a flag says is no number.
        not isinstance(flow.record.numbers.get(leaf.name, False), bool)
        if isinstance(leaf, fx.Node)
        else type(leaf) in (int, slice)
        for leaf in given
    )


def _is_of_torch(function: Any) -> bool:
    """Whether a function belongs to torch, or is a built-in such as an operator of Python."""
    home = getattr(function, "__module__", None) or ""
    return isinstance(function, BuiltinFunctionType) or home.partition(".")[0] == "torch"


def _follow_numbers(node: fx.Node, flow: LabelFlow, result: Any, resized: bool) -> None:
    """Follow sizes of labelled axes through arithmetic, and note which enter a computation of tensors."""
    carried = _carried(node, flow)
    leaves = tree_leaves(result)
    if _is_constant_number(node, result):
        flow.record.numbers[node.name] = int(result)
    if any(isinstance(leaf, Tensor) for leaf in leaves) or node.target is operator.setitem:
        for _, axis, ids in () if resized else carried:
            does = "the model returns" if node.op == "output" else f"{_name_of(None, node)} computes with"
            flow.counted(ids, axis, f"{does} how many of these channels there are")
        return
    if leaves and all(isinstance(leaf, (int, float)) for leaf in leaves):
        flow.record.numbers[node.name] = result
        found = _numbers_of(node, flow, carried)
        if found:
            flow.record.taint[node.name] = found


def _carried(node: fx.Node, flow: LabelFlow) -> list[Tainted]:
    """The numbers of channels that a node computes with; the second size of a grid is of no account to it."""
    given, told = list(node.all_input_nodes), flow.record.taint
    if node.target is not functional.affine_grid:
        return [entry for source in given for entry in told.get(source.name, [])]
    size: Any = node.args[1] if len(node.args) > 1 else node.kwargs["size"]
    if isinstance(size, fx.Node):
        return [entry for entry in told.get(size.name, []) if entry[0] != 1]
    sizes = [each for place, each in enumerate(size) if place != 1 and isinstance(each, fx.Node)]
    return [entry for each in sizes for entry in told.get(each.name, [])]


def _is_constant_number(node: fx.Node, result: Any) -> bool:
    """Whether the result is a 0-dim integer tensor that depends on constants only."""
    if not isinstance(result, Tensor) or result.ndim or result.is_floating_point() or result.is_complex():
        return False
    roots = [source for source in sources_of(node) if not source.all_input_nodes]
    return all(root.op == "get_attr" and str(root.target).startswith(CONSTANT) for root in roots)


def _numbers_of(node: fx.Node, flow: LabelFlow, carried: list[Tainted]) -> list[Tainted]:
    """The labels whose count the resulting numbers of ``node`` depend on."""
    source = node.args[0] if node.args else None
    values = flow.record.values_of(source)
    if isinstance(source, fx.Node) and values:
        counts_parts = node.target is operator.length_hint and _split_axis_position(source)
        return _counted_parts(source, flow) if counts_parts else _sizes_read(node, values[0])
    if node.target is operator.getitem and isinstance(node.args[1], int):
        place = node.args[1]
        return [
            (None, a, ids)
            for at, a, ids in carried
            if at is None or at == (place if place >= 0 else place + ids.ndim)
        ]
    return [(None, axis, ids) for _, axis, ids in carried]


def _sizes_read(node: fx.Node, value: Labelled) -> list[Tainted]:
    """The labels whose count is in what ``node`` reads of ``value``: its shape, a size, or anything else."""
    asked = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if node.target == "size" and isinstance(asked, int):
        asked %= len(value.shape)
        return [(None, asked, layer.ids) for layer in value.layers if asked in layer.support]
    whole = node.target == "size" or (node.target is getattr and asked == "shape")
    return [(axis if whole else None, axis, layer.ids) for layer in value.layers for axis in layer.support]


def _split_axis_position(node: fx.Node) -> int | None:
    """The position of the axis among the arguments of a node that splits a tensor; None for other nodes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return {"split": 2, "chunk": 2, "unbind": 1}.get(name)


def _counted_parts(node: fx.Node, flow: LabelFlow) -> list[Tainted]:
    """The labels whose count the number of parts depends on: those along the axis that is split."""
    place = _split_axis_position(node)
    axis = node.args[place] if place is not None and len(node.args) > place else node.kwargs.get("dim", 0)
    values = flow.record.values_of(node.args[0])
    if not values or not isinstance(axis, int):
        return []
    parted = axis % len(values[0].shape)
    return [(None, parted, layer.ids) for layer in values[0].layers if parted in layer.support]


def _name_of(gm: fx.GraphModule | None, node: fx.Node) -> str:
    if gm is not None and node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
