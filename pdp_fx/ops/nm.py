"""N:M groups: M consecutive weights along the input channels, of which N stay (section 3.4 of the paper).

A weight (O, I, *kernel) is seen as (O, I/M, M, *kernel), one group for every kernel position. While the
ratio ramps, kappa weights of each group are pruned, kappa being fractional: with k = floor(kappa),
f = kappa - k and t_k halfway between a_(k) and a_(k+1), the sorted magnitudes of a group (t_0 = 0),

    t^2 = (1 - f) t_k^2 + f t_(k+1)^2 = sum over k >= 1 of max(0, 1 - |kappa - k|) t_k^2.

t is continuous in kappa on (0, M-1] and -inf at kappa = 0, where nothing is pruned. kappa is kept as an
integer in millionths, which survives a model's change of dtype.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pdp_fx.ops.select import readable, transformed
from pdp_fx.ops.threshold import compute_dtype

MILLIONTHS = 1_000_000
"""What stands for one pruned weight in `kappa`."""

SORTING_NETWORKS: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((0, 1),),
    4: ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)),
    8: (
        *((0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1), (2, 3)),
        *((4, 5), (6, 7), (2, 4), (3, 5), (1, 4), (3, 6), (1, 2), (3, 4), (5, 6)),
    ),
}
"""Comparators (i, j), i < j, that sort M values: each leaves the smaller value at i."""


def group_view(weight: Tensor, m: int) -> Tensor:
    """View a weight (O, I, *kernel) as its groups (O, I/M, M, *kernel); M must divide I."""
    rows, inputs, *kernel = weight.shape
    if inputs % m:
        raise RuntimeError(f"the size of dim 1, {inputs}, is no multiple of {m}")
    # unflatten has no rule for a batch of gradients.
    return weight.view(rows, inputs // m, m, *kernel)


def nm_pruned(weight: Tensor, keep: int, m: int, pruned_now: int | Tensor) -> Tensor:
    """Mark exactly `pruned_now` weights of each group: the smallest, ties broken by index, the lowest first.

    NaN counts as the largest, so that it stays and shows.

    Args:
        weight: (O, I, *kernel) with I a multiple of M.
        keep: N, how many weights of a group stay whatever `pruned_now` says.
        m: M, the size of a group.
        pruned_now: whole weights pruned of each group, clipped to M - N; may be a 0-dim tensor.

    Returns:
        A bool tensor of the shape of `weight`, True at the pruned weights.
    """
    planes = group_view(weight.detach(), m).abs().movedim(2, 0).contiguous()
    planes = planes.nan_to_num_(nan=math.inf, posinf=math.inf)
    ranks = torch.zeros_like(planes, dtype=torch.int16)
    for i in range(m):
        ranks[:i] += planes[i] < planes[:i]
        ranks[i + 1 :] += planes[i] <= planes[i + 1 :]
    most = m - keep
    allowed = pruned_now.clamp(max=most) if isinstance(pruned_now, Tensor) else min(pruned_now, most)
    return (ranks < allowed).movedim(0, 2).flatten(1, 2)


def nm_threshold(weight: Tensor, m: int, kappa: Tensor) -> Tensor:
    """Return the threshold t of every group, a constant for autograd.

    Args:
        weight: (O, I, *kernel) with I a multiple of M.
        m: M, the size of a group.
        kappa: 0-dim int64, how many weights of each group are pruned now, in millionths; clipped to
            0..(M-1) * 1e6, since a group keeps at least one weight; on the device of `weight`.

    Returns:
        (O, I/M, 1, *kernel) in `compute_dtype(weight.dtype)`; broadcasts against `group_view(weight, m)`.
    """
    planes = group_view(weight.detach(), m).movedim(2, 0).to(compute_dtype(weight.dtype))
    squared = squared_thresholds(planes, kappa)
    return torch.where(squared < 0, squared, squared.sqrt()).unsqueeze(2)


def squared_thresholds(planes: Tensor, kappa: Tensor) -> Tensor:
    """Return t |t| of every group; -inf where nothing is pruned.

    Args:
        planes: (M, ...), the i-th weights of all groups in plane i; left as they are.
        kappa: as in `nm_threshold`.

    Returns:
        The shape of one plane.
    """
    most = (len(planes) - 1) * MILLIONTHS
    if readable(kappa):
        k, rest = divmod(min(max(int(kappa), 0), most), MILLIONTHS)
        shares = {k: (MILLIONTHS - rest) / MILLIONTHS, k + 1: rest / MILLIONTHS}
        shares = {level: share for level, share in shares.items() if level > 0 and share > 0.0}
        return _weighted_squares(planes, shares) if shares else planes.new_full(planes.shape[1:], -math.inf)
    # On a device kappa stays there: reading it would wait for it.
    pruned = kappa.clamp(0, most)
    levels = torch.arange(1, len(planes), device=pruned.device) * MILLIONTHS
    shares = (MILLIONTHS - (pruned - levels).abs()).clamp(min=0).double() / MILLIONTHS
    return torch.where(pruned > 0, _weighted_squares(planes, dict(enumerate(shares.unbind(), 1))), -math.inf)


def _weighted_squares(planes: Tensor, shares: Mapping[int, float | Tensor]) -> Tensor:
    """The sum of share times t_k^2 over the levels k, which are counted from 1."""
    ordered = sorted_magnitudes(planes)
    squared = torch.zeros_like(ordered[0])
    for k, share in shares.items():
        t_k = (ordered[k - 1] + ordered[k]) * 0.5
        squared = torch.addcmul(squared, t_k, t_k * share)
    return squared


def sorted_magnitudes(planes: Tensor) -> tuple[Tensor, ...]:
    """Sort |w| inside each group, given as (M, ...): M tensors, the smallest first."""
    magnitudes = planes.abs()
    network = SORTING_NETWORKS.get(len(planes))
    if network is None:
        return magnitudes.sort(0).values.unbind()
    ordered = list(magnitudes.unbind())
    if torch.compiler.is_compiling() or transformed():
        for i, j in network:
            ordered[i], ordered[j] = (
                torch.minimum(ordered[i], ordered[j]),
                torch.maximum(ordered[i], ordered[j]),
            )
        return tuple(ordered)
    spare = torch.empty_like(ordered[0])
    for i, j in network:
        torch.minimum(ordered[i], ordered[j], out=spare)
        torch.maximum(ordered[i], ordered[j], out=ordered[j])
        ordered[i], spare = spare, ordered[i]
    return tuple(ordered)
