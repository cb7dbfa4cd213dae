"""Tensors that share memory: which labels they have after one of them was written to.

What is written to a part of a tensor becomes part of the channels there, so its labels are tied to those of
the part, and the whole tensor keeps its labels. If the part cannot be told, the labels of the whole are
frozen, together with those that were written, but only if the whole is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pdp_fx.channels.labels import Layer, Reason
from pdp_fx.channels.record import Call
from pdp_fx.tracing.structure import flat_tensors, memory_of

OVERWRITTEN = (
    "it is written to in place through a view",
    "make a new tensor instead, with torch.cat or torch.where",
)
"""Why what shares memory stays, and what would change it."""

Lost = tuple[list[Tensor], Reason]
"""Labels that must be frozen if a tensor is read again, and the reason."""


@dataclass(frozen=True)
class Write:
    """A tensor that is written to, and what shares memory with it.

    Attributes:
        target: the tensor that is written to.
        layers: its label layers before the write.
        aliases: the tensors that the write may change.
        sources: all tensor arguments of the call.
    """

    target: Tensor
    layers: tuple[Layer, ...]
    aliases: list[Tensor]
    sources: list[Tensor]


class Aliases:
    """The labelled tensors by the memory they lie in, and the labels to freeze if they are read."""

    def __init__(self) -> None:
        self._sharing: dict[int, list[TensorWeakRef]] = {}
        self._outdated = WeakTensorKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        """Note that a tensor has labels."""
        storage = memory_of(tensor)._cdata
        self._sharing.setdefault(storage, []).append(TensorWeakRef(tensor))

    def shared(self, tensor: Tensor) -> bool:
        """Whether another labelled tensor lies in the same memory."""
        sharing = (ref() for ref in self._sharing.get(memory_of(tensor)._cdata, ()))
        return any(other is not None and other is not tensor for other in sharing)

    def lost(self, tensor: Tensor) -> Sequence[Lost]:
        """The labels to freeze because ``tensor`` is read now; they are returned once."""
        return self._outdated.pop(tensor, None) or ()

    def lose(self, tensor: Tensor, ids: list[Tensor], reason: Reason) -> None:
        """Note labels to freeze if ``tensor`` is read again."""
        self._outdated[tensor] = (*(self._outdated.get(tensor) or ()), (ids, reason))

    def writes(self, call: Call, layers: Callable[[Tensor], tuple[Layer, ...]]) -> Iterator[Write]:
        """The in-place writes of a call to memory that other labelled tensors share."""
        for written in written_by(call):
            sharing = [ref() for ref in self._sharing.get(memory_of(written)._cdata, ())]
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
    """The tensors of ``others`` that a write to ``written`` may change; all are strided, in one storage."""
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
    """A layer of a tensor that stays valid although a part of the tensor was written to.

    Attributes:
        layer: the layer of the whole tensor before the write.
        part: the layer of the written part before the write, with the same labels.
        now: the layer of what was written; its labels have to be tied to those of ``part``.
    """

    layer: Layer
    part: Layer
    now: Layer

    def result(self) -> Layer:
        """The layer after the write: zero only where it was zero and what was written is zero."""
        shape = torch.broadcast_shapes(self.part.ids.shape, self.now.zero.shape)
        spoilt = self.part.ids.expand(shape)[~self.now.zero.expand(shape)]
        zero = self.layer.zero & ~torch.isin(self.layer.ids, spoilt)
        return Layer(self.layer.ids, zero, (self.layer, self.now))


def follow(
    write: Write, alias: Tensor, before: tuple[Layer, ...], after: tuple[Layer, ...]
) -> tuple[list[Followed], list[Tensor]]:
    """What happens to the labels of a tensor when memory that it shares was written to.

    Args:
        write: the write.
        alias: the tensor.
        before: its layers before the write.
        after: the layers of ``write.target`` after it.

    Returns:
        The layers of ``alias`` that stay valid, and the labels to freeze if it is read.
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
    """Whether two tensors have the same labels where they share memory; False if one was reshaped since."""
    if ids.ndim != one.ndim or torch.broadcast_shapes(ids.shape, one.shape) != one.shape:
        return False
    size = one.untyped_storage().nbytes() // one.element_size()
    labels = torch.full((size,), -1, device="cpu")
    _laid(labels, one).copy_(ids.expand(one.shape))
    mine = _laid(labels, other)
    return bool(((mine == other_ids) | (mine < 0)).all())


def _laid(memory: Tensor, like: Tensor) -> Tensor:
    """A view of ``memory``, which stands in for the storage of ``like``, with the strides of ``like``."""
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())
