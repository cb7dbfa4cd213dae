"""Fold BatchNorm into the layer before it.

In eval mode BatchNorm is the affine map y = (x - mean) * weight / sqrt(var + eps) + bias. After a
layer whose outputs are linear in its weight and bias, both can absorb it: every output row is
scaled by weight / sqrt(var + eps), and the bias moves along. It is legal only if nobody else sees
the layer's output, nobody else uses the two modules or their parameters, and the channels that
BatchNorm reads (axis 1) are the layer's outputs: a Linear of sequences has them on the last axis.

What counts is what is computed. A user's own layer is in the graph as the functions that it calls,
so it folds if it gives its weight to a convolution as it is, and not if it computes another one.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.compiler import Context, Pass
from pdp_fx.example_inputs import Shapes, shapes
from pdp_fx.naming import free_name
from pdp_fx.ops.folding import Fold, Unfolded, layer_at, norm_at
from pdp_fx.ops.kinds import attribute
from pdp_fx.passes.harden_masks import swap_tensors
from pdp_fx.tracing.functions import METADATA, SIZES

BIAS = 2
"""The place of the bias among the arguments of a convolution or linear function."""


@dataclass(frozen=True)
class Pair:
    """A layer and the BatchNorm behind it, as nodes and as what they compute with."""

    layer: fx.Node
    norm: fx.Node
    before: Unfolded
    after: Unfolded
    fold: Fold

    def folded(self) -> tuple[Tensor, ...] | None:
        """The folded weight and bias, computed in float64; None if they do not fit into the layer's dtype.

        Half precision has no room for a weight that a small variance makes large, or a large one small.
        """
        layer, norm = (copy.deepcopy(part.module).double() for part in (self.before, self.after))
        dtype = _weight(self.before.module).dtype
        with torch.no_grad():
            exact = self.fold(layer, norm)
        found = tuple(tensor.detach().to(dtype) for tensor in exact)
        fits = all(bool(tensor.isfinite().all()) for tensor in found)
        return found if fits and not _vanishes(exact[0], dtype) else None


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Works on plain modules in eval mode; a BatchNorm that cannot be folded stays."""

    name: ClassVar[str] = "fold-batch-norm"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        uses = _uses(gm)
        pairs = [pair for node in gm.graph.nodes if (pair := _foldable(gm, node, uses))]
        edited = False
        for pair in _on_channels(gm, pairs, ctx):
            folded = pair.folded()
            if folded is None:
                continue
            _write(gm, pair, *folded)
            pair.norm.replace_all_uses_with(pair.layer)
            gm.graph.erase_node(pair.norm)
            edited = True
        return edited


def _uses(gm: fx.GraphModule) -> Counter[int]:
    """How often the graph uses each module, parameter and buffer, by identity."""
    uses: Counter[int] = Counter()
    for node in gm.graph.nodes:
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            uses[id(module)] += 1
            uses.update(id(tensor) for tensor in [*module.parameters(), *module.buffers()])
        elif node.op == "get_attr":
            readers = sum(not _only_looks(user) for user in node.users)
            uses[id(attribute(gm, node.target))] += readers
    return uses


def _only_looks(node: fx.Node) -> bool:
    """Whether ``node`` asks a tensor for its size or the like, which folding does not change."""
    asked = node.args[1] if node.target is getattr else node.target
    return asked in METADATA | SIZES


def _foldable(gm: fx.GraphModule, norm: fx.Node, uses: Counter[int]) -> Pair | None:
    """The layer and the norm, if ``norm`` is a BatchNorm that can go."""
    after = norm_at(gm, norm)
    layer = norm.all_input_nodes[0] if after is not None else None
    before = None if layer is None else layer_at(gm, layer)
    if after is None or layer is None or before is None or before.fold is None:
        return None
    alone = len(layer.users) == 1 and all(uses[id(part)] == 1 for part in (*before.parts, *after.parts))
    hooked = any(_has_hooks(part) for part in (*before.parts, *after.parts) if isinstance(part, nn.Module))
    return Pair(layer, norm, before, after, before.fold) if alone and not hooked else None


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[table] for table in ("_forward_hooks", "_forward_pre_hooks"))


def _on_channels(gm: fx.GraphModule, pairs: list[Pair], ctx: Context) -> list[Pair]:
    """The pairs whose layer has its outputs on axis 1: it has as many axes as its weight then."""
    ranks = {pair.norm.name: pair.after.ranks for pair in pairs}
    if ctx.example_inputs is not None and any(len(possible) > 1 for possible in ranks.values()):
        known = ctx.find(Shapes)
        seen = shapes(gm, ctx.example_inputs) if known is None else known.found
        ranks = {norm: (len(seen[norm]),) for norm in ranks}
    return [pair for pair in pairs if ranks[pair.norm.name] == (_weight(pair.before.module).ndim,)]


def _vanishes(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether even the largest weight is too small to have all its digits in this dtype."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    return 0 < largest < torch.finfo(dtype).tiny


def _write(gm: fx.GraphModule, pair: Pair, weight: Tensor, bias: Tensor) -> None:
    """Put the folded tensors where the layer reads its own."""
    layer, reads = cast(nn.Conv2d, pair.before.module), pair.before.reads
    new = [nn.Parameter(tensor, pair.before.trainable) for tensor in (weight, bias)]
    if not reads:
        layer.weight, layer.bias = new
        return
    _rewrite(gm, reads["weight"], new[0])
    if "bias" in reads:
        _rewrite(gm, reads["bias"], new[1])
    else:
        _give_bias(gm, pair.layer, f"{reads['weight'].name}_bias", new[1])


def _give_bias(gm: fx.GraphModule, layer: fx.Node, stem: str, bias: nn.Parameter) -> None:
    """Let a function without a bias read this one."""
    name = free_name(gm, stem)
    gm.register_parameter(name, bias)
    with gm.graph.inserting_before(layer):
        read = gm.graph.get_attr(name)
    read.meta = dict(layer.meta)
    if len(layer.args) > BIAS:
        layer.update_arg(BIAS, read)
    else:
        layer.update_kwarg("bias", read)


def _rewrite(gm: fx.GraphModule, read: fx.Node, new: nn.Parameter) -> None:
    swap_tensors(gm, {gm.get_parameter(str(read.target)): new})


def _weight(module: nn.Module) -> Tensor:
    return cast(nn.Conv2d, module).weight
