"""Norms whose statistics run over the kept channels only.

LayerNorm, RMSNorm and GroupNorm average over the channels themselves. If a dropped channel took part in
the statistics, even as zeros, removing it would change every other channel. Here each channel is weighted by
its mask m:

    mean = sum(m x) / sum(m),   var = sum(m (x - mean)^2) / sum(m),   y = m (weight x' + bias)

With a hard mask this is exactly the norm of the channels that stay; if all masks are 1 the plain function is
called, so that no bit changes. Signatures are those of `torch.nn.functional` with a ``mask``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pdp_fx.ops.select import in_vmap, readable
from pdp_fx.ops.straight import straight_through
from pdp_fx.ops.threshold import compute_dtype

Axes: TypeAlias = int | list[int] | None
"""The axes that a statistic runs over; None or an empty list are all."""

GOES = 0.25
"""A channel with a smaller mask than this is going to be pruned; kept channels have masks of at least 0.5."""


def masked_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor,
) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last axis, of masked channels.

    Args:
        input: shape (..., channels).
        normalized_shape: the number of channels, as a sequence of one.
        weight: shape (channels,), or None.
        bias: shape (channels,), or None.
        eps: added to the variance.
        mask: shape (channels,), values in [0, 1].
    """
    mask = _for(mask, input)

    def plain(given: Tensor = input) -> Tensor:
        return functional.layer_norm(given, list(normalized_shape), weight, bias, eps)

    def masked() -> Tensor:
        wide = input.to(compute_dtype(input.dtype))
        share = mask.to(wide.dtype)
        share = share / share.sum()
        centred = wide - (wide * share).sum(-1, keepdim=True)
        scaled = centred * torch.rsqrt((centred.square() * share).sum(-1, keepdim=True) + eps)
        return _as_given(_affine(scaled, weight, bias, mask), plain, input, input.ndim - 1)

    return _choose(mask, input.shape[-1], plain, masked)


def masked_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    mask: Tensor,
) -> Tensor:
    """`torch.nn.functional.rms_norm` over the last axis, of masked channels; shapes as above.

    An ``eps`` of None is the smallest step from 1 in the dtype that is computed in, at least float32.
    """
    mask = _for(mask, input)

    def plain(given: Tensor = input) -> Tensor:
        return functional.rms_norm(given, list(normalized_shape), weight, eps)

    def masked() -> Tensor:
        wide = input.to(compute_dtype(input.dtype))
        share = mask.to(wide.dtype)
        share = share / share.sum()
        floor = torch.finfo(wide.dtype).eps if eps is None else eps
        scaled = wide * torch.rsqrt((wide.square() * share).sum(-1, keepdim=True) + floor)
        return _as_given(_affine(scaled, weight, None, mask), plain, input, input.ndim - 1)

    return _choose(mask, input.shape[-1], plain, masked)


def masked_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor,
) -> Tensor:
    """`torch.nn.functional.group_norm` of masked channels.

    Args:
        input: shape (batch, channels, *).
        num_groups: number of groups; every group keeps the same number of channels, or goes as a whole.
        weight: shape (channels,), or None.
        bias: shape (channels,), or None.
        eps: added to the variance.
        mask: shape (channels,), values in [0, 1].
    """
    mask = _for(mask, input)

    def plain(given: Tensor = input) -> Tensor:
        return functional.group_norm(given, num_groups, weight, bias, eps)

    def masked() -> Tensor:
        grouped = input.to(compute_dtype(input.dtype)).reshape(
            input.shape[0], num_groups, mask.numel() // num_groups, math.prod(input.shape[2:])
        )
        heavy = mask.to(grouped.dtype).reshape(1, num_groups, -1, 1)
        # A group that is pruned as a whole has equal masks, which may be 0 and would give 0 / 0. Its
        # statistics do not depend on their value, so ones are used.
        heavy = torch.where(heavy.amax(2, keepdim=True) < GOES, 1.0, heavy)
        share = heavy / (heavy.sum(2, keepdim=True) * grouped.shape[-1])
        centred = grouped - (grouped * share).sum((2, 3), keepdim=True)
        scaled = centred * torch.rsqrt((centred.square() * share).sum((2, 3), keepdim=True) + eps)
        back = scaled.reshape(input.shape).movedim(1, -1)
        return _as_given(_affine(back, weight, bias, mask).movedim(-1, 1), plain, input, 1)

    return _choose(mask, input.shape[1], plain, masked)


