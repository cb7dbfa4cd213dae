"""Put an unstructured or N:M mask between every planned weight and its uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pdp_fx.compiler import Context, Pass
from pdp_fx.granularity import NM
from pdp_fx.masks import NMMask, WeightMask
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.expose_parameters import Exposed
from pdp_fx.pruner import CHILD, Pruner


@dataclass(frozen=True)
class MaskWeights(Pass):
    """One mask module per weight; a tied weight has one mask for all its uses."""

    name: ClassVar[str] = "mask-weights"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        pruner, exposed = ctx.get(Pruner), ctx.get(Exposed)
        for site, rule in ctx.get(Plan).weights:
            reads = (site.parameter,)
            if isinstance(rule, NM):
                mask = NMMask(reads, ctx.spec.tau, rule.keep, rule.of)
            else:
                mask = WeightMask(reads, ctx.spec.tau)
            key = pruner.add(site.parameter, mask, rule)
            read = exposed.nodes[site.parameter]
            with gm.graph.inserting_after(read):
                masked = gm.graph.create_node(
                    "call_module", f"{CHILD}.masks.{key}", (read,), name=f"{key}_masked"
                )
            masked.meta = dict(read.meta)
            exposed.wrap(site.parameter, masked)
        return bool(ctx.get(Plan).weights)
