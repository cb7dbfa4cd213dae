"""GraNet: sparse training via boosting pruning plasticity with neuroregeneration (Liu et al., 2021)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from benchmarks.rivals.common import KeptSet, global_smallest
from pdp_fx import MaskSite, Progress
from pdp_fx.ops.select import smallest


class GraNet(KeptSet):
    """Sparse from the start; every so many steps it prunes by magnitude, then swaps small weights for others.

    The schedule must count steps and have a length. Masks begin at random, with the densities of ERK. The
    original sets the momentum of a pruned weight to 0; here such a weight gets no gradient, and what it has
    fades before the next change of the masks.

    Args:
        site: where it stands.
        every: steps from one change of the masks to the next.
        density: share of all weights that stay at the start, or the target where that is more.
        ramp: share of the training in which the density falls to the target.
        swapped: share of the remaining weights that are swapped at the first change.
        swapped_last: the same at the end of the training.
        seed: of the first masks, together with the name of the layer: layers of one size that are masked
            apart from each other must not begin alike.
    """

    def __init__(
        self,
        site: MaskSite,
        every: int = 1000,
        density: float = 0.5,
        ramp: float = 0.5,
        swapped: float = 0.5,
        swapped_last: float = 0.005,
        seed: int = 0,
    ) -> None:
        super().__init__(site)
        self.every = every
        self.density = max(density, 1 - self.ratio)
        self.ramp = ramp
        self.swapped = swapped
        self.swapped_last = swapped_last
        self.seed = seed + zlib.crc32(site.names[0].encode())
        self.dense_grad: Tensor | None = None

    def soft(self, weight: Tensor) -> Tensor:
        masked = weight * self.keep
        if masked.requires_grad:
            masked.register_hook(self._remember)
        return masked

    def _remember(self, grad: Tensor) -> None:
        self.dense_grad = grad.detach()

    def density_at(self, step: int, length: int) -> float:
        """The share of all weights that stay at a step."""
        progress = min(step / (self.ramp * length), 1.0)
        final = 1 - self.ratio
        return self.density - (self.density - final) * (1 - (1 - progress) ** 3)

    def swapped_at(self, step: int, length: int) -> float:
        """The share of the remaining weights that are swapped at a step: half a cosine."""
        return self.swapped_last + 0.5 * (self.swapped - self.swapped_last) * (
            1 + math.cos(math.pi * step / length)
        )

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        first, length, step = masks[0], now.schedule.length, now.counter
        if length is None:
            raise ValueError("GraNet needs the length of the training: Schedule(..., length=steps)")
        plain = [weight for (weight,) in weights]
        if step == 0:
            _start(masks, plain)
        elif step % first.every == 0 and step < length:
            if step - first.every < first.ramp * length:
                _prune(masks, plain, first.density_at(step, length))
            for mask, weight in zip(masks, plain, strict=True):
                _swap(mask, weight, first.swapped_at(step, length))
        for mask, weight in zip(masks, plain, strict=True):
            weight.mul_(mask.keep)


def erk(shapes: Sequence[tuple[int, ...]], density: float) -> list[float]:
    """Densities in proportion to sum(shape) / prod(shape), none above 1, with ``density`` over all."""
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while True:
        open_ = [index for index in range(len(sizes)) if index not in dense]
        if not open_:
            return [1.0] * len(sizes)
        left = density * sum(sizes) - sum(sizes[index] for index in dense)
        factor = left / sum(raw[index] * sizes[index] for index in open_)
        over = [index for index in open_ if factor * raw[index] > 1]
        if not over:
            return [1.0 if index in dense else factor * raw[index] for index in range(len(sizes))]
        dense.update(over)


def _start(masks: Sequence[GraNet], weights: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(masks[0].seed)
    densities = erk([tuple(weight.shape) for weight in weights], masks[0].density)
    for mask, weight, density in zip(masks, weights, densities, strict=True):
        kept = torch.randperm(weight.numel(), generator=generator)[: round(density * weight.numel())]
        keep = torch.zeros(weight.numel(), dtype=torch.bool)
        keep[kept] = True
        mask.keep.copy_(keep.view(weight.shape))


def _prune(masks: Sequence[GraNet], weights: Sequence[Tensor], density: float) -> None:
    """Leave the largest weights over all layers; what is pruned already goes first."""
    total = sum(weight.numel() for weight in weights)
    scores = [torch.where(m.keep, w.abs(), -1.0) for m, w in zip(masks, weights, strict=True)]
    for mask, gone in zip(masks, global_smallest(scores, total - round(density * total)), strict=True):
        mask.keep.logical_and_(~gone)


def _swap(mask: GraNet, weight: Tensor, share: float) -> None:
    """Drop the smallest weights that are left, and let those with the largest gradients start at 0."""
    if mask.dense_grad is None:
        return
    count = math.ceil(share * int(mask.keep.sum()))
    kept = torch.where(mask.keep, weight.abs(), torch.inf)
    mask.keep.logical_and_(~smallest(kept, count))
    weight.mul_(mask.keep)
    mask.keep.logical_or_(smallest(torch.where(mask.keep, torch.inf, -mask.dense_grad.abs()), count))