def masked_mean(
    input: Tensor,
    dim: int | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """`torch.mean` over ``dim``, in which ``axis`` is an axis of masked channels.

    Args:
        input: any shape.
        dim: the axes to average over, by default all; ``axis`` is one of them.
        keepdim: whether the axes stay, with size 1.
        dtype: what to compute in.
        mask: shape ``(input.shape[axis],)``, values in [0, 1].
        axis: the axis of the channels, from the first or, if negative, from the last.
    """
    axes = dim not in (None, [])
    mask = _for(mask, input)

    def plain() -> Tensor:
        return torch.mean(input, dim, keepdim, dtype=dtype) if axes else torch.mean(input, dtype=dtype)

    def masked() -> Tensor:
        # The mask's gradient needs the input, which the model may write to, as a plain mean does not keep it.
        kept = mask.requires_grad and torch.is_grad_enabled()
        wide = input.to(compute_dtype(input.dtype) if dtype is None else dtype, copy=kept)
        shape = [1] * wide.ndim
        shape[axis] = -1
        share = mask.to(wide.dtype)
        product = wide * (share / share.mean()).reshape(shape)
        mean = torch.mean(product, dim, keepdim) if axes else torch.mean(product)
        return mean.to(input.dtype if dtype is None else dtype)

    return _choose(mask, input.shape[axis], plain, masked)


def masked_var(
    input: Tensor,
    dim: int | list[int] | bool | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """`torch.var` over ``dim``, in which ``axis`` is an axis of masked channels, each counted as its mask.

    Args:
        input: any shape, real numbers.
        dim: as in `masked_mean`; or, as in `torch.var`, ``unbiased`` for the variance over all axes.
        unbiased: whether one is taken off the number of elements.
        keepdim: whether the axes stay, with size 1.
        correction: what is taken off the number of elements, in the place of ``unbiased``.
        mask: shape ``(input.shape[axis],)``, values in [0, 1].
        axis: the axis of the channels, from the first or, if negative, from the last.
    """
    off, dim = correction_of(dim, unbiased, correction), None if isinstance(dim, bool) else dim
    mask = _for(mask, input)

    def plain() -> Tensor:
        return torch.var(input, dim, correction=off, keepdim=keepdim)

    def masked() -> Tensor:
        return _variance(input, dim, off, keepdim, mask, axis).to(input.dtype)

    return _choose(mask, input.shape[axis], plain, masked)


def masked_std(
    input: Tensor,
    dim: int | list[int] | bool | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """`torch.std`, the root of `masked_var`; where that is 0 the gradient is 0, as it is in torch."""
    off, dim = correction_of(dim, unbiased, correction), None if isinstance(dim, bool) else dim
    mask = _for(mask, input)

    def plain() -> Tensor:
        return torch.std(input, dim, correction=off, keepdim=keepdim)

    def masked() -> Tensor:
        var = _variance(input, dim, off, keepdim, mask, axis)
        return torch.where(var == 0, 0.0, torch.where(var == 0, 1.0, var).sqrt()).to(input.dtype)

    return _choose(mask, input.shape[axis], plain, masked)


def masked_mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: None = None,
    *,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """The mean of `torch.nn.functional.mse_loss` between hidden values, with ``axis`` of masked channels.

    Args:
        input: any shape.
        target: a shape that broadcasts with it.
        size_average: as in torch; together with ``reduce`` and ``reduction`` it asks for the mean.
        reduce: see ``size_average``.
        reduction: see ``size_average``.
        weight: not given; with weights the loss is a sum over a sum.
        mask: shape ``(length of axis,)``, values in [0, 1].
        axis: the axis of the channels in the broadcast shape.
    """
    return _mean_loss(functional.mse_loss, input, target, mask, axis)


def masked_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: None = None,
    *,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """The mean of `torch.nn.functional.l1_loss`; arguments as in `masked_mse_loss`."""
    return _mean_loss(functional.l1_loss, input, target, mask, axis)


def masked_smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
    *,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """The mean of `torch.nn.functional.smooth_l1_loss`; arguments as in `masked_mse_loss`."""
    return _mean_loss(partial(functional.smooth_l1_loss, beta=beta), input, target, mask, axis)


def masked_huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
    *,
    mask: Tensor,
    axis: int,
) -> Tensor:
    """The mean of `torch.nn.functional.huber_loss`; arguments as in `masked_mse_loss`."""
    loss: Any = functional.huber_loss
    return _mean_loss(partial(loss, delta=delta, weight=weight), input, target, mask, axis)


def _mean_loss(loss: Callable[..., Tensor], input: Tensor, target: Tensor, mask: Tensor, axis: int) -> Tensor:
    """The mean of a loss that is computed element by element."""
    mask = _for(mask, input, target)

    def plain() -> Tensor:
        return loss(input, target)

    def masked() -> Tensor:
        return masked_mean(loss(input, target, reduction="none"), mask=mask, axis=axis)

    return _choose(mask, torch.broadcast_shapes(input.shape, target.shape)[axis], plain, masked)


OFF = ("dim", "unbiased", "correction")
"""The arguments of a variance that `correction_of` takes."""


def correction_of(dim: Axes | bool = None, unbiased: bool = True, correction: float | None = None) -> float:
    """What a variance takes off the number of elements, whichever way it is told."""
    return float(dim if isinstance(dim, bool) else unbiased) if correction is None else correction


def _variance(input: Tensor, dim: Axes, off: float, keepdim: bool, mask: Tensor, axis: int) -> Tensor:
    """The variance in the dtype that is computed in."""
    wide = input.to(compute_dtype(input.dtype))
    over = [dim] if isinstance(dim, int) else list(dim or range(wide.ndim))
    heavy = mask.to(wide.dtype).reshape([-1 if each == axis % wide.ndim else 1 for each in range(wide.ndim)])
    count = heavy.sum() * math.prod(wide.shape[each] for each in over if (each - axis) % wide.ndim)
    centred = wide - (wide * heavy).sum(over, keepdim=True) / count
    return (centred.square() * heavy).sum(over, keepdim) / (count - off).clamp(min=0)


def _for(mask: Tensor, *inputs: Tensor) -> Tensor:
    """The mask for these inputs: through it, too, no gradient passes where they are detached."""
    return mask if any(each.requires_grad for each in inputs) else mask.detach()


def _choose(mask: Tensor, length: int, plain: Callable[[], Tensor], masked: Callable[[], Tensor]) -> Tensor:
    """The result of ``plain`` if all masks are 1, so that a mask that prunes nothing changes no bit.

    The masks get the gradient of ``masked`` all the same: one of several norms over the channels of a group
    may have lost none, and the forward pass may compute with hard masks.

    Args:
        mask: the mask.
        length: how long the axis of the channels is; also ``plain`` takes no other than that of the mask.
        plain: the function itself.
        masked: the function of masked channels.
    """
    torch._assert(
        length == mask.numel(),
        f"statistics run over an axis of {mask.numel()} entries, channels among them, and here it has "
        f"{length}; for other sizes, train with example_inputs like them, or average over the axes apart",
    )
    known, trains = readable(mask.detach()), mask.requires_grad and torch.is_grad_enabled()
    whole = (mask == 1).all()
    if known and not whole:
        return masked()
    if known and not trains:
        return plain()
    result = masked()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not trains):
        value = plain() if known else torch.where(whole, plain(), result)
    return straight_through(result, value) if trains else value


def _affine(scaled: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor) -> Tensor:
    heavy = mask.to(scaled.dtype)
    result = scaled * (heavy if weight is None else weight.to(scaled.dtype) * heavy)
    return result if bias is None else result + bias.to(scaled.dtype) * heavy


def _as_given(result: Tensor, plain: Callable[[Tensor], Tensor], input: Tensor, axis: int) -> Tensor:
    """The result in the dtype and the order in memory that the plain norm gives.

    The dtype also depends on that of its weights and on autocast. In memory the result is contiguous whatever
    the input is, but for GroupNorm of images with the channels last; views of it may need that.

    Args:
        result: that of the masked norm.
        plain: the norm; an empty tensor like the input is passed to it.
        input: its input.
        axis: the first axis whose size matters to the norm.
    """
    result = result.to(plain(input.new_empty((0, *input.shape[axis:]))).dtype)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.ndim if axis == 1 else 0)
    if last is None or input.is_contiguous() or in_vmap():
        return result.contiguous()
    # Half of the channels, say, lies in that order with gaps.
    without_gaps = torch.empty_like(input, device="meta")
    keeps = without_gaps.is_contiguous(memory_format=last)
    return result.contiguous(memory_format=last if keeps else torch.contiguous_format)


PLAIN: dict[Any, Callable[..., Tensor]] = {
    masked_layer_norm: functional.layer_norm,
    masked_rms_norm: functional.rms_norm,
    masked_group_norm: functional.group_norm,
    masked_mean: torch.mean,
    masked_var: torch.var,
    masked_std: torch.std,
    masked_mse_loss: functional.mse_loss,
    masked_l1_loss: functional.l1_loss,
    masked_smooth_l1_loss: functional.smooth_l1_loss,
    masked_huber_loss: functional.huber_loss,
}
"""The function that each masked one becomes when its channels are gone."""

MASKED: dict[Any, Callable[..., Tensor]] = {plain: masked for masked, plain in PLAIN.items()} | {
    torch.rms_norm: masked_rms_norm,
    torch.layer_norm: masked_layer_norm,
    torch.group_norm: masked_group_norm,
    "mean": masked_mean,
    "var": masked_var,
    "std": masked_std,
}
"""The masked form of a function or method."""

STATISTICS: frozenset[Any] = frozenset({
    torch.mean, "mean", torch.var, "var", torch.std, "std",
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
})  # fmt: skip
"""Those of them that may run over any axis, and so are told the one of the channels."""
