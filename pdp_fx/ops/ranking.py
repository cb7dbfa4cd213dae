"""The order statistics of one layer, remembered while nothing changes.

A second forward pass, gradient accumulation, the recomputation of activation checkpointing and evaluation
all see the weights that the step before saw, and need not rank them again. What proves that nothing changed
is the content itself, in one pass that is some ten times cheaper than a selection: version counters alone
miss whoever writes through ``weight.data`` or through an alias.
"""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pdp_fx.ops.select import as_numpy, order_statistics, storage_order

Key: TypeAlias = tuple[object, ...]


def readable(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read here and now without waiting, tracing or unwrapping."""
    if torch.compiler.is_compiling():
        return False
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"


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
        flat = storage_order(weight.detach())
        key = (pruned, flat.dtype, _version(weight), *_content(flat))
        if key != self._key:
            self._found, self._key = order_statistics(as_numpy(flat), pruned), key
        return self._found


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _content(flat: Tensor) -> Key:
    """Two checksums of the bits, both blind to the order of the values: so is a rank."""
    raw = as_numpy(flat.view(torch.uint8))
    whole = raw.size - raw.size % 8
    words = raw[:whole].view(np.uint64)
    return raw.size, int(words.sum()), int(np.bitwise_xor.reduce(words)), raw[whole:].tobytes()
