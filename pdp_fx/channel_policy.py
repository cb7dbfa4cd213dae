"""`ChannelPolicy`, the base of the policies that prune whole channels: scores, ranking, and the hard mask."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from pdp_fx.ops.select import smallest
from pdp_fx.ops.threshold import compute_dtype
from pdp_fx.policy import MaskPolicy, MaskSite
from pdp_fx.sharding import refuse_not_whole

_LARGEST = 2.0**118
"""Scores above this count as this, so that they can be scaled."""


class ChannelPolicy(MaskPolicy):
    """Whole channels: one mask for a group, shared by everything that carries the group's channels.

    A channel's score is the root mean square of all weights that produce it, over all producers of the group,
    so that scores are on the scale of weights. Under weight_norm these weights are the rows that the layer
    uses, whose norms are parameters. A subclass may define its own `scores`.

    Attributes:
        producers: the weight axes that produce the channels.
        width: number of channels.
        parts: index sets that the model splits off or picks out of the channels; the best channel of each
            always stays.
        block: how many channels of each layer go with one of the group's, or a divisor of that.
        multiple: the number of channels that each layer keeps is a multiple of this.
        least: how many of the group's channels stay at least.
        copies: whether the mask must be computed from copies of the weights, because the model itself writes
            to them in training and the mask's gradient needs their earlier values.
    """

    copies = False

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.producers = site.producers
        self.width = site.width
        self.parts = site.parts
        self.block = site.block
        self.multiple = site.multiple
        self.least = site.least
        self.set_tables()

    def set_tables(self) -> None:
        """Fill the index tables, buffers that checkpoints do not contain."""
        for index, part in enumerate(self.parts):
            set_table(self, f"part_{index}", part)
        for index, producer in enumerate(self.producers):
            set_table(self, f"places_{index}", producer.places or ())

    def advance(self, share: float) -> None:
        """As for every policy; on the way, too, each layer keeps a multiple of ``multiple`` channels."""
        super().advance(share)
        step = self.step_of(self.multiple)
        if step > 1:
            kept = (self.width - self.count + step - 1) // step * step
            self.count.copy_((self.width - kept).clamp(min=0))

    def step_of(self, multiple: int) -> int:
        """The number of the group's channels with whose multiples layers keep one of ``multiple``."""
        return multiple // math.gcd(multiple, self.block)

    def fewest(self, min_channels: int) -> int:
        """How many of the group's channels must stay so that each layer keeps ``min_channels``."""
        return max(-(-min_channels // self.block), len(self.parts), self.least)

    def leaves_enough(self, gone: Tensor) -> bool:
        """Whether every layer and every part has channels left without those marked in ``gone``."""
        parts = (gone.index_select(0, self.get_buffer(f"part_{index}")) for index in range(len(self.parts)))
        return self.width - int(gone.sum()) >= self.fewest(1) and not any(bool(part.all()) for part in parts)

    def forward(self, *weights: Tensor) -> Tensor:
        """Return the mask, shape (width,)."""
        for weight in weights:
            refuse_not_whole(weight)
        if self.copies and self.training:
            weights = tuple(weight.clone() for weight in weights)
        return self.soft(*weights) if self.training else self.hard(*weights)

    @abstractmethod
    def soft(self, *weights: Tensor) -> Tensor:
        """The mask in training, in [0, 1], shape (width,)."""

    def hard(self, *weights: Tensor) -> Tensor:
        """The mask in eval mode: 0 for pruned channels, 1 for the others, shape (width,)."""
        return (~self.pruned(*weights)).to(compute_dtype(weights[0].dtype))

    def kept(self, scores: Tensor) -> Tensor:
        """The hard mask that follows from the scores."""
        return (~self._gone(scores)).to(scores.dtype)

    def scores(self, *weights: Tensor) -> Tensor:
        """What channels are ranked by, any numbers, shape (width,), float32 or float64; low ones go first."""
        energies: list[Tensor] = []
        entries: list[Tensor] = []
        for index, (weight, producer) in enumerate(zip(weights, self.producers, strict=True)):
            energy = _energy(weight, producer.axis)
            fan = torch.full_like(energy, producer.spans * (weight.numel() // weight.shape[producer.axis]))
            if producer.places is not None:
                places = self.get_buffer(f"places_{index}")
                energy, fan = self._gathered(energy, places), self._gathered(fan, places)
            energies.append(energy)
            entries.append(fan)
        mean = sum(energies[1:], energies[0]) / sum(entries[1:], entries[0])
        return torch.sqrt(torch.clamp(mean, min=torch.finfo(torch.float32).tiny))

    def ranked(self, scores: Tensor) -> Tensor:
        """The scores, with the best channel of each part raised above all others: it is pruned last."""
        scores = scores.detach()
        most = scores.amax().reshape(1)
        first = torch.where(most > 0, 2 * most, 1.0)
        for index in range(len(self.parts)):
            part = self.get_buffer(f"part_{index}")
            best = part.index_select(0, scores.index_select(0, part).argmax().reshape(1))
            scores = scores.index_copy(0, best, first)
        return scores

    def _gathered(self, rows: Tensor, places: Tensor) -> Tensor:
        """Sum the values of rows into their channels, shape (width,); rows outside the group are left out."""
        sums = rows.new_zeros(self.width + 1)
        return sums.index_add(0, torch.where(places < 0, self.width, places), rows)[: self.width]

    def pruned(self, *weights: Tensor) -> Tensor:
        return self._gone(self.scores(*weights))

    def _gone(self, scores: Tensor) -> Tensor:
        """Which channels the hard mask prunes; of equal ones, such as rows of norm 1, the first go."""
        return smallest(_without_last_bits(self.ranked(scores)), self.count)

    def extra_repr(self) -> str:
        return f"width={self.width}"


def set_table(owner: nn.Module, name: str, places: tuple[int, ...]) -> None:
    """Register a non-persistent index buffer, or fill the one that is there."""
    old, made = owner._buffers.get(name), torch.tensor(places, dtype=torch.int64, device="cpu")
    if old is None or old.is_meta:
        device = next((b.device for b in owner.buffers(recurse=False) if not b.is_meta), None)
        owner.register_buffer(name, made.to(device), persistent=False)
    else:
        old.copy_(made)


def _without_last_bits(scores: Tensor) -> Tensor:
    """Scores with 16 bits, where float32 has 24 and float64 53: rounding must not choose among equal ones.

    The sums that scores are made of come out otherwise when they are compiled, or on another device.
    """
    double = scores.dtype == torch.float64
    scores = (scores if double else scores.float()).clamp(max=_LARGEST)
    scaled = scores * ((2**37 if double else 2**8) + 1)
    return scaled - (scaled - scores)


def _energy(weight: Tensor, axis: int) -> Tensor:
    """The sum of squares of every row along ``axis``; for complex weights, of real and imaginary parts."""
    weight = torch.view_as_real(weight) if weight.is_complex() else weight
    others = [other for other in range(weight.ndim) if other != axis]
    dtype = compute_dtype(weight.dtype)
    if not others:
        return weight.to(dtype).square()
    return cast(Tensor, torch.linalg.vector_norm(weight, dim=others, dtype=dtype)).square()
