"""N:M groups: M consecutive weights along the input channels, of which N stay (section 3.4 of the paper).

A weight (O, I, *kernel) is seen as (O, I/M, M, *kernel), one group for every kernel position. While the
ratio ramps, kappa weights of each group are pruned, kappa being fractional: with k = floor(kappa),
f = kappa - k and t_k halfway between a_(k) and a_(k+1), the sorted magnitudes of a group (t_0 = 0),

    t^2 = (1 - f) t_k^2 + f t_(k+1)^2 = sum over k >= 1 of max(0, 1 - |kappa - k|) t_k^2.

t is continuous in kappa on (0, M-1] and -inf at kappa = 0, where nothing is pruned. kappa is kept as an
integer in millionths, which survives a model's change of dtype.
"""

import math
from typing import Any

import torch
from torch import Tensor

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
    return torch.unflatten(weight, 1, (-1, m))


def nm_threshold(weight: Tensor, m: int, kappa: Tensor) -> Tensor:
    """Return the threshold t of every group.

    Args:
        weight: (O, I, *kernel) with I a multiple of M.
        m: M, the size of a group.
        kappa: 0-dim int64, how many weights of each group are pruned now, in millionths; clipped to
            0..(M-1) * 1e6, since a group keeps at least one weight; on the device of `weight`.

    Returns:
        (O, I/M, 1, *kernel) in `compute_dtype(weight.dtype)`; broadcasts against `group_view(weight, m)`.
    """
    return _nm_threshold(weight, m, kappa)


def nm_pruned(weight: Tensor, keep: int, m: int, pruned_now: int | Tensor) -> Tensor:
    """Mark exactly `pruned_now` weights of each group: the smallest, ties broken by index, the lowest first.

    Args:
        weight: (O, I, *kernel) with I a multiple of M.
        keep: N, how many weights of a group stay whatever `pruned_now` says.
        m: M, the size of a group.
        pruned_now: whole weights pruned of each group, clipped to M - N; may be a 0-dim tensor.

    Returns:
        A bool tensor of the shape of `weight`, True at the pruned weights.
    """
    planes = group_view(weight.detach(), m).abs().movedim(2, 0).contiguous()
    ranks = torch.zeros_like(planes, dtype=torch.int16)
    for i in range(m):
        ranks[:i] += planes[i] < planes[:i]
        ranks[i + 1 :] += planes[i] <= planes[i + 1 :]
    most = m - keep
    allowed = pruned_now.clamp(max=most) if isinstance(pruned_now, Tensor) else min(pruned_now, most)
    return (ranks < allowed).movedim(0, 2).flatten(1, 2)


@torch.library.custom_op("pdp_fx::nm_threshold", mutates_args=())
def _nm_threshold(weight: Tensor, m: int, kappa: Tensor) -> Tensor:
    pruned = kappa.clamp(0, (m - 1) * MILLIONTHS)
    groups = group_view(weight, m)
    if pruned.device.type == "cpu" and int(pruned) == 0:
        return _empty_threshold(groups).fill_(-math.inf)
    ordered = sorted_magnitudes(groups)
    squared = torch.zeros_like(ordered[0])
    for k, share in enumerate(_level_shares(pruned, m), start=1):
        if not isinstance(share, float) or share > 0.0:
            t_k = (ordered[k - 1] + ordered[k]).mul_(0.5)
            squared += t_k.square_().mul_(share)
    return torch.where(pruned > 0, squared.sqrt_(), -math.inf).unsqueeze(2)


@_nm_threshold.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(weight: Tensor, m: int, kappa: Tensor) -> Tensor:
    return _empty_threshold(group_view(weight, m))


def _mark_constant(ctx: Any, inputs: tuple[Tensor, int, Tensor], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _no_gradient(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
    return None, None, None


_nm_threshold.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    _no_gradient, setup_context=_mark_constant
)


def sorted_magnitudes(groups: Tensor) -> tuple[Tensor, ...]:
    """Sort |w| inside each group (O, I/M, M, *kernel): M tensors (O, I/M, *kernel), the smallest first."""
    planes = groups.movedim(2, 0)
    planes = (
        torch.empty(planes.shape, dtype=compute_dtype(groups.dtype), device=groups.device)
        .copy_(planes)
        .abs_()
    )
    network = SORTING_NETWORKS.get(len(planes))
    if network is None:
        return planes.sort(0).values.unbind()
    ordered, spare = list(planes.unbind()), torch.empty_like(planes[0])
    for i, j in network:
        torch.minimum(ordered[i], ordered[j], out=spare)
        torch.maximum(ordered[i], ordered[j], out=ordered[j])
        ordered[i], spare = spare, ordered[i]
    return tuple(ordered)


def _level_shares(pruned: Tensor, m: int) -> list[float] | tuple[Tensor, ...]:
    levels = torch.arange(1, m, device=pruned.device) * MILLIONTHS
    shares = (MILLIONTHS - (pruned - levels).abs()).clamp(min=0).double() / MILLIONTHS
    # On a device the shares stay there: reading them would wait for it.
    return [float(share) for share in shares] if pruned.device.type == "cpu" else shares.unbind()


def _empty_threshold(groups: Tensor) -> Tensor:
    return groups.new_empty(groups[:, :, :1].shape, dtype=compute_dtype(groups.dtype))
