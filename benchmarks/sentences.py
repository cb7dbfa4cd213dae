"""Sentences as rows of ids, and batches of sentences that are about as long as each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FROM_TEACHER = 0.95
"""The paper's weight of the loss on the teacher's outputs; the rest is that of the loss on the labels."""

POOL = 16
"""So many batches are sorted by length among themselves. SST-2's rows of 32 are then 25 tokens long in the
mean instead of 48, of which 23 are no padding."""


@dataclass(frozen=True)
class Sentences:
    """Sentences in memory.

    Attributes:
        ids: of tokens, int64, (n, longest), 0 where a sentence is over.
        labels: their classes, int64, (n,), or the probabilities of the classes, float32, (n, classes).
    """

    ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, places: slice | Tensor) -> Sentences:
        return Sentences(self.ids[places], self.labels[places])

    @property
    def lengths(self) -> Tensor:
        """How many tokens each has."""
        return (self.ids != 0).sum(1)

    def cut(self) -> tuple[Tensor, Tensor]:
        """Ids without the columns in which no sentence has any, and labels."""
        return self.ids[:, : int(self.lengths.max())], self.labels


def taught(labels: Tensor, teacher: Tensor, share: float = FROM_TEACHER) -> Tensor:
    """Probabilities of classes whose cross-entropy is the loss of distillation.

    With them it is ``share * KL(teacher || student) + (1 - share) * cross_entropy(student, labels)`` and
    the teacher's entropy times ``share``, which no weight of the student changes.

    Args:
        labels: classes, (n,).
        teacher: its logits, (n, classes).
        share: of the loss that comes from the teacher.
    """
    certain = nn.functional.one_hot(labels, teacher.shape[1]).to(teacher.dtype)
    return share * teacher.softmax(1) + (1 - share) * certain


class SentenceBatches:
    """Shuffled batches of training sentences, in parts that count as epochs, and plain ones of others.

    What a batch holds depends on the seed and the number of the part only. Sentences of a batch are about
    as long as each other, and batches come in random order.

    Args:
        train: the training sentences, on the device of the training.
        size: sentences in a batch; an incomplete last one is left out.
        seed: of the order.
        parts: into how many parts of equal length a pass over the sentences is cut.
    """

    def __init__(self, train: Sentences, size: int, seed: int, parts: int = 1) -> None:
        self.train, self.size, self.seed, self.parts = train, size, seed, parts
        self.lengths = train.lengths.cpu()

    def __len__(self) -> int:
        return len(self.train) // (self.size * self.parts)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one part: ids (size, longest of them) and labels."""
        order = self._order(number // self.parts)
        first = len(self) * (number % self.parts)
        for places in order[first : first + len(self)]:
            yield self.train[places.to(self.train.ids.device)].cut()

    def plain(self, sentences: Sentences, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
        """All of ``sentences``, in the order of their lengths."""
        for places in sentences.lengths.argsort(stable=True).split(size):
            yield sentences[places].cut()

    def _order(self, number: int) -> Tensor:
        """Which sentences are in which batch of a pass, (batches, size)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.train), generator=generator)
        order = order[: len(order) // self.size * self.size]
        pools = order.split(self.size * POOL)
        batches = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools])
        batches = batches.view(-1, self.size)
        return batches[torch.randperm(len(batches), generator=generator)]
