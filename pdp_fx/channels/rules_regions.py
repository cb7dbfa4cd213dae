"""Rules for sampling images at given positions: grid sampling, and the region pooling of torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_attention import matrix_layers
from pdp_fx.channels.rules_joining import tie_across
from pdp_fx.tracing.structure import tensors

aten = torch.ops.aten


@rule(aten.grid_sampler_2d, aten.grid_sampler_3d)
def grid_sampling(call: Call, flow: LabelFlow) -> None:
    """Images (n, channels, ...) at places (n, ..., 2): channels go on, and images go with their places.

    Deformable attention makes an image of each head: it goes together with its places.
    """
    image, places = call.args[:2]
    why = "these values choose places of another tensor"
    images, channels = list[Layer](), list[Layer]()
    for layer in matrix_layers(image, 0, (1,), flow):
        if layer.support == frozenset({0}):
            images.append(layer)
        elif layer.support == frozenset({1}):
            channels.append(layer)
        else:
            flow.freeze(layer.ids, "it is sampled along this axis")
    rest = frozenset(range(1, places.ndim))
    chosen = flow.all_without(flow.layers(places), rest, why)
    if images and chosen:
        for layer in (*images[1:], *chosen):
            flow.tie(images[0].ids.reshape(-1), layer.ids.reshape(-1))
    else:
        for layer in (*images, *chosen):
            flow.freeze(layer.ids, "images are sampled at places, and only one of them has these channels")
    kept = [*(images[:1] if chosen else ()), *channels]
    flow.put(call.result, [Layer(layer.ids, layer.zero, (layer,)) for layer in kept])


@rule("torchvision::roi_align", "torchvision::roi_pool")
def region_sampling(call: Call, flow: LabelFlow) -> None:
    """Sampling at given places keeps the channels of the image and freezes everything else."""
    image, *places = call.tensors()
    flow.freeze_all(places, "these values choose places of another tensor")
    kept = _channels(image, flow)
    for result in tensors(call.result):
        flow.put(result, [Layer(layer.ids, layer.zero, (layer,)) for layer in kept])


def _channels(image: Tensor, flow: LabelFlow) -> list[Layer]:
    """The layers along the channels of an image, (n, channels, ...); others stay."""
    layers = flow.layers(image)
    for layer in layers:
        if layer.support != frozenset({1}):
            flow.freeze(layer.ids, "it is sampled along this axis")
    return [layer for layer in layers if layer.support == frozenset({1})]


def pools_regions(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node calls torchvision's `MultiScaleRoIAlign`.

    It looks at boxes to decide on which scale it pools each of them, and does the same to all channels.
    """
    if node.op != "call_module":
        return False
    kind = type(root.get_submodule(str(node.target)))
    return (kind.__module__, kind.__qualname__) == ("torchvision.ops.poolers", "MultiScaleRoIAlign")


def pool_regions(flow: LabelFlow, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
    """Follow the channels from the images of all scales to the pooled regions: they are the same in all.

    Args:
        flow: where the labels are.
        args: of the module: images by name, boxes, sizes.
        kwargs: likewise.
        result: the pooled regions, (n, channels, height, width).
    """
    images, *places = (*args, *kwargs.values())
    flow.freeze_all(list(tensors(places)), "these values choose places of another tensor")
    across = [_channels(image, flow) for image in tensors(images)]
    flow.put(result, tie_across(across, flow))
