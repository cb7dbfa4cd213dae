"""Fold BatchNorm into the layer before it.

In eval mode BatchNorm is the affine map y = (x - mean) * weight / sqrt(var + eps) + bias. The output of a
convolution or linear layer is linear in the layer's weight and bias, so these can absorb the map: every row
of the weight is multiplied by weight / sqrt(var + eps), and the bias becomes (bias - mean) times this factor
plus BatchNorm's bias. That is legal only if nothing else reads the layer's output, nothing else uses the two
modules or their parameters, and BatchNorm's channels (axis 1) are the layer's outputs. A Linear on sequences
has its outputs on the last axis instead.

Modules and functions are treated alike (`ops.folding`): a user's own layer is in the graph as the functions
that it calls. It is folded if it passes its weight to a convolution unchanged, and not if it computes one.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.channels.kept import checked_before, placed_before
from pdp_fx.compiler import Context, Pass
from pdp_fx.example_inputs import Shapes, shapes
from pdp_fx.naming import free_name
from pdp_fx.ops.folding import Fold, Unfolded, layer_at, norm_at
from pdp_fx.ops.kinds import attribute
from pdp_fx.passes.harden_masks import swap_tensors
from pdp_fx.tracing.functions import METADATA, SIZES
from pdp_fx.tracing.leaves import has_hooks
from pdp_fx.tracing.objects import MethodOf

BIAS = 2
"""The place of the bias among the arguments of a convolution or linear function."""


@dataclass(frozen=True)
class Pair:
    """A layer and the BatchNorm after it.

    Attributes:
        layer: the node of the layer.
        norm: the node of the BatchNorm.
        before: the tensors and settings of the layer.
        after: those of the BatchNorm.
        fold: computes the folded weight and bias.
    """

    layer: fx.Node
    norm: fx.Node
    before: Unfolded
    after: Unfolded
    fold: Fold

    def folded(self) -> tuple[Tensor, ...] | None:
        """The folded weight and bias, computed in float64; None if they do not fit into the layer's dtype.

        A small variance can make weights too large for half precision, and a large variance too small.
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
    """Folds what can be folded exactly; any other BatchNorm stays."""

    name: ClassVar[str] = "fold-batch-norm"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        uses = _uses(gm)
        pairs = [pair for node in gm.graph.nodes if (pair := _foldable(gm, node, uses))]
        edited = False
        for pair in _on_channels(gm, pairs, ctx):
            folded = pair.folded()
            if folded is not None:
                if len(pair.after.ranks) > 1:
                    _hold_to_rank(pair)
                _write(gm, pair, *folded)
                edited = True
        return edited


def _uses(gm: fx.GraphModule) -> Counter[int]:
    """How often the graph uses each module, parameter and buffer, by its id."""
    uses: Counter[int] = Counter()
    for node in gm.graph.nodes:
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            uses[id(module)] += 1
            uses.update(id(tensor) for tensor in [*module.parameters(), *module.buffers()])
            # What a method that is kept whole uses, others hold.
            if isinstance(module, MethodOf):
                uses.update(id(attribute(gm, name)) for name in module.uses)
        elif node.op == "get_attr":
            readers = sum(not _reads_metadata(user) for user in node.users)
            uses[id(attribute(gm, node.target))] += readers
    return uses


def _reads_metadata(node: fx.Node) -> bool:
    """Whether ``node`` reads only the size, dtype or the like of a tensor, which folding does not change."""
    asked = node.args[1] if node.target is getattr else node.target
    return asked in METADATA | SIZES


def _foldable(gm: fx.GraphModule, norm: fx.Node, uses: Counter[int]) -> Pair | None:
    """The layer and the BatchNorm, if ``norm`` is one that can be folded, or None."""
    after = norm_at(gm, norm)
    layer = norm.all_input_nodes[0] if after is not None else None
    before = None if layer is None else layer_at(gm, layer)
    if after is None or layer is None or before is None or before.fold is None:
        return None
    alone = len(layer.users) == 1 and all(uses[id(part)] == 1 for part in (*before.parts, *after.parts))
    hooked = any(has_hooks(part) for part in (*before.parts, *after.parts) if isinstance(part, nn.Module))
    return Pair(layer, norm, before, after, before.fold) if alone and not hooked else None


def _on_channels(gm: fx.GraphModule, pairs: list[Pair], ctx: Context) -> list[Pair]:
    """The pairs whose layer has its outputs on axis 1: those whose output has as many axes as the weight."""
    ranks = {pair.norm.name: pair.after.ranks for pair in pairs}
    if ctx.example_inputs is not None and any(len(possible) > 1 for possible in ranks.values()):
        known = ctx.find(Shapes)
        seen = shapes(gm, ctx.example_inputs) if known is None else known.found
        ranks = {norm: (len(seen[norm]),) for norm in ranks}
    return [pair for pair in pairs if ranks[pair.norm.name] == (_weight(pair.before.module).ndim,)]


def _vanishes(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether even the largest weight is subnormal in this dtype, and so has lost digits."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    return 0 < largest < torch.finfo(dtype).tiny


def _hold_to_rank(pair: Pair) -> None:
    """Check that the layer's output has its channels on the axis along which the BatchNorm scaled it."""
    rank = _weight(pair.before.module).ndim
    message = (
        f"{pair.layer.name} has taken a BatchNorm in, which is right only where its output has {rank} axes, "
        "as for the example inputs; other inputs need a model converted from example_inputs like them"
    )
    checked_before(pair.norm, placed_before(pair.norm, "dim", pair.layer), rank, message)


def _write(gm: fx.GraphModule, pair: Pair, weight: Tensor, bias: Tensor) -> None:
    """Put the folded tensors in the place of the layer's own, and remove the BatchNorm."""
    pair.norm.replace_all_uses_with(pair.layer)
    gm.graph.erase_node(pair.norm)
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
    """Register a bias and pass it to the function call ``layer``, which had none."""
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
