"""The order statistics of one layer, remembered while its weights do not change.

A second forward pass, gradient accumulation, the recomputation of activation checkpointing and evaluation all
see the same weights as the step before, and need not rank them again. A checksum of the contents, about ten
times cheaper than a selection, shows whether they have changed: version counters alone miss writes through
``weight.data`` or through an alias.
"""

from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from pdp_fx.ops.select import Values, as_numpy, order_statistics, storage_order

Key: TypeAlias = tuple[object, ...]


class Ranking:
    """Finds the largest pruned and the smallest kept magnitude of a layer, once for each of its states."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._found: tuple[Any, Any] = (0.0, 0.0)

    def around(self, weight: Tensor, pruned: int) -> tuple[Any, Any]:
        """Return the magnitudes of rank `pruned` and `pruned` + 1, counted from 1.

        Args:
            weight: the weights of the layer; `readable`.
            pruned: from 1 to `weight.numel()` - 1.
        """
        values = as_numpy(storage_order(weight.detach()))
        key = (pruned, _version(weight), *_content(values))
        if key != self._key:
            self._found, self._key = order_statistics(values, pruned), key
        return self._found


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _content(values: Values) -> Key:
    """Checksums of the bits; like ranks they do not depend on the order of the values.

    If all float64 values are doubled, each changes the sum of 64-bit words by 2 ** 52, and these changes may
    add up to 0 modulo 2 ** 64; the sum of 32-bit halves shows them.
    """
    whole = values.size - values.size % 2
    words = values[:whole].view(np.uint64)
    halves = int(values.view(np.uint32).sum(dtype=np.uint64)) if values.itemsize == 8 else 0
    return (
        values.dtype,
        values.size,
        int(words.sum()),
        halves,
        int(np.bitwise_xor.reduce(words)),
        values[whole:].tobytes(),
    )
