"""The order statistics of one layer, remembered while nothing changes.

A second forward pass, gradient accumulation, the recomputation of activation checkpointing and evaluation
all see the weights that the step before saw, and need not rank them again. What proves that nothing changed
is the content itself, in one pass that is some ten times cheaper than a selection: version counters alone
miss whoever writes through ``weight.data`` or through an alias.
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
    """Checksums of the bits that are blind to the order of the values: so is a rank.

    Where all values are doubled, the sum of 64-bit words changes by a multiple of 2 ** 52 for each double,
    which may come to nothing; that of their halves does not.
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
