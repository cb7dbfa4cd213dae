"""ST-3: soft thresholding with straight-through gradients (Vanderschueren and De Vleeschouwer, 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from benchmarks.rivals.common import OwnAllocation, global_threshold
from pdp_fx import MaskSite, Progress
from pdp_fx.ops.straight import straight_through


class ST3(OwnAllocation):
    """Weights shrink by one threshold for all layers, rescaled by output channel; all get the gradient.

    The threshold is a quantile of all magnitudes, on the schedule's ramp (the paper's is cubic, from 5 % to
    50 % of the training) and follows the weights after every step: ``Schedule(per="step")``.

    Args:
        site: where it stands.
        scaled: multiply magnitudes by sqrt(sum of the weight's shape) before ranking, the paper's variant
            for fewer multiply-accumulates.
    """

    threshold: Tensor

    def __init__(self, site: MaskSite, scaled: bool = False) -> None:
        super().__init__(site)
        self.unit = sum(site.weight.shape) ** 0.5 if scaled else 1.0
        self.register_buffer("threshold", torch.zeros((), dtype=site.weight.dtype))

    def soft(self, weight: Tensor) -> Tensor:
        return straight_through(weight, self.hard(weight))

    def hard(self, weight: Tensor) -> Tensor:
        magnitude = weight.detach().abs()
        kept = (~self.pruned(weight)).to(weight.dtype)
        axes = tuple(range(1, weight.ndim))
        left = (magnitude * kept).mean(axes, keepdim=True) + 1e-6
        share = left / (magnitude.mean(axes, keepdim=True) + 1e-6)
        shrunk = weight.detach().sign() * (magnitude - self.threshold / self.unit) * kept
        return 1.01 / (share + 0.01) * shrunk

    def pruned(self, *weights: Tensor) -> Tensor:
        return self.unit * weights[0].detach().abs() <= self.threshold

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        magnitudes = [mask.unit * weight.abs() for mask, (weight,) in zip(masks, weights, strict=True)]
        count = round(masks[0].ratio * now.share * sum(m.numel() for m in magnitudes))
        found = global_threshold(magnitudes, count)
        for mask in masks:
            mask.threshold.copy_(found)
