"""The soft mask and its gradient (equations 1 and 2 of the paper, section 3.2).

With x = (w^2 - t |t|) / tau and m = sigmoid(x), the softmax of equation 1 without its overflow:

    w_hat = m w                                     (1)
    dw    = (m + 2 w^2 / tau  m (1 - m)) dw_hat     (2), t and tau held constant

The signed square t |t| makes t = -inf mean "nothing is pruned": x = +inf, m = 1 and dw = dw_hat exactly.
Everything is computed in `compute_dtype`, whatever autocast says, and the backward pass recomputes m from
w and t, so that no tensor is kept alive that is not alive anyway. An infinite weight stays infinite, has a
NaN gradient and leaves its neighbours alone. Below x = `FAINT` m is 0: left alone, it makes subnormal numbers
of weights, and those make a convolution forty times slower on processors that leave them to microcode.

On the CPU both equations run in few passes, the backward one over blocks that stay in the cache; on a GPU
each is one pass (`pdp_fx.ops.gpu`). Everywhere else, and for a compiler, which fuses them, they are plain
formulas; so is a backward pass that is itself differentiated. Under a transform of `torch.func` there is
equation 1 alone, and autograd finds equation 2.
"""

import math
from typing import Any, cast, overload

import torch
from torch import Tensor

from pdp_fx.ops import gpu
from pdp_fx.ops.select import is_batched, readable, transformed
from pdp_fx.ops.threshold import compute_dtype

BLOCK = 1 << 16
"""How many weights the backward pass works on at a time, so that what is between stays in the cache."""


def _faint() -> float:
    """Return `FAINT` to functions that `torch.compile` traces.

    With ``dynamic=True`` it takes a global float for a variable, and in an autograd function it fails on one.
    """
    return -37.0


FAINT = _faint()
"""Where x is less, m would be less than the last bit of a 1 in float64."""

Temperature = float | Tensor
"""tau > 0, in units of w^2: a number, or a 0-dim tensor on the device of the weight, a constant."""

Threshold = float | Tensor
"""t: a number, or a tensor that broadcasts against the weight, a constant."""


def soft_mask(weight: Tensor, threshold: Threshold, tau: Temperature) -> Tensor:
    """Return the softly masked weight w_hat = m w (equation 1); its gradient is equation 2.

    Args:
        weight: the weights w, any shape and memory format, half precision included.
        threshold: t, for the layer or, as a tensor, for parts of it.
        tau: the temperature; as a tensor it is read without waiting for its device.

    Returns:
        w_hat with the shape, dtype and memory format of `weight`.
    """
    if transformed():
        wide = weight.to(compute_dtype(weight.dtype))
        return (sigmoid(wide.square() * (1.0 / tau) + _offset(wide, threshold, tau)) * wide).to(weight.dtype)
    t, temperature = _number(threshold), _number(tau)
    if isinstance(t, float) and isinstance(temperature, float) and readable(weight):
        return _SoftMaskOfNumbers.apply(weight, t, temperature)  # pyright: ignore[reportReturnType]
    return _SoftMask.apply(weight, threshold, tau)  # pyright: ignore[reportReturnType]


def soft_mask_value(weight: Tensor, threshold: Threshold, tau: Temperature) -> Tensor:
    """Return the mask m in [0, 1] itself, in the shape of `weight` and in `compute_dtype`; for reports."""
    weight = weight.detach()
    return _mask(weight.to(compute_dtype(weight.dtype)), threshold, tau)


def sigmoid(x: Tensor) -> Tensor:
    """The mask that belongs to x, which is 0 where x is at most `FAINT`."""
    return torch.where(x <= _faint(), -math.inf, x).sigmoid()


def sigmoid_(x: Tensor) -> Tensor:
    """Do `sigmoid` in place, where nothing is differentiated."""
    return torch.threshold_(x, _faint(), -math.inf).sigmoid_()


