"""The soft mask and its gradient (equations 1 and 2 of the paper, section 3.2).

With x = (w^2 - t |t|) / tau and m = sigmoid(x), the softmax of equation 1 without its overflow:

    w_hat = m w                                     (1)
    dw    = (m + 2 w^2 / tau  m (1 - m)) dw_hat     (2), t held constant

The signed square t |t| makes t = -inf mean "nothing is pruned": x = +inf, m = 1 and dw = dw_hat exactly.
Everything is computed in `compute_dtype`, whatever autocast says, and the backward pass recomputes m from
w and t, so that no tensor is kept alive that is not alive anyway. An infinite weight stays infinite, has a
NaN gradient and leaves its neighbours alone.
"""

from typing import Any

import torch
from torch import Tensor

from pdp_fx.ops.threshold import compute_dtype


def soft_mask(weight: Tensor, threshold: Tensor, tau: float) -> Tensor:
    """Return the softly masked weight w_hat = m w (equation 1); its gradient is equation 2.

    Args:
        weight: the weights w, any shape and memory format, half precision included.
        threshold: t, broadcast against `weight`: 0-dim for a layer, one value a group for N:M; a constant.
        tau: the temperature, > 0, in units of w^2.

    Returns:
        w_hat with the shape, dtype and memory format of `weight`.
    """
    return _soft_mask(weight, threshold, tau)


def soft_mask_value(weight: Tensor, threshold: Tensor, tau: float) -> Tensor:
    """Return the mask m in [0, 1] itself, in the shape of `weight` and in `compute_dtype`; for reports."""
    weight = weight.detach()
    return _mask(weight.to(compute_dtype(weight.dtype)), threshold.detach(), tau)


def _mask(wide: Tensor, threshold: Tensor, tau: float) -> Tensor:
    t = threshold.to(wide.dtype)
    offset = t * t.abs() * (-1.0 / tau)
    # Without a buffer of our own, a broadcast threshold would have a say in the memory format.
    buffer = torch.empty_like(wide)
    return torch.addcmul(offset, wide, wide, value=1.0 / tau, out=buffer).sigmoid_()


@torch.library.custom_op("pdp_fx::soft_mask", mutates_args=())
def _soft_mask(weight: Tensor, threshold: Tensor, tau: float) -> Tensor:
    wide = weight.to(compute_dtype(weight.dtype))
    return _mask(wide, threshold, tau).mul_(wide).to(weight.dtype)


@torch.library.custom_op("pdp_fx::soft_mask_backward", mutates_args=())
def _soft_mask_backward(grad: Tensor, weight: Tensor, threshold: Tensor, tau: float) -> Tensor:
    wide = weight.to(compute_dtype(weight.dtype))
    mask = _mask(wide, threshold, tau)
    # w m (1 - m) in one pass; w enters twice, one factor at a time, so that w^2 * 0 is 0 for every finite w.
    softness = torch.ops.aten.sigmoid_backward.default(wide, mask)
    factor = mask.addcmul_(softness, wide, value=2.0 / tau)
    return factor.mul_(grad).to(weight.dtype)


@_soft_mask.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(weight: Tensor, threshold: Tensor, tau: float) -> Tensor:
    return torch.empty_like(weight)


@_soft_mask_backward.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(grad: Tensor, weight: Tensor, threshold: Tensor, tau: float) -> Tensor:
    return torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    weight, threshold, ctx.tau = inputs
    ctx.save_for_backward(weight, threshold)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    weight, threshold = ctx.saved_tensors
    return _soft_mask_backward(grad, weight, threshold, ctx.tau), None, None


_soft_mask.register_autograd(_backward, setup_context=_save)  # pyright: ignore[reportUnknownMemberType]
