"""The order statistics of one layer, remembered while its weights do not change.

A second forward pass, gradient accumulation, the recomputation of activation checkpointing and evaluation all
see the same weights as the step before, and need not rank them again. A checksum of the contents, about ten
times cheaper than a selection, shows whether they have changed: version counters alone miss writes through
``weight.data`` or through an alias.

A step of the optimizer moves the wanted magnitudes only a little, so they are first looked for near where
they were. One scan shows whether they are there; if not, a selection from scratch follows.
"""

from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from pdp_fx.ops.select import Values, as_numpy, order_statistics, statistics_within, storage_order

Key: TypeAlias = tuple[object, ...]

REMEMBERED_FROM = 1 << 10
"""Below this many values a selection from scratch is as fast as a scan."""

FARTHEST = 0.5
FULL = 1 / 32
"""Where the bracket has a greater share of the values than this, it is narrowed for the next time."""


class Ranking:
    """Finds the largest pruned and the smallest kept magnitude of a layer, once for each of its states."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._found: tuple[Any, Any] = (0.0, 0.0)
        self._reach = FULL

    def around(self, weight: Tensor, pruned: int) -> tuple[Any, Any]:
        """Return the magnitudes of rank `pruned` and `pruned` + 1, counted from 1.

        Args:
            weight: the weights of the layer; `readable`.
            pruned: from 1 to `weight.numel()` - 1.
        """
        values = as_numpy(storage_order(weight.detach()))
        key = (pruned, _version(weight), *_content(values))
        if key != self._key:
            self._found, self._key = self._select(values, pruned), key
        return self._found

    def _select(self, values: Values, pruned: int) -> tuple[Any, Any]:
        """Find both magnitudes: near the last ones, no further off than `reach` of them, or from scratch."""
        if self._key is None or values.size < REMEMBERED_FROM:
            return order_statistics(values, pruned)
        bracket = self._found[0] * (1 - self._reach), self._found[1] * (1 + self._reach)
        found = statistics_within(values, (pruned - 1, pruned), bracket)
        if found is None:
            self._reach = min(4 * self._reach, FARTHEST)
            return order_statistics(values, pruned)
        largest_pruned, smallest_kept, inside = found
        if inside > FULL * values.size:
            self._reach /= 2
        return largest_pruned, smallest_kept


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _content(values: Values) -> Key:
    """Checksums of the bits, and the sum of the values.

    If all float64 values are doubled, each changes the sum of 64-bit words by 2 ** 52, and these changes may
    add up to 0 modulo 2 ** 64; the sum of 32-bit halves shows them. If as many are doubled as are halved, the
    changes of all bits may cancel, but not those of the values.
    """
    whole = values.size - values.size % 2
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(values.sum())
    words = values[:whole].view(np.uint64)
    halves = int(values.view(np.uint32).sum(dtype=np.uint64)) if values.itemsize == 8 else 0
    return (
        values.dtype,
        values.size,
        int(words.sum()),
        halves,
        int(np.bitwise_xor.reduce(words)),
        values[whole:].tobytes(),
        total,
    )
