"""Fold BatchNorm into the layer before it.

In eval mode BatchNorm is the affine map y = (x - mean) * weight / sqrt(var + eps) + bias. After a
layer whose outputs are linear in its weight and bias, both can absorb it: every output row is
scaled by weight / sqrt(var + eps), and the bias moves along. It is legal only if nobody else sees
the layer's output, nobody else uses the two modules or their parameters, and the channels that
BatchNorm reads (axis 1) are the layer's outputs: a Linear of sequences has them on the last axis.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn

from pdp_fx.channels.running import place_arguments
from pdp_fx.compiler import Context, Pass
from pdp_fx.example_inputs import Inputs, fresh, trial
from pdp_fx.ops.kinds import Fold, kind_of

Pair = tuple[fx.Node, fx.Node, Fold]
"""A layer, the BatchNorm behind it, and the way to fold it."""


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Works on plain modules in eval mode; a BatchNorm that cannot be folded stays."""

    name: ClassVar[str] = "fold-batch-norm"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        uses = _uses(gm)
        pairs = [
            pair for node in gm.graph.find_nodes(op="call_module") if (pair := _foldable(gm, node, uses))
        ]
        pairs = _on_channels(gm, pairs, ctx.example_inputs)
        for layer, norm, fold in pairs:
            module = gm.get_submodule(str(layer.target))
            _absorb(module, gm.get_submodule(str(norm.target)), fold)
            norm.replace_all_uses_with(layer)
            gm.graph.erase_node(norm)
        return bool(pairs)


def _uses(gm: fx.GraphModule) -> Counter[int]:
    """How often the graph uses each module, parameter and buffer, by identity."""
    uses: Counter[int] = Counter()
    for node in gm.graph.nodes:
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            uses[id(module)] += 1
            uses.update(id(tensor) for tensor in [*module.parameters(), *module.buffers()])
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            uses[id(getattr(gm.get_submodule(owner), name))] += 1
    return uses


def _foldable(gm: fx.GraphModule, norm: fx.Node, uses: Counter[int]) -> Pair | None:
    """The layer, the norm and the way to fold them, if ``norm`` is a BatchNorm that can go."""
    module = gm.get_submodule(str(norm.target))
    kind = kind_of(module)
    layer = norm.all_input_nodes[0] if norm.all_input_nodes else None
    if kind is None or not kind.norm_ranks or layer is None or layer.op != "call_module":
        return None
    before = gm.get_submodule(str(layer.target))
    fold = getattr(kind_of(before), "fold", None)
    alone = len(layer.users) == 1 and all(
        uses[id(part)] == 1
        for owner in (module, before)
        for part in (owner, *owner.parameters(), *owner.buffers())
    )
    tracked = cast(Any, module).running_mean is not None
    hooked = _has_hooks(module) or _has_hooks(before)
    return (layer, norm, fold) if fold is not None and alone and tracked and not hooked else None


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[table] for table in ("_forward_hooks", "_forward_pre_hooks"))


def _on_channels(gm: fx.GraphModule, pairs: list[Pair], inputs: Inputs | None) -> list[Pair]:
    """The pairs whose layer has its outputs on axis 1: it has as many axes as its weight then."""
    wanted = {
        norm: cast(nn.Conv2d, gm.get_submodule(str(layer.target))).weight.ndim for layer, norm, _ in pairs
    }
    ranks = {norm: _ranks(gm, norm) for norm in wanted}
    if inputs is not None and any(len(possible) > 1 for possible in ranks.values()):
        seen = _RankInterpreter(gm)
        with trial(gm):
            seen.run(*place_arguments(gm, fresh(inputs)))
        ranks = {norm: (seen.ranks[norm],) for norm in wanted}
    return [pair for pair in pairs if ranks[pair[1]] == (wanted[pair[1]],)]


def _ranks(gm: fx.GraphModule, norm: fx.Node) -> tuple[int, ...]:
    """The numbers of axes that the input of a BatchNorm may have."""
    kind = kind_of(gm.get_submodule(str(norm.target)))
    return kind.norm_ranks if kind is not None else ()


class _RankInterpreter(fx.Interpreter):
    """Runs a graph and notes the number of axes of every result."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.ranks: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.ranks[n] = result.ndim
        return result


def _absorb(layer: nn.Module, norm: nn.Module, fold: Fold) -> None:
    """Write the folded weight and bias into ``layer``; the arithmetic is done in float64."""
    old = cast(nn.Conv2d, layer).weight
    dtype, trainable = old.dtype, old.requires_grad
    with torch.no_grad():
        weight, bias = fold(layer.double(), norm.double())
    for name, tensor in (("weight", weight), ("bias", bias)):
        layer.register_parameter(name, nn.Parameter(tensor.detach().to(dtype), requires_grad=trainable))
