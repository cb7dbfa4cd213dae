"""Channel scores after DCP, SCP and NISP: "-style", since not all of their details are published.

Each is computed once, from a trained dense net, and handed to masks that are hard from the moment that the
schedule says. Channels of one group share a score over everything that makes or reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, fx, nn

from pdp_fx import ChannelPolicy, MaskSite
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.pruner import find

Loss = Callable[[nn.Module], Tensor]
"""The mean loss of a model in training, over a batch or more."""


class ScoredChannels(ChannelPolicy):
    """Hard masks by scores that something else has computed.

    Attributes:
        given: the scores, a buffer; all 1 at first.
    """

    given: Tensor

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.register_buffer("given", torch.ones(site.width))

    def soft(self, *weights: Tensor) -> Tensor:
        return self.hard(*weights)

    def scores(self, *weights: Tensor) -> Tensor:
        return self.given


def dcp_style(model: nn.Module, loss: Loss) -> None:
    """Discrimination-aware pruning (Zhuang et al., 2018): gradients of the loss by input channel.

    The score of channel k is the sum over the readers' outputs o of ||dL/dW[o, k]||. Of the original's loss
    only the classifier's part is here, and channels are chosen at once, not one after the other.
    """
    gm, channels, groups = _parts(model)
    loss(gm).backward()
    for group, mask in groups:
        total = torch.zeros(group.width, dtype=torch.float64)
        for slot in group.members:
            gradient = gm.get_parameter(slot.tensor).grad if _reads(gm, slot) else None
            if gradient is not None:
                flat = gradient.detach().double().reshape(*gradient.shape[:2], -1)
                norms = torch.linalg.vector_norm(flat, dim=2).sum(0).cpu()
                total += _along(channels, group, slot, norms)
        mask.given.copy_(total)
    gm.zero_grad()


def scp_style(model: nn.Module, loss: Loss) -> None:
    """Operation-aware soft pruning (Kang and Han, 2020): how probably batch norm lets a channel through.

    The output of batch norm is taken as normal with mean beta and deviation |gamma|; the score is the
    probability that ReLU passes some of it, the largest over the batch norms of the group.
    """
    gm, channels, groups = _parts(model)
    for group, mask in groups:
        best = torch.zeros(group.width, dtype=torch.float64)
        for norm, slot in _norms(gm, group):
            passed = 0.5 * (1 + torch.erf(norm.bias.double() / (norm.weight.double().abs() * 2**0.5)))
            best = torch.maximum(best, _along(channels, group, slot, passed.detach().cpu()))
        mask.given.copy_(best)


def nisp_style(model: nn.Module, loss: Loss) -> None:
    """Neuron importance score propagation (Yu et al., 2018): s_k = |W|^T s_{k+1}, from the outputs back.

    It is the gradient of a net with all weights positive, of which all inputs are 1: then every ReLU passes
    everything. Batch norm counts as the scale that it has in eval mode. The original ranks the features
    before the classifier by a method of its own; here all outputs weigh the same.
    """
    gm, channels, groups = _parts(model)
    positive = copy.deepcopy(gm).eval()
    with torch.no_grad():
        for name, parameter in positive.named_parameters():
            parameter.copy_(torch.zeros_like(parameter) if name.endswith("bias") else parameter.abs())
        for module in positive.modules():
            if isinstance(module, nn.BatchNorm2d):
                _as_scale(module)
    positive.zero_grad()
    positive(torch.ones(1, *_shape(gm), device=next(gm.parameters()).device)).sum().backward()
    for group, mask in groups:
        total = torch.zeros(group.width, dtype=torch.float64)
        for norm, slot in _norms(positive, group):
            if norm.bias.grad is not None:
                total += _along(channels, group, slot, norm.bias.grad.double().cpu())
        mask.given.copy_(total)


def _as_scale(norm: nn.BatchNorm2d) -> None:
    """Leave of a batch norm in eval mode nothing but its scale."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a batch norm without running statistics has no scale of its own")
    norm.running_mean.zero_()


def _parts(model: nn.Module) -> tuple[fx.GraphModule, ChannelMap, list[tuple[ChannelGroup, ScoredChannels]]]:
    found = find(model)
    if found is None or found[1].channels is None:
        raise ValueError("channel scores need a model that was prepared with example inputs")
    gm, pruner = found
    masks = [mask for _, mask in pruner.mask_items() if isinstance(mask, ChannelPolicy)]
    pairs = zip((group for group, _ in pruner.groups), masks, strict=True)
    return gm, found[1].channels, [(g, mask) for g, mask in pairs if isinstance(mask, ScoredChannels)]


def _shape(gm: fx.GraphModule) -> tuple[int, ...]:
    """The shape of one example."""
    found = find(gm)
    example: Tensor = found[1].example_inputs[0][0] if found else torch.empty(0)
    return tuple(example.shape[1:])


def _reads(gm: fx.GraphModule, slot: Slot) -> bool:
    """Whether the slot is the input axis of a convolution or linear layer."""
    return slot.axis == 1 and any(name == slot.tensor for name, _ in gm.named_parameters())


def _norms(gm: fx.GraphModule, group: ChannelGroup) -> Iterator[tuple[nn.BatchNorm2d, Slot]]:
    """The batch norms that carry channels of the group."""
    for slot in group.members:
        owner, _, name = slot.tensor.rpartition(".")
        module = gm.get_submodule(owner)
        if name == "running_var" and isinstance(module, nn.BatchNorm2d):
            yield module, slot


def _along(channels: ChannelMap, group: ChannelGroup, slot: Slot, values: Tensor) -> Tensor:
    """Values along an axis, added up for each channel of the group."""
    place = {root: index for index, root in enumerate(group.classes.tolist())}
    places = np.array([place.get(root, group.width) for root in channels.slots[slot].tolist()])
    sums = torch.zeros(group.width + 1, dtype=torch.float64)
    return sums.index_add(0, torch.from_numpy(places), values.double())[: group.width]
