"""Straight-through gradients (Bengio et al., 2013, arXiv:1308.3432)."""

from typing import Any

import torch
from torch import Tensor

from pdp_fx.ops.select import transformed


def straight_through(weight: Tensor, value: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return ``value``; its gradient is passed to ``weight``, multiplied by ``factor`` if that is given.

    Args:
        weight: the weights, any shape.
        value: the value to compute with in their place, same shape; it is detached.
        factor: a factor of the gradient, same shape, or None.
    """
    if transformed():
        through = weight if factor is None else weight * factor
        return value.detach() + (through - through.detach())
    return _StraightThrough.apply(weight, value.detach(), factor)  # pyright: ignore[reportReturnType]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor, factor: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*(() if factor is None else (factor,)))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # activation checkpointing lets them be read once
        return (grad * saved[0] if saved else grad), None, None
