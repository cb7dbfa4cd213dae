"""The soft mask of N:M groups: equations 1 and 2 of the paper with a threshold for every group (section 3.4).

Eagerly a block of rows at a time is laid out as M planes, plane i holding the i-th weight of every group, so
that sorting and masking run over contiguous memory that stays in the cache. The backward pass finds the
thresholds again: they are cheaper to compute than to keep.
"""

from typing import Any

import torch
from torch import Tensor

from pdp_fx.ops.nm import group_view, squared_thresholds
from pdp_fx.ops.select import is_batched, readable, transformed
from pdp_fx.ops.soft_mask import Temperature, sigmoid, sigmoid_
from pdp_fx.ops.threshold import compute_dtype

BLOCK = 1 << 17
"""How many weights are worked on at a time."""


def nm_soft_mask(weight: Tensor, m: int, kappa: Tensor, tau: Temperature) -> Tensor:
    """Return the softly masked weight; its gradient is equation 2 with the thresholds held constant.

    Args:
        weight: (O, I, *kernel) with I a multiple of M, any memory format, half precision included.
        m: M, the size of a group.
        kappa: 0-dim int64, how many weights of each group are pruned now, in millionths.
        tau: the temperature, in units of w^2.

    Returns:
        w_hat with the shape, dtype and memory format of `weight`.
    """
    if transformed():
        planes = _planes(weight, m).to(compute_dtype(weight.dtype))
        return _laid_out(_mask_formula(planes, kappa, tau) * planes).to(weight.dtype)
    return _NMSoftMask.apply(weight, m, kappa, tau)  # pyright: ignore[reportReturnType]


class _NMSoftMask(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, weight: Tensor, m: int, kappa: Tensor, tau: Temperature
    ) -> Tensor:
        ctx.m, ctx.number = m, None if isinstance(tau, Tensor) else tau
        ctx.save_for_backward(weight, kappa, *([tau] if isinstance(tau, Tensor) else []))
        if torch.compiler.is_compiling():
            planes = _planes(weight, m).to(compute_dtype(weight.dtype))
            # Where torch.compile of torch 2.11 sees something written in place here, the gradient becomes 0.
            return _weight_of(_mask_formula(planes, kappa, tau) * planes, weight).clone()
        result = torch.empty_like(weight)
        for rows in _blocks(weight):
            planes = _copied_planes(weight[rows], m)
            _planes(result[rows], m).copy_(_mask(planes, kappa, tau).mul_(planes))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, kappa, *rest = ctx.saved_tensors
        tau: Temperature = ctx.number if ctx.number is not None else rest[0]
        batched = is_batched(grad)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or batched:
            planes = _planes(weight, ctx.m).to(compute_dtype(weight.dtype))
            mask = _mask_formula(planes, kappa, tau)
            slope = mask + planes * (planes * (mask * (1.0 - mask))) * (2.0 / tau)
            product = slope * _planes(grad, ctx.m)
            given = _laid_out(product).to(weight.dtype) if batched else _weight_of(product, weight)
            return given, None, None, None
        result = torch.empty_like(weight)
        for rows in _blocks(weight):
            planes = _copied_planes(weight[rows], ctx.m)
            mask = _mask(planes, kappa, tau)
            softness = torch.ops.aten.sigmoid_backward.default(planes, mask)
            mask.addcmul_(softness.mul_(2.0 / tau), planes).mul_(_copied_planes(grad[rows], ctx.m))
            _planes(result[rows], ctx.m).copy_(mask)
        return result, None, None, None


def _planes(weight: Tensor, m: int) -> Tensor:
    """View a weight (O, I, *kernel) as (M, O, I/M, *kernel)."""
    return group_view(weight, m).movedim(2, 0)


def _copied_planes(weight: Tensor, m: int) -> Tensor:
    planes = _planes(weight, m)
    copy = torch.empty(planes.shape, dtype=compute_dtype(weight.dtype), device=weight.device)
    return copy.copy_(planes)


def _weight_of(planes: Tensor, weight: Tensor) -> Tensor:
    """The inverse of `_planes`, in the dtype and layout of ``weight``."""
    return torch.empty_like(weight).copy_(_laid_out(planes))


def _laid_out(planes: Tensor) -> Tensor:
    rows = planes.movedim(0, 2)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def _blocks(weight: Tensor) -> list[slice]:
    """Rows to work on together: all of them, except on the CPU."""
    if weight.device.type != "cpu":
        return [slice(None)]
    rows = max(BLOCK * weight.shape[0] // max(weight.numel(), 1), 1)
    return [slice(start, start + rows) for start in range(0, weight.shape[0], rows)]


def _mask(planes: Tensor, kappa: Tensor, tau: Temperature) -> Tensor:
    squared = squared_thresholds(planes, kappa)
    if isinstance(tau, Tensor) and not readable(tau):
        return sigmoid_(torch.addcmul(squared * (-1.0 / tau), planes * (1.0 / tau), planes))
    number = float(tau)
    return sigmoid_(torch.addcmul(squared.mul_(-1.0 / number), planes, planes, value=1.0 / number))


def _mask_formula(planes: Tensor, kappa: Tensor, tau: Temperature) -> Tensor:
    squared = squared_thresholds(planes.detach(), kappa)
    return sigmoid((planes * planes - squared) * (1.0 / tau))
