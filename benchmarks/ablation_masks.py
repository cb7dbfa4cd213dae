"""Variants of PDP's masks that exist for the ablations only, and are no better than what they vary."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from pdp_fx import MaskSite
from pdp_fx.masks import ChannelMask, WeightMask
from pdp_fx.ops.explicit import mask_axis, reclass
from pdp_fx.ops.kinds import kind_of
from pdp_fx.passes.expose_parameters import swap_modules
from pdp_fx.policy import MaskPolicy
from pdp_fx.pruner import CHILD, find


class ThroughThreshold(WeightMask):
    """PDP's soft mask with a gradient that also goes through the threshold t.

    With t = (|w_(k)| + |w_(k+1)|) / 2 and m = sigmoid((w^2 - t^2) / tau), equation 2 holds for all weights,
    and the two that t is made of get -(t / tau) sign(w) sum_i(g_i w_i m_i (1 - m_i)) each on top of it.
    """

    def soft(self, weight: Tensor) -> Tensor:
        count = min(int(self.count), weight.numel() - 1)
        if count <= 0:
            return weight
        magnitudes = weight.abs().flatten()
        t = 0.5 * (magnitudes.kthvalue(count).values + magnitudes.kthvalue(count + 1).values)
        return torch.sigmoid((weight.square() - t.square()) / self.temperature(weight)) * weight


class RawNorm(ChannelMask):
    """PDP's mask for channels by their raw L2 norms, as in the paper, instead of their root mean squares.

    Groups are ranked against each other by scores relative to those of their group, so how many channels
    each of them loses is the same where all channels of a group are made of equally many weights.
    """

    entries: Tensor

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        entries = torch.zeros(site.width + 1)
        for weight, producer in zip(site.weights, site.producers, strict=True):
            rows = weight.shape[producer.axis]
            places = torch.tensor(range(rows) if producer.places is None else producer.places)
            fan = torch.full((rows,), weight.numel() / rows)
            # Rows outside the group have the place -1, which is the spare one at the end.
            entries.index_add_(0, torch.where(places < 0, site.width, places), fan)
        self.register_buffer("entries", entries[: site.width], persistent=False)

    def scores(self, *weights: Tensor) -> Tensor:
        return super().scores(*weights) * self.entries.sqrt()


def mask_before_norms(prepared: nn.Module) -> None:
    """Move channel masks from the batch norms to the rows of the convolutions ahead of them, in place.

    This is the paper's text taken literally: the mask prunes the weights of the channel. Batch norm then
    makes a constant of what is 0, so a channel cannot be removed without a change of the outputs, and
    `pdp_fx.convert` has to refuse the model. Its ``state_dict`` is that of the model it was.

    Raises:
        ValueError: the model is not prepared, or has masks of something else than whole rows.
    """
    found = find(prepared)
    if found is None or not all(_of_rows(mask) for _, mask in found[1].mask_items()):
        raise ValueError("only masks of whole rows of convolutions can go ahead of batch norms")
    gm, pruner = found
    _unmask_norms(gm)
    for name, mask in pruner.mask_items():
        (node,) = gm.graph.find_nodes(op="call_module", target=f"{CHILD}.masks.{name}")
        _mask_rows(gm, node, mask)
    gm.graph.lint()
    gm.recompile()


def _of_rows(mask: MaskPolicy) -> bool:
    return isinstance(mask, ChannelMask) and all(p.axis == 0 and p.places is None for p in mask.producers)


def _unmask_norms(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=mask_axis):
        (norm,) = node.users
        if norm.op == "call_module" and isinstance(gm.get_submodule(str(norm.target)), nn.BatchNorm2d):
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)


def _mask_rows(gm: fx.GraphModule, node: fx.Node, mask: MaskPolicy) -> None:
    """Compute the mask ahead of everything else, and give its rows to the convolutions without one."""
    first = next(other for other in gm.graph.nodes if other.op != "placeholder")
    for moved in (*node.all_input_nodes, node):
        first.prepend(moved)
    for name, read in zip(mask.parameters_read, node.all_input_nodes, strict=True):
        owner = name.removesuffix(".weight")
        (layer,) = gm.graph.find_nodes(op="call_module", target=owner)
        if "weight" in layer.kwargs:
            continue
        module = gm.get_submodule(owner)
        kind = kind_of(module)
        if kind is not None and type(module) is not kind.explicit:
            swap_modules(gm, {module: reclass(module, kind.explicit)})
        with gm.graph.inserting_before(layer):
            layer.update_kwarg("weight", gm.graph.call_function(mask_axis, (read, node, 0)))
