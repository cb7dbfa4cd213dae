"""Exact selection of the smallest entries of a tensor, in linear time on the CPU.

The CPU path is a Floyd-Rivest selection: a sorted sample brackets the wanted value, one scan counts what lies
below the bracket, and only the few values inside it are partitioned. A bracket that misses costs time, never
exactness. The scan works on one block after the other in the same small buffers: for a large layer, pages
fresh from the operating system cost more than the arithmetic on them. Everywhere else a sort answers, which
reads the count on the device and so never waits for it.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor

Values = NDArray[Any]

SAMPLED_FROM = 1 << 13
"""Below this many values a plain partition is as fast as the sampled one."""

BLOCK = 1 << 16
"""How many values are scanned at a time: few enough to stay in the cache, many enough to hide the calls."""


def smallest(magnitude: Tensor, count: Tensor | int) -> Tensor:
    """Mark exactly `count` entries: the smallest ones, ties broken by index, the lowest first.

    The count is exact for every dtype: ties at the last value are counted out, not compared. Indices are
    row-major whatever the memory format. NaN ranks last and is never marked.

    Args:
        magnitude: scores to rank, of any shape.
        count: how many to mark, 0 to `magnitude.numel()`; a 0-dim int64 tensor may live on the device.

    Returns:
        A bool tensor of the shape of `magnitude`, True at the marked entries.
    """
    wanted = torch.full((), count, device=magnitude.device) if isinstance(count, int) else count
    return (smallest_by_cumsum if transformed() else _smallest)(magnitude.detach(), wanted)


def order_statistics(values: Values, count: int, key: np.ufunc = np.absolute) -> tuple[Any, Any]:
    """Return the count-th and the (count+1)-th smallest key, counted from 1.

    Ranks outside 1..n are clipped to that range.

    Args:
        values: n numbers in one dimension; left as they are.
        count: the first of the two ranks.
        key: what the numbers are ranked by, one number each; by default their magnitude.
    """
    low, high = (min(max(rank, 0), values.size - 1) for rank in (count - 1, count))
    if values.size >= SAMPLED_FROM:
        found = statistics_within(values, (low, high), _bracket(values, low, key), key)
        if found is not None:
            return found[:2]
    return _partitioned(key(values), low, high)


def statistics_within(
    values: Values, ranks: tuple[int, int], bracket: tuple[Any, Any], key: np.ufunc = np.absolute
) -> tuple[Any, Any, int] | None:
    """Return the keys of two neighbouring ranks, counted from 0, if both lie in a bracket of keys, else None.

    One scan counts what lies below the bracket, so what it finds is exact; third comes how many keys the
    bracket has.
    """
    inside, below = _between(values, *bracket, key)
    low, high = (rank - below for rank in ranks)
    return (*_partitioned(inside, low, high), inside.size) if low >= 0 and high < inside.size else None


def kth_and_next_by_sort(magnitude_flat: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
    """Do `order_statistics` of magnitudes in tensor operations only, so that a device is never waited for."""
    ranks = torch.arange(-1, 1, device=magnitude_flat.device) + count
    ordered = magnitude_flat.sort().values
    low, high = ordered.gather(0, ranks.clamp(0, ordered.numel() - 1)).unbind()
    return low, high


def smallest_by_cumsum(magnitude: Tensor, count: Tensor) -> Tensor:
    """Do `smallest` in tensor operations only, so that a device is never waited for."""
    if magnitude.numel() == 0:
        return magnitude.new_empty(magnitude.shape, dtype=torch.bool)
    values = magnitude.reshape(-1)
    kth, _ = kth_and_next_by_sort(values, count)
    below, equal = values < kth, values == kth
    missing = count - below.sum()
    return (below | (equal & (equal.cumsum(0) <= missing))).view(magnitude.shape)


def readable(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read now: a plain CPU tensor that is not being traced."""
    if torch.compiler.is_compiling() or transformed():
        return False
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"


