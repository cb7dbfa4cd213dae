"""Hard masks whose gradient goes straight through, to pruned weights, too (Bengio et al., 2013)."""

from typing import Any

import torch
from torch import Tensor


def straight_mask(weight: Tensor, pruned: Tensor) -> Tensor:
    """Return 0 where ``pruned`` and the weight elsewhere; the gradient is passed on as it is, everywhere.

    Args:
        weight: the weights, any shape.
        pruned: booleans in the shape of ``weight``.
    """
    return _StraightMask.apply(weight, pruned)  # pyright: ignore[reportReturnType]


class _StraightMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pruned: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return weight.masked_fill(pruned, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
