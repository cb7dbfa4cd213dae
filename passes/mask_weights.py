"""Put the mask of its policy between every planned weight and its uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pdp_fx.compiler import Context, Pass
from pdp_fx.granularity import NM
from pdp_fx.masks import MaskOwnWeight, NMMask, WeightMask
from pdp_fx.ops.explicit import reclass
from pdp_fx.ops.kinds import kind_of
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.expose_parameters import Exposed, swap_module
from pdp_fx.passes.find_sites import layers_in
from pdp_fx.policy import MaskPolicy, MaskSite, NMPolicy, WeightPolicy, made
from pdp_fx.pruner import CHILD, Pruner


@dataclass(frozen=True)
class MaskWeights(Pass):
    """One mask module per weight; a tied weight has one mask for all its uses."""

    name: ClassVar[str] = "mask-weights"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        pruner, exposed = ctx.get(Pruner), ctx.get(Exposed)
        for site, rule in ctx.get(Plan).weights:
            weight = gm.get_parameter(site.parameter)
            where = MaskSite((site.parameter,), rule, ctx.spec.softness, (weight,))
            if isinstance(rule, NM):
                mask = made(where, NMMask, NMPolicy)
            else:
                mask = made(where, WeightMask, WeightPolicy)
            key = pruner.add(site.parameter, mask, rule)
            _mask_inside(gm, site.parameter, mask)
            read = exposed.nodes.get(site.parameter)
            if read is None:
                continue
            with gm.graph.inserting_after(read):
                masked = gm.graph.create_node(
                    "call_module", f"{CHILD}.masks.{key}", (read,), name=f"{key}_masked"
                )
            masked.meta = dict(read.meta)
            exposed.wrap(site.parameter, masked)
        return bool(ctx.get(Plan).weights)


def _mask_inside(gm: fx.GraphModule, parameter: str, mask: MaskPolicy) -> None:
    """Let layers inside modules that are kept whole read the masked weight."""
    weight = gm.get_parameter(parameter)
    for node in gm.graph.find_nodes(op="call_module"):
        whole = gm.get_submodule(str(node.target))
        for layer in layers_in(gm, node):
            kind = kind_of(layer)
            if layer is whole or kind is None or getattr(layer, "weight", None) is not weight:
                continue
            explicit = layer if type(layer) is kind.explicit else reclass(layer, kind.explicit)
            explicit.register_forward_pre_hook(MaskOwnWeight(mask), with_kwargs=True)
            swap_module(gm, layer, explicit)
