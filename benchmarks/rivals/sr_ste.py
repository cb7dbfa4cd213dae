"""SR-STE: learning N:M fine-grained structured sparse networks from scratch (Zhou et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdp_fx import MaskSite, NMPolicy


class SRSTE(NMPolicy):
    """The N largest of every M weights stay, from the first step; pruned ones are drawn towards 0.

    The gradient of a weight is that of its masked value plus ``decay`` times the weight where it is pruned.

    Args:
        site: where it stands.
        decay: lambda of the paper.
    """

    def __init__(self, site: MaskSite, decay: float = 2e-4) -> None:
        super().__init__(site)
        self.decay = decay
        self.advance(1.0)

    def advance(self, share: float) -> None:
        super().advance(1.0)

    def soft(self, weight: Tensor) -> Tensor:
        result: Any = _Refined.apply(weight, self.pruned(weight), self.decay)
        return result


class _Refined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pruned: Tensor, decay: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(weight, pruned)
        ctx.decay = decay
        return torch.where(pruned, torch.zeros_like(weight), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, pruned = ctx.saved_tensors
        return grad + ctx.decay * pruned * weight, None, None
