"""The base of the policies that prune whole channels: scores, ranking, and the hard mask."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from pdp_fx.ops.select import smallest
from pdp_fx.ops.threshold import compute_dtype
from pdp_fx.policy import MaskPolicy, MaskSite
from pdp_fx.sharding import refuse_shard


class ChannelPolicy(MaskPolicy):
    """Whole channels: one mask for a group, shared by everything that carries the group's channels.

    A channel's score is the root mean square of all weights that produce it, over all producers of
    the group, so that its scale is that of a weight. A subclass may have scores of its own.

    Attributes:
        producers: the weight axes that make the channels.
        width: number of channels.
        parts: channels that are cut apart from the others; the best of each part always stays.
        block: how many channels of every layer each of them is, or a divisor of that.
        copies: whether the model writes to some weight while it trains, be it after the mask is computed; the
            gradient of the mask then needs the weight as it was.
    """

    copies = False

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.producers = site.producers
        self.width = site.width
        self.parts = site.parts
        self.block = site.block
        self.set_tables()

    def set_tables(self) -> None:
        """Make the tables of places, which no checkpoint holds."""
        for index, part in enumerate(self.parts):
            set_table(self, f"part_{index}", part)
        for index, producer in enumerate(self.producers):
            set_table(self, f"places_{index}", producer.places or ())

    def forward(self, *weights: Tensor) -> Tensor:
        """Return the mask, shape (width,)."""
        for weight in weights:
            refuse_shard(weight)
        if self.copies and self.training:
            weights = tuple(weight.clone() for weight in weights)
        return self.soft(*weights) if self.training else self.hard(*weights)

    @abstractmethod
    def soft(self, *weights: Tensor) -> Tensor:
        """The mask in training, in [0, 1], shape (width,)."""

    def hard(self, *weights: Tensor) -> Tensor:
        """The mask in eval mode, 0 for the channels that go and 1 for the others, shape (width,)."""
        return self.kept(self.scores(*weights))

    def kept(self, scores: Tensor) -> Tensor:
        """The hard mask that follows from the scores."""
        return (~smallest(self.ranked(scores), self.count)).to(scores.dtype)

    def scores(self, *weights: Tensor) -> Tensor:
        """What channels are ranked by, shape (width,), float32 or float64; the least go first."""
        energies: list[Tensor] = []
        entries: list[Tensor] = []
        for index, (weight, producer) in enumerate(zip(weights, self.producers, strict=True)):
            energy = _energy(weight, producer.axis)
            fan = torch.full_like(energy, weight.numel() // weight.shape[producer.axis])
            if producer.places is not None:
                places = self.get_buffer(f"places_{index}")
                energy, fan = self._gathered(energy, places), self._gathered(fan, places)
            energies.append(energy)
            entries.append(fan)
        mean = sum(energies[1:], energies[0]) / sum(entries[1:], entries[0])
        return torch.sqrt(torch.clamp(mean, min=torch.finfo(torch.float32).tiny))

    def ranked(self, scores: Tensor) -> Tensor:
        """The scores by which channels are ranked: the best channel of each part comes last."""
        scores = scores.detach()
        first = 2 * scores.amax().reshape(1)
        for index in range(len(self.parts)):
            part = self.get_buffer(f"part_{index}")
            best = part.index_select(0, scores.index_select(0, part).argmax().reshape(1))
            scores = scores.index_copy(0, best, first)
        return scores

    def _gathered(self, rows: Tensor, places: Tensor) -> Tensor:
        """Sum rows into the channels of the group; rows outside it fall into a spare place."""
        sums = rows.new_zeros(self.width + 1)
        return sums.index_add(0, torch.where(places < 0, self.width, places), rows)[: self.width]

    def pruned(self, *weights: Tensor) -> Tensor:
        return smallest(self.ranked(self.scores(*weights)), self.count)

    def extra_repr(self) -> str:
        return f"width={self.width}"


def set_table(owner: nn.Module, name: str, places: tuple[int, ...]) -> None:
    """Give a module a buffer of places that is not saved, or fill the one that it has."""
    old, made = owner._buffers.get(name), torch.tensor(places, dtype=torch.int64)
    if old is None or old.is_meta:
        device = next((b.device for b in owner.buffers(recurse=False) if not b.is_meta), None)
        owner.register_buffer(name, made.to(device), persistent=False)
    else:
        old.copy_(made)


def _energy(weight: Tensor, axis: int) -> Tensor:
    """Sum of squares of every row along ``axis``, of a complex weight those of both parts."""
    weight = torch.view_as_real(weight) if weight.is_complex() else weight
    others = [other for other in range(weight.ndim) if other != axis]
    dtype = compute_dtype(weight.dtype)
    if not others:
        return weight.to(dtype).square()
    return cast(Tensor, torch.linalg.vector_norm(weight, dim=others, dtype=dtype)).square()
