"""Put a mask between every planned weight and its uses; the policy of the weight's rule makes the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, fx, nn

from pdp_fx.compiler import Context, Pass
from pdp_fx.granularity import NM, Unstructured
from pdp_fx.masks import MaskOwnWeight, NMMask, Thresholded, WeightMask
from pdp_fx.ops.explicit import reclass
from pdp_fx.ops.kinds import kind_of
from pdp_fx.ops.together import Together
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.expose_parameters import Exposed, swap_modules
from pdp_fx.passes.find_sites import Site, layers_in
from pdp_fx.policy import MaskPolicy, MaskSite, NMPolicy, WeightPolicy, make_mask, to_inputs
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.spec import PruneSpec
from pdp_fx.tracing.blocks import MAY_WAIT
from pdp_fx.tracing.modes import called_modules


@dataclass(frozen=True)
class MaskWeights(Pass):
    """One mask module per weight; a tied weight has one mask for all its uses."""

    name: ClassVar[str] = "mask-weights"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        pruner, exposed = ctx.get(Pruner), ctx.get(Exposed)
        masks: dict[int, MaskPolicy] = {}
        together = Together()
        for site, rule in ctx.get(Plan).weights:
            weight = gm.get_parameter(site.parameter)
            mask = masks[id(weight)] = _mask_for(site, rule, weight, ctx.spec)
            if isinstance(mask, Thresholded):
                mask.together = together
            key = pruner.add(site.parameter, mask, rule)
            if site.parameter in exposed.nodes:
                _insert_mask(gm.graph, exposed, site.parameter, key)
        _mask_inside(gm, masks)
        return bool(masks)


def _mask_for(site: Site, rule: Unstructured | NM, weight: Tensor, spec: PruneSpec) -> WeightPolicy:
    where = MaskSite((site.parameter,), rule, spec.softness, (weight,), pruned_decay=spec.pruned_decay)
    if isinstance(rule, NM):
        where = replace(where, weights=(to_inputs(weight, site.axis),), axis=site.axis)
        return make_mask(where, NMMask, NMPolicy)
    return make_mask(where, WeightMask, WeightPolicy)


def _insert_mask(graph: fx.Graph, exposed: Exposed, parameter: str, key: str) -> None:
    """Insert a call of the mask registered under ``key`` between a parameter and its uses."""
    read = exposed.nodes[parameter]
    with graph.inserting_after(read):
        masked = graph.create_node("call_module", f"{CHILD}.masks.{key}", (read,), name=f"{key}_masked")
    masked.meta = read.meta | {MAY_WAIT: True}
    exposed.wrap(parameter, masked)


def _mask_inside(gm: fx.GraphModule, masks: Mapping[int, MaskPolicy]) -> None:
    """Give layers inside modules kept whole their masked weights, by a hook.

    Args:
        gm: the graph module.
        masks: the masks, by the id of the weight.
    """
    swaps: dict[nn.Module, nn.Module] = {}
    for target in called_modules(gm.graph):
        whole = gm.get_submodule(target)
        for layer in layers_in(gm, whole):
            kind = kind_of(layer)
            if layer is whole or layer in swaps or kind is None:
                continue
            own = {name: id(getattr(layer, name)) for name in kind.weights_of(layer)}
            masked = {name: masks[weight] for name, weight in own.items() if weight in masks}
            if masked:
                swaps[layer] = layer if type(layer) is kind.explicit else reclass(layer, kind.explicit)
            for name, mask in masked.items():
                swaps[layer].register_forward_pre_hook(MaskOwnWeight(mask, name), with_kwargs=True)
    swap_modules(gm, swaps)