# With a separate setup_context, every call would inspect a signature, which costs more than the mask.
class _SoftMask(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, weight: Tensor, threshold: Threshold, tau: Temperature
    ) -> Tensor:
        ctx.numbers = [None if isinstance(value, Tensor) else value for value in (threshold, tau)]
        ctx.save_for_backward(weight, *(value for value in (threshold, tau) if isinstance(value, Tensor)))
        if _in_one_pass(weight, threshold):
            return gpu.masked(weight, cast(Tensor, threshold), tau)
        wide = weight.to(compute_dtype(weight.dtype))
        masked = _mask(wide, threshold, tau) * wide
        # Where torch.compile of torch 2.11 sees a cast to the same dtype here, the gradient becomes 0.
        return masked if masked.dtype == weight.dtype else masked.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Written for torch.compile of torch 2.11, which takes the saved tensors for a tuple.
        saved, (threshold, tau) = ctx.saved_tensors, ctx.numbers
        weight = saved[0]
        threshold = saved[1] if threshold is None else threshold
        tau = saved[-1] if tau is None else tau
        if not torch.is_grad_enabled() and _in_one_pass(weight, threshold):
            return gpu.gradient(weight, threshold, tau, grad), None, None
        return _gradient(weight, threshold, tau, grad), None, None


class _SoftMaskOfNumbers(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, weight: Tensor, threshold: float, tau: float
    ) -> Tensor:
        ctx.numbers = threshold, tau
        ctx.save_for_backward(weight)
        wide = weight.to(compute_dtype(weight.dtype))
        offset = wide.new_full((), _offset(wide, threshold, tau))
        mask = sigmoid_(torch.addcmul(offset, wide, wide, value=1.0 / tau))
        return mask.mul_(wide).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,), (threshold, tau) = ctx.saved_tensors, ctx.numbers
        if torch.is_grad_enabled() or is_batched(grad):
            return _gradient(weight, threshold, tau, grad), None, None
        wide = weight.to(compute_dtype(weight.dtype))
        result = torch.empty_like(wide)
        rows = BLOCK // max(wide.stride(0), 1) if wide.ndim > 0 else 0
        if 0 < rows < wide.shape[0]:
            for into, block, part in zip(result.split(rows), wide.split(rows), grad.split(rows), strict=True):
                _gradient_into(into, block, part, threshold, tau)
        else:
            _gradient_into(result, wide, grad, threshold, tau)
        return result.to(weight.dtype), None, None


def _gradient_into(result: Tensor, wide: Tensor, grad: Tensor, threshold: float, tau: float) -> None:
    """Equation 2 with one buffer beside the result."""
    offset = wide.new_full((), _offset(wide, threshold, tau))
    mask = sigmoid_(torch.addcmul(offset, wide, wide, value=1.0 / tau, out=result))
    # w m (1 - m) in one pass; w enters twice, one factor at a time, so that w^2 * 0 is 0 for every finite w.
    softness = torch.ops.aten.sigmoid_backward.default(wide, mask)
    mask.addcmul_(softness, wide, value=2.0 / tau).mul_(grad)


def _gradient(weight: Tensor, threshold: Threshold, tau: Temperature, grad: Tensor) -> Tensor:
    """Equation 2 in operations that a compiler fuses and autograd differentiates."""
    wide = weight.to(compute_dtype(weight.dtype))
    mask = _mask(wide, threshold, tau)
    softness = torch.ops.aten.sigmoid_backward.default(wide, mask)
    return ((mask + softness * (2.0 / tau) * wide) * grad).to(weight.dtype)


def _in_one_pass(weight: Tensor, threshold: Threshold) -> bool:
    return isinstance(threshold, Tensor) and threshold.ndim == 0 and gpu.usable(weight)


def _mask(wide: Tensor, threshold: Threshold, tau: Temperature) -> Tensor:
    # The first operand is the weight: a broadcast threshold must have no say in the memory format.
    return sigmoid_(wide.square().mul_(1.0 / tau).add_(_offset(wide, threshold, tau)))


@overload
def _offset(wide: Tensor, threshold: float, tau: float) -> float: ...


@overload
def _offset(wide: Tensor, threshold: Threshold, tau: Temperature) -> Temperature: ...


def _offset(wide: Tensor, threshold: Threshold, tau: Temperature) -> Temperature:
    """-t |t| / tau, which stays in the range of the dtype, so that no weight meets inf - inf."""
    least = torch.finfo(wide.dtype).min
    if isinstance(threshold, Tensor):
        t = threshold.detach().to(wide.dtype)
        return (t * t.abs() * (-1.0 / tau)).clamp(min=least)
    offset = -threshold * abs(threshold) / tau
    return offset.clamp(min=least) if isinstance(offset, Tensor) else max(offset, least)


def _number(value: Tensor | float) -> Tensor | float:
    """The number in a 0-dim tensor that can be read for nothing; anything else as it is."""
    if isinstance(value, Tensor) and value.ndim == 0 and readable(value):
        return float(value.detach())
    return value
