"""Values taken from images at given places."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import ops  # pyright: ignore[reportMissingTypeStubs]

from tests.channels.construct import Construct, conv_bn, images, sequences


def _boxes(images: Tensor) -> Tensor:
    """Two boxes for each image, as rows of (image, left, top, right, bottom)."""
    numbers = torch.arange(images.shape[0], device=images.device, dtype=images.dtype).repeat_interleave(2)
    corners = images.new_tensor([[0.0, 0.0, 3.0, 3.0], [1.0, 1.0, 5.5, 4.5]]).repeat(images.shape[0], 1)
    return torch.cat([numbers[:, None], corners], dim=1)


class SampledOnGrid(nn.Module):
    """An image is sampled along a grid of places that another layer finds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.places, self.out = conv_bn(3, 8), nn.Conv2d(3, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.places(x).tanh().permute(0, 2, 3, 1)
        return self.out(F.grid_sample(self.conv(x).relu(), grid, align_corners=False))


class SpatialTransformer(nn.Module):
    """Images are turned as the layers before say; only the images' sizes are told to the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.turn, self.out = conv_bn(3, 8), nn.Linear(8, 6), nn.Conv2d(8, 4, 1)

    def sizes(self, x: Tensor) -> Any:
        return x.size()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        turn = self.turn(x.mean((2, 3))).view(-1, 2, 3)
        return self.out(F.grid_sample(x, F.affine_grid(turn, self.sizes(x), False), align_corners=False))


class SpatialTransformerToldEach(SpatialTransformer):
    """The sizes are told one by one."""

    def sizes(self, x: Tensor) -> Any:
        batch, channels, height, width = x.shape
        return [batch, channels, height - 1, width]


class SpatialTransformerOfChannels(SpatialTransformer):
    """The grid is as high as there are channels, which therefore stay."""

    def sizes(self, x: Tensor) -> Any:
        return (x.shape[0], 1, x.shape[1], x.shape[3])


class RegionsAligned(nn.Module):
    """Regions of one image are pooled to one size."""

    pool: Any = staticmethod(ops.roi_align)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = conv_bn(3, 8), nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pool(self.conv(x).relu(), _boxes(x), 2).flatten(1))


class RegionsPooled(RegionsAligned):
    """The same with the largest value of each part."""

    pool: Any = staticmethod(ops.roi_pool)


class RegionsByPosition(RegionsAligned):
    """An operation of another package that has no rule: four channels become one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * 4, 5)
        self.conv = nn.Sequential(conv_bn(3, 6), conv_bn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(ops.ps_roi_align(self.conv(x).relu(), _boxes(x), 2).flatten(1))


class RegionsOfTwoScales(nn.Module):
    """Regions are pooled from one of two images, as in a feature pyramid: both have the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = conv_bn(3, 8), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.pool = ops.MultiScaleRoIAlign(["fine", "coarse"], output_size=2, sampling_ratio=2)
        self.out = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x).relu()
        boxes = list(_boxes(x)[:, 1:].unflatten(0, (-1, 2)).unbind())
        pooled = self.pool({"fine": fine, "coarse": self.coarse(fine)}, boxes, [(6, 6)] * len(boxes))
        return self.out(pooled.flatten(1))


class DeformableAttention(nn.Module):
    """Each head samples its own image at places that queries choose, on two scales (Deformable DETR)."""

    heads, levels, points, size = 3, 2, 2, 4

    def __init__(self) -> None:
        super().__init__()
        width, samples = self.heads * self.size, self.heads * self.levels * self.points
        self.value, self.out = nn.Linear(6, width), nn.Linear(width, 6)
        self.places, self.weights = nn.Linear(6, samples * 2), nn.Linear(6, samples)

    def start(self, x: Tensor) -> Tensor:
        """Where the queries look from, the same for all heads."""
        return torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None, None, None, None]

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        value = self.value(x).view(b, t, self.heads, self.size)
        offsets = self.places(x).view(b, t, self.heads, self.levels, self.points, 2)
        weights = self.weights(x).view(b, t, self.heads, self.levels * self.points).softmax(-1)
        weights = weights.transpose(1, 2).reshape(b * self.heads, 1, t, self.levels * self.points)
        grids = (self.start(x) + offsets).transpose(1, 2).flatten(0, 1)
        found = [
            F.grid_sample(
                image.flatten(2).transpose(1, 2).reshape(b * self.heads, self.size, 1, -1),
                grids[:, :, level],
                align_corners=False,
            )
            for level, image in enumerate(value.split([2, t - 2], 1))
        ]
        y = (torch.stack(found, -2).flatten(-2) * weights).sum(-1)
        return x + self.out(y.view(b, self.heads * self.size, t).transpose(1, 2))


class DeformableAttentionFromFixedPlaces(DeformableAttention):
    """Heads look from fixed places of their own: they stay, and what is inside them can go."""

    def start(self, x: Tensor) -> Tensor:
        return (
            torch.tensor([-0.5, 0.0, 0.5], dtype=x.dtype)[:, None, None, None] + x[..., :1, None, None, None]
        )


class Deformable(nn.Module):
    """A convolution looks pixels up at offsets that another one finds."""

    groups = 1

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = conv_bn(3, 8), nn.Conv2d(3, 27 * self.groups, 3, padding=1)
        self.conv, self.out = ops.DeformConv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        offsets, mask = self.places(x).split([18 * self.groups, 9 * self.groups], 1)
        return self.out(self.conv(self.stem(x).relu(), offsets, mask.sigmoid()).relu())


class DeformableInGroups(Deformable):
    """Two groups of channels have offsets of their own, so that these channels stay."""

    groups = 2


def _brightest(x: Tensor) -> Tensor:
    """The channels as they are, or the other way round."""
    return x if x.sum() > 0 else x.flip(1)


class ChosenByFunction(nn.Module):
    """A function that is no module decides by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner, self.out = conv_bn(3, 8), conv_bn(8, 6), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(_brightest(self.conv(x))).relu())


class Picking(nn.Module):
    """A head that decides by its data in a method, which uses none of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def pick(self, x: Tensor) -> Tensor:
        return _brightest(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(self.last(self.inner(x).relu()))


class ChosenByMethod(nn.Module):
    """The layers beside a method that is kept whole are pruned, but for the channels that go into it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = conv_bn(3, 8), Picking()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu())


REGIONS = (
    Construct(SampledOnGrid, images(), removed=4, reason="choose places"),
    Construct(SpatialTransformer, images(), removed=4),
    Construct(SpatialTransformerToldEach, images(), removed=4),
    Construct(SpatialTransformerOfChannels, images(), removed=0, reason="affine_grid computes with how many"),
    Construct(Deformable, images(), removed=8, reason="choose places"),
    Construct(DeformableInGroups, images(), removed=4, reason="has groups of these channels"),
    Construct(DeformableAttention, sequences(), removed=4 + 8 + 4),
    Construct(DeformableAttentionFromFixedPlaces, sequences(), removed=6),
    Construct(RegionsAligned, images(), removed=4),
    Construct(RegionsPooled, images(), removed=4),
    Construct(RegionsByPosition, images(), removed=3, reason="no channel rule for ps_roi_align"),
    Construct(RegionsOfTwoScales, images(), removed=4, batches=False),
    Construct(
        ChosenByFunction, images(), removed=3, reason="_brightest decides by its data what it does: it"
    ),
    Construct(
        ChosenByMethod,
        images(),
        removed=4 + 3,
        reason="%pick (nets_regions.py:201): pick decides by its data what it does",
    ),
)
