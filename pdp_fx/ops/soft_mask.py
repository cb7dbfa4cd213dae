"""The soft mask and its gradient (equations 1 and 2 of the paper, section 3.2).

With x = (w^2 - t |t|) / tau and m = sigmoid(x), the softmax of equation 1 without its overflow:

    w_hat = m w                                     (1)
    dw    = (m + 2 w^2 / tau  m (1 - m)) dw_hat     (2), t and tau held constant

The signed square t |t| makes t = -inf mean "nothing is pruned": x = +inf, m = 1 and dw = dw_hat exactly.
Everything is computed in `compute_dtype`, whatever autocast says, and the backward pass recomputes m from
w and t, so that no tensor is kept alive that is not alive anyway. An infinite weight stays infinite, has a
NaN gradient and leaves its neighbours alone.

Eagerly both equations run in few passes over memory of their own. A compiler gets them as plain formulas,
which it fuses into one pass each; so does a backward pass that is itself differentiated.
"""

from typing import Any

import torch
from torch import Tensor

from pdp_fx.ops.select import readable
from pdp_fx.ops.threshold import compute_dtype

BLOCK = 1 << 16
"""How many weights the backward pass works on at a time, so that what is between stays in the cache."""

Temperature = float | Tensor
"""tau > 0, in units of w^2: a number, or a 0-dim tensor on the device of the weight, a constant."""


def soft_mask(weight: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    """Return the softly masked weight w_hat = m w (equation 1); its gradient is equation 2.

    Args:
        weight: the weights w, any shape and memory format, half precision included.
        threshold: t, broadcast against `weight`: 0-dim for a layer, one value a group for N:M; a constant.
        tau: the temperature; as a tensor it is read without waiting for its device.

    Returns:
        w_hat with the shape, dtype and memory format of `weight`.
    """
    return _SoftMask.apply(weight, threshold, tau)  # pyright: ignore[reportReturnType]


def soft_mask_value(weight: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    """Return the mask m in [0, 1] itself, in the shape of `weight` and in `compute_dtype`; for reports."""
    weight = weight.detach()
    return _mask(weight.to(compute_dtype(weight.dtype)), threshold.detach(), tau)


class _SoftMask(torch.autograd.Function):
    # With a separate setup_context, every call would inspect a signature, which costs more than the mask.
    @staticmethod
    def forward(ctx: Any, weight: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.number = None if isinstance(tau, Tensor) else tau
        ctx.save_for_backward(weight, threshold, *([tau] if isinstance(tau, Tensor) else []))
        wide = weight.to(compute_dtype(weight.dtype))
        if torch.compiler.is_compiling():
            return (_mask_formula(wide, threshold, tau) * wide).to(weight.dtype)
        return _mask(wide, threshold, tau).mul_(wide).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, threshold, *rest = ctx.saved_tensors
        tau = ctx.number if ctx.number is not None else rest[0]
        wide = weight.to(compute_dtype(weight.dtype))
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return (_slope_formula(wide, threshold, tau) * grad).to(weight.dtype), None, None
        return _gradient(wide, threshold, tau, grad).to(weight.dtype), None, None


def _mask(wide: Tensor, threshold: Tensor, tau: Temperature, out: Tensor | None = None) -> Tensor:
    # Without a buffer of our own, a broadcast threshold would have a say in the memory format.
    buffer = torch.empty_like(wide) if out is None else out
    offset, slope = _line(threshold, tau, wide)
    if isinstance(slope, Tensor):
        torch.mul(wide, slope, out=buffer)
        return torch.addcmul(offset, buffer, wide, out=buffer).sigmoid_()
    return torch.addcmul(offset, wide, wide, value=slope, out=buffer).sigmoid_()


def _gradient(wide: Tensor, threshold: Tensor, tau: Temperature, grad: Tensor) -> Tensor:
    """Equation 2 in one new tensor: all that is between lives in a block's worth of memory."""
    result = torch.empty_like(wide)
    rows = BLOCK // max(wide.stride(0), 1) if wide.ndim > 0 else 0
    if wide.device.type != "cpu" or not 0 < rows < wide.shape[0]:
        return _gradient_into(result, wide, threshold, tau, grad)
    by_row = threshold.ndim > 0
    for start in range(0, wide.shape[0], rows):
        block = slice(start, start + rows)
        part = threshold[block] if by_row else threshold
        _gradient_into(result[block], wide[block], part, tau, grad[block])
    return result


def _gradient_into(result: Tensor, wide: Tensor, threshold: Tensor, tau: Temperature, grad: Tensor) -> Tensor:
    mask = _mask(wide, threshold, tau, result)
    # w m (1 - m) in one pass; w enters twice, one factor at a time, so that w^2 * 0 is 0 for every finite w.
    softness = torch.ops.aten.sigmoid_backward.default(wide, mask)
    if isinstance(tau, Tensor) and not readable(tau):
        return mask.addcmul_(softness.mul_(2.0 / tau), wide).mul_(grad)
    return mask.addcmul_(softness, wide, value=2.0 / float(tau)).mul_(grad)


def _line(threshold: Tensor, tau: Temperature, wide: Tensor) -> tuple[Tensor, float | Tensor]:
    """-t |t| / tau and 1 / tau; numbers that can be read for nothing are worked out as numbers."""
    if isinstance(tau, Tensor):
        if not readable(tau):
            return _offset(threshold, wide, tau), 1.0 / tau
        tau = float(tau)
    if threshold.ndim == 0 and readable(threshold):
        t = float(threshold)
        return wide.new_full((), -t * abs(t) / tau), 1.0 / tau
    return _offset(threshold, wide, tau), 1.0 / tau


def _offset(threshold: Tensor, wide: Tensor, tau: Temperature) -> Tensor:
    t = threshold.to(wide.dtype)
    return t * t.abs() * (-1.0 / tau)


def _mask_formula(wide: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    return torch.sigmoid(wide * wide * (1.0 / tau) + _offset(threshold, wide, tau))


def _slope_formula(wide: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    mask = _mask_formula(wide, threshold, tau)
    return mask + wide * (wide * (mask * (1.0 - mask))) * (2.0 / tau)
