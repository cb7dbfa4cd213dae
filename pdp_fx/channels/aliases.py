"""Tensors that share memory: which labels no longer hold after one of them was written to.

Nothing is lost as long as nobody reads such a tensor again; if somebody does, all that was in it and all that
was written stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pdp_fx.channels.labels import Layer, Reason
from pdp_fx.channels.record import Call
from pdp_fx.tracing.structure import flat_tensors

OVERWRITTEN = (
    "it is written to in place through a view",
    "make a new tensor instead, with torch.cat or torch.where",
)
"""Why what shares memory stays, and what would change it."""

Lost = tuple[list[Tensor], Reason]
"""Labels that have to stay if a tensor is read again, and why."""


class Aliases:
    """The labelled tensors by the memory they lie in, and what was lost of each."""

    def __init__(self) -> None:
        self._sharing: dict[int, list[TensorWeakRef]] = {}
        self._outdated = WeakTensorKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        """A tensor has labels from now on."""
        storage = tensor.untyped_storage()._cdata
        self._sharing.setdefault(storage, []).append(TensorWeakRef(tensor))

    def lost(self, tensor: Tensor) -> Sequence[Lost]:
        """What is lost because ``tensor`` is read now; it is told once."""
        return self._outdated.pop(tensor, None) or ()

    def note_writes(self, call: Call, layers: Callable[[Tensor], tuple[Layer, ...]], reason: Reason) -> None:
        """Note what a call that writes in place takes from the tensors that share memory with its results."""
        for place, argument in enumerate(call.func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in flat_tensors(call.argument(place, argument.name)):
                sharing = [ref() for ref in self._sharing.get(written.untyped_storage()._cdata, ())]
                known = [tensor for tensor in sharing if tensor is not None and tensor is not written]
                aliases = overlapping(written, known)
                involved = [written, *aliases, *call.tensors()] if aliases else []
                ids = [layer.ids for tensor in involved for layer in layers(tensor)]
                for alias in aliases:
                    self._outdated[alias] = (*(self._outdated.get(alias) or ()), (ids, reason))


def overlapping(written: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Those of ``others`` that writing to ``written`` may change; all are strided and in one storage."""
    if not others:
        return []
    size = written.untyped_storage().nbytes() // written.element_size()
    touched = torch.zeros(size, dtype=torch.bool)
    touched.as_strided(written.shape, written.stride(), written.storage_offset()).fill_(True)
    return [
        other
        for other in others
        if other.element_size() != written.element_size()
        or bool(touched.as_strided(other.shape, other.stride(), other.storage_offset()).any())
    ]
