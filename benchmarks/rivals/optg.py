"""OptG: optimizing the gradient-driven criteria of pruning (Zhang et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks.rivals.common import KeptSet
from pdp_fx import MaskSite, Progress
from pdp_fx.ops.select import smallest


class _ScoreThroughMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor, keep: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(weight, keep)
        return weight * keep

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, keep = ctx.saved_tensors
        return grad * keep, grad * weight, None


def score_through_mask(weight: Tensor, score: Tensor, keep: Tensor) -> Tensor:
    """``weight * keep``; the gradient of the mask reaches the score unchanged."""
    result: Any = _ScoreThroughMask.apply(weight, score, keep)
    return result


def ramp(epoch: float, epochs: int, beta: float) -> float:
    """How much of the final sparsity holds at an epoch; also the factor of the scores' learning rate."""
    return 1 / (1 + math.exp(-beta * (epoch - epochs / 2)))


class OptG(KeptSet):
    """A score per weight, trained straight through a mask that is chosen anew at the start of every epoch.

    One threshold over the scores of all layers gives each layer its rate; the mask drops as many of the
    layer's lowest scores. The schedule must count epochs and have a length.

    Args:
        site: where it stands.
        beta: the steepness of the ramp per epoch, 1 in a training of 160 to 180 epochs.
    """

    def __init__(self, site: MaskSite, beta: float = 1.0) -> None:
        super().__init__(site)
        self.beta = beta
        self.score = nn.Parameter(torch.zeros_like(site.weight))

    def soft(self, weight: Tensor) -> Tensor:
        return score_through_mask(weight, self.score, self.keep)

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        length = now.schedule.length
        if length is None:
            raise ValueError("OptG's ramp needs the length of the training: Schedule(..., length=epochs)")
        if now.counter >= length:
            return
        scores = [mask.score.detach() for mask in masks]
        total = sum(score.numel() for score in scores)
        sparsity = masks[0].ratio * ramp(now.counter, length, masks[0].beta)
        kept = math.floor((1 - sparsity) * total + 1e-9)
        least_kept = (
            torch.cat([score.flatten() for score in scores]).kthvalue(total - max(kept, 1) + 1).values
        )
        for mask, score in zip(masks, scores, strict=True):
            mask.keep.copy_(~smallest(score, int((score < least_kept).sum())))
