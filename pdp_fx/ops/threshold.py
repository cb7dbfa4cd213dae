"""The threshold t of a layer: halfway between largest pruned and smallest kept magnitude (section 3.1).

With a_(1) <= ... <= a_(n) the magnitudes of the layer and k the number pruned now, t = (a_(k) + a_(k+1)) / 2.
At k = 0 nothing is pruned and t = -inf, for which the soft mask is exactly 1. At least one weight is kept:
k is clipped to n - 1. t is a constant of the step: no gradient flows through it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pdp_fx.ops.select import as_numpy, kth_and_next_by_sort, order_statistics, storage_order, transformed


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which masks are computed: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def threshold(weight: Tensor, count: Tensor) -> Tensor:
    """Return t for pruning the `count` weights of smallest magnitude.

    Args:
        weight: the weights of one layer, any shape, dtype and memory format.
        count: 0-dim int64, how many weights are pruned now; clipped to 0..n-1; on the device of
            `weight`, where it is read without waiting.

    Returns:
        A 0-dim tensor in `compute_dtype(weight.dtype)`, -inf where `count` is 0.
    """
    if transformed():
        return threshold_by_sort(weight.detach(), count, compute_dtype(weight.dtype))
    return _threshold(weight, count)


@torch.library.custom_op("pdp_fx::threshold", mutates_args=())
def _threshold(weight: Tensor, count: Tensor) -> Tensor:
    dtype = compute_dtype(weight.dtype)
    if weight.device.type != "cpu":
        return threshold_by_sort(weight, count, dtype)
    pruned = min(int(count), weight.numel() - 1)
    if pruned <= 0:
        return weight.new_full((), -math.inf, dtype=dtype)
    largest_pruned, smallest_kept = order_statistics(as_numpy(storage_order(weight)), pruned)
    return weight.new_full((), float(0.5 * largest_pruned + 0.5 * smallest_kept), dtype=dtype)


def threshold_by_sort(weight: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Do `threshold` in tensor operations only, so that a device is never waited for."""
    if weight.numel() == 0:
        return weight.new_full((), -math.inf, dtype=dtype)
    pruned = count.clamp(0, weight.numel() - 1)
    largest_pruned, smallest_kept = kth_and_next_by_sort(storage_order(weight).to(dtype).abs(), pruned)
    return torch.where(pruned > 0, 0.5 * largest_pruned + 0.5 * smallest_kept, -math.inf)


@_threshold.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(weight: Tensor, count: Tensor) -> Tensor:
    return weight.new_empty((), dtype=compute_dtype(weight.dtype))


def _mark_constant(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _no_gradient(ctx: Any, grad: Tensor) -> tuple[None, None]:
    return None, None


_threshold.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    _no_gradient, setup_context=_mark_constant
)
