"""The arithmetic of allocation: how many units each layer loses, so that the total meets the target exactly.

Under global allocation all layers of one rule are ranked together by magnitude, as in the paper. No layer
falls below its share of ``min_keep``, since a ranking without this bound can empty a layer. `planning` calls
these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pdp_fx.errors import SpecError
from pdp_fx.ops.select import smallest


def allocate(scores: Sequence[Tensor], total: int, most: Sequence[int]) -> list[int]:
    """Prune the ``total`` units of lowest score over all layers, at most ``most`` in each.

    Args:
        scores: the scores of each layer's units, any shape.
        total: number of units to prune; ties go to the earlier layer and the lower index.
        most: how many units each layer may lose.

    Returns:
        the number of units to prune in each layer; they sum to ``total``.

    Raises:
        SpecError: the layers may not lose that many.
    """
    if total > sum(most):
        raise SpecError(
            f"{total} units are to be pruned, but the layers may lose {sum(most)} at most; "
            "lower the ratio, min_keep or min_channels"
        )
    counts: list[int] = [0] * len(scores)
    ranked: list[int] = list(range(len(scores)))
    # A layer that would lose more than it may is fixed at its limit, and the others are ranked again.
    while ranked:
        left = total - sum(counts[index] for index in range(len(scores)) if index not in ranked)
        shares = _ranked([scores[index] for index in ranked], left)
        for index, share in zip(ranked, shares, strict=True):
            counts[index] = min(share, most[index])
        full = [index for index, share in zip(ranked, shares, strict=True) if share > most[index]]
        if not full:
            return counts
        ranked = [index for index in ranked if index not in full]
    return counts


def _ranked(scores: list[Tensor], total: int) -> list[int]:
    """How many of the ``total`` lowest scores lie in each tensor."""
    # Every narrower type fits into float32 without loss.
    dtype = torch.float64 if any(score.dtype == torch.float64 for score in scores) else torch.float32
    flat = torch.cat([score.detach().reshape(-1).to(dtype) for score in scores])
    chosen = smallest(flat, total)
    parts = cast(tuple[Tensor, ...], chosen.split([score.numel() for score in scores]))
    return [int(part.sum()) for part in parts]


def uniform_share(size: int, ratio: float) -> int:
    """How many of ``size`` units a layer loses under uniform allocation; one unit always stays."""
    return max(min(round(ratio * size), size - 1), 0)


def most_prunable(size: int, ratio: float, min_keep: float, least: int = 1) -> int:
    """How many of ``size`` units a layer may lose under global allocation.

    Args:
        size: number of units.
        ratio: the rule's ratio.
        min_keep: share of (1 - ratio) * size that must stay.
        least: number of units that must stay in any case.
    """
    # The tolerance is for (1 - 0.9) * 100, which floating point rounds to a number below 10.
    kept = max(math.floor(min_keep * (1 - ratio) * size + 1e-9), least, 1)
    return max(size - kept, 0)


@dataclass(frozen=True)
class MacTerm:
    """The multiply-accumulates of one weight: ``factor`` times the kept size of each axis.

    Attributes:
        factor: how often each weight is used for one example, times the sizes of the axes without groups.
        axes: for each other axis, the number of indices in no group, and for each group on it the pair
            (group, indices per channel).
    """

    factor: float
    axes: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True)
class MacModel:
    """Multiply-accumulates of one example as a function of the kept channels of each group.

    Attributes:
        terms: one for each use of a weight.
        widths: the number of channels of each group.
    """

    terms: tuple[MacTerm, ...]
    widths: tuple[int, ...]

    def macs(self, pruned: Sequence[int]) -> float:
        """The multiply-accumulates when ``pruned[g]`` channels of group g are removed."""
        kept = [width - gone for width, gone in zip(self.widths, pruned, strict=True)]
        total = 0.0
        for term in self.terms:
            size = term.factor
            for fixed, parts in term.axes:
                size *= fixed + sum(rows * kept[group] for group, rows in parts)
            total += size
        return total


def rounded(pruned: int, width: int, round_to: int, most: int) -> int:
    """The number of pruned channels nearest to ``pruned`` that leaves a multiple of ``round_to``.

    At most ``most`` channels are pruned; 0 if no multiple can be left.
    """
    if round_to == 1 or pruned == 0:
        return min(pruned, most)
    kept = max(round((width - pruned) / round_to), 1) * round_to
    while width - kept > most:
        kept += round_to
    return max(width - kept, 0)


def reach_macs(
    counts_at: Callable[[int], list[int]],
    top: int,
    macs: Callable[[list[int]], float],
    dense: float,
    reduction: float,
) -> list[int]:
    """Pruned channels that save ``reduction`` of the multiply-accumulates, by bisection.

    They are the fewest where more pruned channels always save more. Limits of groups that grow with the total
    may shift channels from one group to another, so that a few more go than would do.

    Args:
        counts_at: the pruned channels of all groups for a total from 0 to ``top``.
        top: the largest total.
        macs: the multiply-accumulates for given counts.
        dense: the multiply-accumulates of the dense model.
        reduction: the share of ``dense`` to save.

    Raises:
        SpecError: even the largest total does not save enough.
    """
    goal, least = (1 - reduction) * dense, macs(counts_at(top))
    if least > goal:
        raise SpecError(
            f"mac_reduction={reduction:g} cannot be reached: removing every channel that may go "
            f"saves {1 - least / dense:.3f} of the multiply-accumulates; see explain() for what stays and "
            "why, and min_channels and round_to for what stays of a group"
        )
    low, high = 0, top
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if macs(counts_at(middle)) <= goal else (middle + 1, high)
    return counts_at(high)
