"""Half the sum of squares of some weights, as a term of the loss."""

from typing import Any

import torch
from torch import Tensor

from pdp_fx.ops.select import transformed
from pdp_fx.ops.squares import sum_of_squares
from pdp_fx.ops.threshold import compute_dtype


def half_squares(weight: Tensor, chosen: Tensor) -> Tensor:
    """Return half the sum of squares of the chosen weights, 0-dim; its gradient is these weights.

    Until the backward pass it keeps one byte for each weight.

    Args:
        weight: the weights, any shape.
        chosen: which of them, booleans in the same shape.
    """
    if transformed():
        return 0.5 * _some(weight, chosen).to(compute_dtype(weight.dtype)).square().sum()
    return _HalfSquares.apply(weight, chosen)  # pyright: ignore[reportReturnType]


def _some(weight: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, weight, torch.zeros_like(weight))


class _HalfSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, chosen: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(weight, chosen)
        return 0.5 * sum_of_squares(_some(weight, chosen))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, chosen = ctx.saved_tensors
        return _some(weight, chosen) * grad.to(weight.dtype), None
