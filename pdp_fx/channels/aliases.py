"""Tensors that share memory: which labels they have after one of them was written to.

What is written to a part of a tensor belongs to the channels that the part belongs to, so the two are tied
and the whole keeps its labels. Where that cannot be said, nothing is lost as long as nobody reads the whole
again; if somebody does, all that was in it and all that was written stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Write:
    """A tensor that is written to, and what shares memory with it.

    Attributes:
        target: the tensor.
        layers: its labels from before.
        aliases: tensors that the write may change.
        sources: everything that the call was given.
    """

    target: Tensor
    layers: tuple[Layer, ...]
    aliases: list[Tensor]
    sources: list[Tensor]


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

    def lose(self, tensor: Tensor, ids: list[Tensor], reason: Reason) -> None:
        """Note labels that have to stay if ``tensor`` is read again."""
        self._outdated[tensor] = (*(self._outdated.get(tensor) or ()), (ids, reason))

    def writes(self, call: Call, layers: Callable[[Tensor], tuple[Layer, ...]]) -> Iterator[Write]:
        """What a call writes to in place that shares memory with other labelled tensors."""
        for written in written_by(call):
            sharing = [ref() for ref in self._sharing.get(written.untyped_storage()._cdata, ())]
            known = [tensor for tensor in sharing if tensor is not None and tensor is not written]
            aliases = overlapping(written, known)
            if aliases:
                yield Write(written, layers(written), aliases, call.tensors())


def written_by(call: Call) -> Iterator[Tensor]:
    """The tensors that a call writes to in place."""
    for place, argument in enumerate(call.func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from flat_tensors(call.argument(place, argument.name))


def overlapping(written: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Those of ``others`` that writing to ``written`` may change; all are strided and in one storage."""
    if not others:
        return []
    size = written.untyped_storage().nbytes() // written.element_size()
    touched = torch.zeros(size, dtype=torch.bool, device="cpu")
    _laid(touched, written).fill_(True)
    return [
        other
        for other in others
        if other.element_size() != written.element_size() or bool(_laid(touched, other).any())
    ]


@dataclass(frozen=True)
class Followed:
    """A layer of a tensor that goes on to hold although a part of the tensor was written to.

    Attributes:
        layer: what it was.
        part: the layer of the part with the same labels.
        now: the layer of what was written; its labels have to be tied to those of the part.
    """

    layer: Layer
    part: Layer
    now: Layer

    def result(self) -> Layer:
        """What the layer is now: zero where it was and nothing else was written."""
        shape = torch.broadcast_shapes(self.part.ids.shape, self.now.zero.shape)
        spoilt = self.part.ids.expand(shape)[~self.now.zero.expand(shape)]
        zero = self.layer.zero & ~torch.isin(self.layer.ids, spoilt)
        return Layer(self.layer.ids, zero, (self.layer, self.now))


def follow(
    write: Write, alias: Tensor, before: tuple[Layer, ...], after: tuple[Layer, ...]
) -> tuple[list[Followed], list[Tensor]]:
    """What becomes of the labels of a tensor when a part of it was written to.

    Args:
        write: what was written to.
        alias: the tensor.
        before: its layers.
        after: the layers of what was written to, now.

    Returns:
        The layers that hold, and the labels that have to stay if the tensor is read.
    """
    followed: list[Followed] = []
    for layer in before if alias.element_size() == write.target.element_size() else ():
        part = next((part for part in write.layers if bool(torch.isin(part.ids, layer.ids).any())), None)
        now = None if part is None else next((now for now in after if now.support == part.support), None)
        if part is not None and now is not None and _agree(write.target, part.ids, alias, layer.ids):
            followed.append(Followed(layer, part, now))
    held = [layer for each in followed for layer in (each.layer, each.part, each.now)]
    others = [layer.ids for layer in (*before, *write.layers, *after) if all(layer is not h for h in held)]
    return followed, others


def _agree(one: Tensor, ids: Tensor, other: Tensor, other_ids: Tensor) -> bool:
    """Whether two tensors have the same labels where they share memory; not if one was laid out anew."""
    if ids.ndim != one.ndim or torch.broadcast_shapes(ids.shape, one.shape) != one.shape:
        return False
    size = one.untyped_storage().nbytes() // one.element_size()
    labels = torch.full((size,), -1, device="cpu")
    _laid(labels, one).copy_(ids.expand(one.shape))
    mine = _laid(labels, other)
    return bool(((mine == other_ids) | (mine < 0)).all())


def _laid(memory: Tensor, like: Tensor) -> Tensor:
    """A stand-in for the memory of a tensor, in its shape."""
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())
