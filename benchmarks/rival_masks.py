"""What the rivals of the paper compute for every weight in every training step, as drop-in masks.

Each module stands where `pdp_fx.prepare` puts a mask: weight in, weight as the layer sees it out. They are
written from the methods' equations, and hold what each method needs for a step, not its schedule.
"""

from typing import Any

import torch
from torch import Tensor, nn


class FixedMask(nn.Module):
    """A constant 0/1 mask: the floor of what any masking costs."""

    keep: Tensor

    def __init__(self, weight: Tensor, ratio: float) -> None:
        super().__init__()
        self.register_buffer("keep", magnitude_mask(weight, ratio))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        return weight * self.keep


class OptG(nn.Module):
    """OptG: a score per weight, whose gradient goes straight through a mask that is frozen for an epoch."""

    keep: Tensor

    def __init__(self, weight: Tensor, ratio: float) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.zeros_like(weight))
        self.register_buffer("keep", magnitude_mask(weight, ratio))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        return _StraightThrough.apply(weight, self.score, self.keep)  # pyright: ignore[reportReturnType]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor, keep: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(weight, keep)
        return weight * keep

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, keep = ctx.saved_tensors
        return grad * keep, grad * weight, None


class ContinuousSparsification(nn.Module):
    """CS: m = sigmoid(beta s) / sigmoid(s0) for a score s per weight, and the sum of m in the loss."""

    START = -1.0
    BETA = 1.0
    WEIGHT = 1e-8

    penalty: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.full_like(weight, self.START))
        self.scale = 1.0 / torch.sigmoid(torch.tensor(self.START)).item()

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight, and leave this layer's part of the loss in `penalty`."""
        mask = torch.sigmoid(self.BETA * self.score) * self.scale
        self.penalty = self.WEIGHT * mask.sum()
        return weight * mask


class SoftThresholdReparameterization(nn.Module):
    """STR: sign(w) relu(|w| - sigmoid(s)) with one score s per layer."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.logit(torch.tensor(threshold)))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the shrunk weight."""
        return torch.sign(weight) * torch.relu(torch.abs(weight) - torch.sigmoid(self.score))


class SRSTE(nn.Module):
    """SR-STE: the n largest of every m weights, sorted in every step; pruned weights decay towards 0."""

    DECAY = 2e-4

    def __init__(self, keep: int, of: int) -> None:
        super().__init__()
        self.keep = keep
        self.of = of

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        return _SparseRefined.apply(weight, self.keep, self.of, self.DECAY)  # pyright: ignore[reportReturnType]


class _SparseRefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, keep: int, of: int, decay: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = weight.movedim(1, -1).reshape(-1, of)
        smallest = groups.abs().argsort(dim=1)[:, : of - keep]
        mask = torch.ones_like(groups).scatter_(1, smallest, 0.0)
        moved = weight.movedim(1, -1).shape
        mask = mask.view(moved).movedim(-1, 1)
        ctx.save_for_backward(weight, mask)
        ctx.decay = decay
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, mask = ctx.saved_tensors
        return grad + ctx.decay * (1.0 - mask) * weight, None, None, None


def magnitude_mask(weight: Tensor, ratio: float) -> Tensor:
    """1 for the weights of large magnitude, 0 for a share of `ratio`."""
    pruned = min(max(round(ratio * weight.numel()), 1), weight.numel() - 1)
    least = weight.detach().abs().flatten().kthvalue(pruned).values
    return (weight.detach().abs() > least).to(weight.dtype)
