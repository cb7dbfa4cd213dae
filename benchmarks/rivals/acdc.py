"""AC/DC: alternating compressed and decompressed training (Peste et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from benchmarks.rivals.common import KeptSet, global_smallest
from pdp_fx import MaskSite, Progress

CIFAR = ((10, 30), (50, 70), (90, 110), (130, 150), (170, 200))
"""Sparse phases of the CIFAR-10 recipe, of 200 epochs."""


def phases(epochs: int) -> tuple[tuple[int, int], ...]:
    """The sparse phases of the CIFAR-10 recipe scaled to ``epochs``, none empty, the last up to the end."""
    scaled = [(round(first * epochs / 200), round(last * epochs / 200)) for first, last in CIFAR]
    long = [(first, last) for first, last in scaled if first < last]
    if not long or long[-1][1] < epochs:
        long.append((epochs - 1, epochs))
    return tuple(long)


class ACDC(KeptSet):
    """Dense and sparse phases take turns; in a sparse one the mask is fixed and pruned weights are 0.

    At the start of a sparse phase all layers are ranked together by magnitude. The original drops one weight
    more than it says, since it keeps what is strictly above the threshold; here the count is exact.

    Args:
        site: where it stands.
        sparse: for each sparse phase its first epoch and the first one after it; the last must not end
            before the training.
    """

    def __init__(self, site: MaskSite, sparse: tuple[tuple[int, int], ...] = CIFAR) -> None:
        super().__init__(site)
        self.sparse = sparse

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        sparse = masks[0].sparse
        for mask, (weight,) in zip(masks, weights, strict=True):
            # What momentum has moved meanwhile goes: a pruned weight starts its next dense phase at 0.
            weight.mul_(mask.keep)
        if any(now.counter == first for first, _ in sparse):
            total = sum(weight.numel() for (weight,) in weights)
            kept = math.ceil((1 - masks[0].ratio) * total - 1e-9)
            scores = [
                (weight.abs() + 1e-4) * mask.keep for mask, (weight,) in zip(masks, weights, strict=True)
            ]
            for mask, gone, (weight,) in zip(
                masks, global_smallest(scores, total - kept), weights, strict=True
            ):
                mask.keep.copy_(~gone)
                weight.mul_(mask.keep)
        elif any(now.counter == last for _, last in sparse[:-1]):
            for mask in masks:
                mask.keep.copy_(torch.ones_like(mask.keep))
