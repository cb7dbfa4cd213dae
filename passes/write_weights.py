"""Write computed weights into the parameters that they stand for.

In eval mode a weight that is computed from parameters is a constant. Once it is stored as a parameter, a
layer with weight standardisation, for example, becomes a plain one, and the computation is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from pdp_fx.compiler import Context, Pass
from pdp_fx.passes.harden_masks import swap_tensors
from pdp_fx.pruner import Pruner
from pdp_fx.weights.sources import computed, sources_of


@dataclass(frozen=True)
class WriteWeights(Pass):
    """Leaves a graph in which layers and masks read every pruned weight from a parameter."""

    name: ClassVar[str] = "write-weights"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        pruner = ctx.get(Pruner)
        nodes = {node.name: node for node in gm.graph.nodes}
        for name, place in pruner.computed.items():
            old = gm.get_parameter(name)
            with torch.no_grad():
                # Rows of equal length are ranked by their last bits, which depend on how memory is laid out.
                value = computed(gm, nodes[place]).to(old.dtype, copy=True)
                swap_tensors(gm, {old: nn.Parameter(value, requires_grad=old.requires_grad)})
            _read_instead(gm.graph, nodes[place], name)
        written, pruner.computed = bool(pruner.computed), {}
        return written


def _read_instead(graph: fx.Graph, weight: fx.Node, name: str) -> None:
    """Replace a computed weight by a read of the parameter ``name``, and erase its computation."""
    with graph.inserting_before(weight):
        read = graph.get_attr(name)
    read.meta = dict(weight.meta)
    sources = sources_of(weight)
    weight.replace_all_uses_with(read)
    for source in reversed(sources):
        if not source.users:
            graph.erase_node(source)
