"""The thresholds of all layers of a model on a GPU, found together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from pdp_fx.ops import gpu
from pdp_fx.policy import MaskPolicy


class _Found(NamedTuple):
    state: tuple[object, ...]
    threshold: Tensor


class Together:
    """Finds the thresholds of all masks of a model at once, in each forward pass.

    The first mask that is called in a pass finds the thresholds of all masks that were called in earlier
    passes. Each of the others then takes its own, once, if neither its weight nor its count has changed. A
    mask computes its threshold alone if it is called for the first time, if it gets another tensor than
    before, or if its weight is freed between uses, as by `fully_shard`.
    """

    def __init__(self) -> None:
        self._weights: WeakKeyDictionary[MaskPolicy, ReferenceType[Tensor]] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[MaskPolicy, _Found] = WeakKeyDictionary()
        self._tables: dict[torch.dtype, gpu.Table] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what is loaded from a file, starts anew."""
        return Together, ()

    def threshold(self, mask: MaskPolicy, weight: Tensor) -> Tensor:
        """The threshold of a mask for a weight that `gpu.usable` has agreed to; 0-dim float32."""
        if not weight.is_leaf:
            return _thresholds([(mask, weight)], None)[1][0]
        known = self._weights.get(mask)
        if known is None or known() is not weight:
            self._weights[mask] = ref(weight)
            return _thresholds([(mask, weight)], None)[1][0]
        first = next(iter(self._weights)) is mask
        found = None if first else self._found.pop(mask, None)
        if found is None or found.state != _state(mask, weight):
            self._find(weight)
            found = self._found.pop(mask)
        return found.threshold

    def _find(self, like: Tensor) -> None:
        """Find the thresholds of all weights of this device and dtype."""
        pairs = [(mask, weight) for mask, weight in self._alive() if _fits(weight, like)]
        self._tables[like.dtype], thresholds = _thresholds(pairs, self._tables.get(like.dtype))
        for (mask, weight), threshold in zip(pairs, thresholds, strict=True):
            self._found[mask] = _Found(_state(mask, weight), threshold)

    def _alive(self) -> Iterable[tuple[MaskPolicy, Tensor]]:
        for mask, known in self._weights.items():
            weight = known()
            if weight is not None:
                yield mask, weight


def _thresholds(
    pairs: list[tuple[MaskPolicy, Tensor]], last: gpu.Table | None
) -> tuple[gpu.Table, tuple[Tensor, ...]]:
    weights = [weight.detach() for _, weight in pairs]
    where = gpu.table(weights, last)
    return where, gpu.thresholds(where, [mask.count for mask, _ in pairs], weights[0].dtype).unbind()


def _fits(weight: Tensor, like: Tensor) -> bool:
    same = weight.device == like.device and weight.dtype == like.dtype
    return same and weight.untyped_storage().size() > 0 and gpu.usable(weight)


def _state(mask: MaskPolicy, weight: Tensor) -> tuple[object, ...]:
    """A value that changes with the weight or the count; a write through an alias shows one pass later."""
    versions = [None if tensor.is_inference() else tensor._version for tensor in (weight, mask.count)]
    return weight.data_ptr(), mask.count.data_ptr(), *versions