def transformed() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jvp) is active, so that any tensor may be a wrapper.

    The values of wrappers cannot be read, and custom autograd functions need more methods there. Formulas in
    plain tensor operations work under all transforms.
    """
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def in_vmap() -> bool:
    """Whether `torch.func.vmap` is active, under which no tensor says how it lies in memory."""
    stack = () if torch.compiler.is_compiling() else get_interpreter_stack() or ()
    return any(each.key() == TransformType.Vmap for each in stack)


def is_batched(gradient: Tensor) -> bool:
    """Whether it is several gradients at once (``is_grads_batched=True``), which nothing takes in place."""
    return not torch.compiler.is_compiling() and is_legacy_batchedtensor(gradient)


def storage_order(tensor: Tensor) -> Tensor:
    """Flatten in the order of memory, without gaps: a view for every dense format, channels_last included."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1).contiguous()


def as_numpy(tensor: Tensor) -> Values:
    """View a CPU tensor as an array; half and bfloat16 are widened to float32, which keeps every value."""
    narrow = tensor.is_floating_point() and tensor.itemsize < 4
    # Tensor.numpy() would bar the storage from ever being resized, which FSDP does to free a gathered weight.
    return np.from_dlpack((tensor.float() if narrow else tensor).detach())


@torch.library.custom_op("pdp_fx::smallest", mutates_args=())
def _smallest(magnitude: Tensor, count: Tensor) -> Tensor:
    if magnitude.numel() == 0:
        return magnitude.new_empty(magnitude.shape, dtype=torch.bool)
    if magnitude.device.type != "cpu":
        return smallest_by_cumsum(magnitude, count)
    values, wanted = as_numpy(magnitude.reshape(-1)), int(count)
    kth, _ = order_statistics(values, wanted, np.positive)
    marked = values < kth
    missing = wanted - int(np.count_nonzero(marked))
    marked[np.flatnonzero(values == kth)[:missing]] = True
    return torch.as_tensor(marked).view(magnitude.shape)


@_smallest.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(magnitude: Tensor, count: Tensor) -> Tensor:
    return magnitude.new_empty(magnitude.shape, dtype=torch.bool)


def _partitioned(keys: Values, low: int, high: int) -> tuple[Any, Any]:
    parted = np.partition(keys, low)
    # A partition puts NaN last, so the next one is a NaN only where nothing else follows.
    return parted[low], np.fmin.reduce(parted[low + 1 :]) if high > low else parted[low]


def _bracket(values: Values, rank: int, key: np.ufunc) -> tuple[Any, Any]:
    """Return two keys that very probably have the one of this rank (from 0) between them."""
    stride = round(values.size ** (1 / 3) / 2)
    # A stride that shares a factor with the shape would look at a few kernel positions or channels only.
    while math.gcd(stride, values.size) > 1:
        stride += 1
    sample = key(values[::stride])
    share = rank / values.size
    # Three standard deviations of the rank that the wanted value has in the sample.
    margin = 2 + round(3 * math.sqrt(sample.size * share * (1 - share)))
    centre = round(share * sample.size)
    first, last = max(centre - margin, 0), min(centre + margin, sample.size - 1)
    # numpy finds one rank at a time much faster than two at once.
    if 2 * rank < values.size:
        sample.partition(last)
        sample[:last].partition(first)
    else:
        sample.partition(first)
        sample[first + 1 :].partition(last - first - 1)
    return sample[first] if first > 0 else -np.inf, sample[last] if last < sample.size - 1 else np.inf


def _between(values: Values, low: Any, high: Any, key: np.ufunc) -> tuple[Values, int]:
    """Return the keys from low to high, and how many keys are less than low."""
    size = min(values.size, BLOCK)
    buffer, under, inside = np.empty(size, values.dtype), np.empty(size, np.bool_), np.empty(size, np.bool_)
    found: list[Values] = []
    below = 0
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        keys, less, kept = buffer[: block.size], under[: block.size], inside[: block.size]
        key(block, out=keys)
        np.less(keys, low, out=less)
        np.less_equal(keys, high, out=kept)
        np.greater(kept, less, out=kept)
        below += int(np.count_nonzero(less))
        found.append(keys[kept.nonzero()[0]])
    return (found[0] if len(found) == 1 else np.concatenate(found)), below
