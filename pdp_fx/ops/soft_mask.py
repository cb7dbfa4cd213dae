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

from pdp_fx.ops.threshold import compute_dtype

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
    @staticmethod
    def forward(weight: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = weight.to(compute_dtype(weight.dtype))
        if torch.compiler.is_compiling():
            return (_mask_formula(wide, threshold, tau) * wide).to(weight.dtype)
        return _mask(wide, threshold, tau).mul_(wide).to(weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Temperature], output: Tensor) -> None:
        weight, threshold, tau = inputs
        ctx.number = None if isinstance(tau, Tensor) else tau
        ctx.save_for_backward(weight, threshold, *([tau] if isinstance(tau, Tensor) else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, threshold, *rest = ctx.saved_tensors
        tau = ctx.number if ctx.number is not None else rest[0]
        wide = weight.to(compute_dtype(weight.dtype))
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return (_slope_formula(wide, threshold, tau) * grad).to(weight.dtype), None, None
        return _slope(wide, threshold, tau).mul_(grad).to(weight.dtype), None, None


def _mask(wide: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    # Without a buffer of our own, a broadcast threshold would have a say in the memory format.
    buffer = torch.empty_like(wide)
    if isinstance(tau, Tensor) and tau.device.type != "cpu":
        torch.mul(wide, 1.0 / tau, out=buffer)
        return torch.addcmul(_offset(threshold, wide, tau), buffer, wide, out=buffer).sigmoid_()
    number = float(tau)
    return torch.addcmul(
        _offset(threshold, wide, number), wide, wide, value=1.0 / number, out=buffer
    ).sigmoid_()


def _slope(wide: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    """The factor of equation 2."""
    mask = _mask(wide, threshold, tau)
    # w m (1 - m) in one pass; w enters twice, one factor at a time, so that w^2 * 0 is 0 for every finite w.
    softness = torch.ops.aten.sigmoid_backward.default(wide, mask)
    if isinstance(tau, Tensor) and tau.device.type != "cpu":
        return mask.addcmul_(softness.mul_(2.0 / tau), wide)
    return mask.addcmul_(softness, wide, value=2.0 / float(tau))


def _offset(threshold: Tensor, wide: Tensor, tau: Temperature) -> Tensor:
    t = threshold.to(wide.dtype)
    return t * t.abs() * (-1.0 / tau)


def _mask_formula(wide: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    return torch.sigmoid(wide * wide * (1.0 / tau) + _offset(threshold, wide, tau))


def _slope_formula(wide: Tensor, threshold: Tensor, tau: Temperature) -> Tensor:
    mask = _mask_formula(wide, threshold, tau)
    return mask + wide * (wide * (mask * (1.0 - mask))) * (2.0 / tau)
