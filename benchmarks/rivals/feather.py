"""Feather: an elegant solution to effective DNN sparsification (Glentis Georgoulakis et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from benchmarks.rivals.common import OwnAllocation, global_threshold
from pdp_fx import MaskSite, Progress
from pdp_fx.ops.straight import straight_through


class Feather(OwnAllocation):
    """w' = sign(w) (|w|^3 - T^3)^(1/3) above a threshold T for all layers; all weights get a gradient.

    The threshold is a quantile of all magnitudes, on the schedule's ramp (the paper's is cubic, over the
    first half of the training), and follows the weights after every step: ``Schedule(per="step")``.

    Args:
        site: where it stands.
        theta: the factor of the gradient of pruned weights, 1 up to a sparsity of 95 % and 0.5 above.
        overall: the share of all weights of the net that go, which decides about theta where layers have
            ratios of their own; by default that of the rule.
    """

    threshold: Tensor

    def __init__(self, site: MaskSite, theta: float | None = None, overall: float | None = None) -> None:
        super().__init__(site)
        sparsity = self.ratio if overall is None else overall
        self.theta = theta if theta is not None else 1.0 if sparsity <= 0.95 else 0.5
        self.register_buffer("threshold", torch.zeros((), dtype=site.weight.dtype))

    def soft(self, weight: Tensor) -> Tensor:
        factor = torch.where(self.pruned(weight), self.theta, 1.0).to(weight.dtype)
        return straight_through(weight, self.hard(weight), factor)

    def hard(self, weight: Tensor) -> Tensor:
        magnitude = weight.detach().abs()
        rest = (magnitude.pow(3) - self.threshold.pow(3)).clamp(min=0)
        shrunk = weight.detach().sign() * rest.pow(1 / 3)
        return torch.where(self.pruned(weight), torch.zeros_like(shrunk), shrunk)

    def pruned(self, *weights: Tensor) -> Tensor:
        magnitude = weights[0].detach().abs()
        return (magnitude <= self.threshold) & (self.threshold > 0)

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        magnitudes = [weight.abs() for (weight,) in weights]
        count = round(masks[0].ratio * now.share * sum(m.numel() for m in magnitudes))
        found = global_threshold(magnitudes, count)
        for mask in masks:
            mask.threshold.copy_(found)
