"""How many units each layer gives up, so that the whole reaches its target exactly.

Under global allocation all layers of one rule are ranked together by magnitude (the paper's way);
a layer never falls below its share of ``min_keep``, since an unguarded ranking can empty a layer.
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
    """How many of ``size`` units a layer loses that has its ratio for itself."""
    return max(min(round(ratio * size), size - 1), 0)


def most_prunable(size: int, ratio: float, min_keep: float, least: int = 1) -> int:
    """How many of ``size`` units a layer may lose under global allocation."""
    # The tolerance is for (1 - 0.9) * 100, which floating point puts below 10.
    kept = max(math.floor(min_keep * (1 - ratio) * size + 1e-9), least, 1)
    return max(size - kept, 0)


@dataclass(frozen=True)
class MacTerm:
    """The multiply-accumulates of one weight: ``factor`` times the kept size of each axis.

    Attributes:
        factor: positions per example, times the sizes of unaffected axes.
        axes: per axis its unaffected size and the (group, rows per channel) pairs that add to it.
    """

    factor: float
    axes: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True)
class MacModel:
    """Multiply-accumulates of one example as a function of the kept channels of each group."""

    terms: tuple[MacTerm, ...]
    widths: tuple[int, ...]

    def macs(self, pruned: Sequence[int]) -> float:
        """The count when ``pruned[g]`` channels of group g are gone."""
        kept = [width - gone for width, gone in zip(self.widths, pruned, strict=True)]
        total = 0.0
        for term in self.terms:
            size = term.factor
            for fixed, parts in term.axes:
                size *= fixed + sum(rows * kept[group] for group, rows in parts)
            total += size
        return total


def rounded(pruned: int, width: int, round_to: int, most: int) -> int:
    """The nearest number of pruned channels that leaves a multiple of ``round_to``."""
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
    """The fewest pruned channels that save ``reduction`` of the multiply-accumulates, by bisection.

    Args:
        counts_at: the counts of all groups at an effort of 0..top; more effort prunes more.
        top: the greatest effort.
        macs: the multiply-accumulates of given counts.
        dense: those of the dense model.
        reduction: the share of them to save.

    Raises:
        SpecError: even the greatest effort does not reach the goal.
    """
    goal, least = (1 - reduction) * dense, macs(counts_at(top))
    if least > goal:
        raise SpecError(
            f"mac_reduction={reduction:g} cannot be reached: removing every channel that may go "
            f"saves {1 - least / dense:.3f} of the multiply-accumulates; see explain() for what stays and why"
        )
    low, high = 0, top
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if macs(counts_at(middle)) <= goal else (middle + 1, high)
    return counts_at(high)
