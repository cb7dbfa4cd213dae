"""The mask modules that `prepare` puts into a graph.

Each follows the mode of the model: in training it gives the soft mask of the paper (equation 1), in
eval mode the hard mask that `convert` will apply, by exact index. A mask has no trainable parameter;
its state is two integers, so that casting the model to another dtype leaves it alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pdp_fx.ops.nm import group_view, nm_pruned, nm_threshold
from pdp_fx.ops.nm_mask import nm_soft_mask
from pdp_fx.ops.ranking import Ranking
from pdp_fx.ops.select import readable, smallest
from pdp_fx.ops.soft_mask import Temperature, Threshold, soft_mask, soft_mask_value
from pdp_fx.ops.threshold import compute_dtype, threshold
from pdp_fx.sharding import refuse_shard
from pdp_fx.softness import Softness

UNSET = -1
MILLION = 1_000_000
SMALLEST_TAU = 1e-30
"""A relative tau of a layer of zeros."""


class Mask(nn.Module):
    """A mask over the units of one parameter or one channel group.

    Attributes:
        parameters_read: qualified names of the parameters that the mask is computed from.
        tau: softness of the mask.
        tau_bits: the number in tau as it is now, a float64 as an integer, where it changes; no checkpoint
            holds it.
        target: how many units are pruned in the end; -1 until the ratios are fixed.
        count: how many units are pruned now; follows from the target and the schedule, so no checkpoint
            holds it.
    """

    target: Tensor
    count: Tensor
    tau_bits: Tensor

    def __init__(self, parameters_read: tuple[str, ...], tau: Softness | float) -> None:
        super().__init__()
        self.parameters_read = parameters_read
        self.tau = tau if isinstance(tau, Softness) else Softness(tau)
        if self.tau.end is not None:
            bits = torch.tensor(self.tau.start, dtype=torch.float64).view(torch.int64)
            self.register_buffer("tau_bits", bits, persistent=False)
        self.register_buffer("target", torch.tensor(UNSET))
        self.register_buffer("count", torch.tensor(0), persistent=False)

    @property
    def allocated(self) -> bool:
        """Whether the final count is fixed."""
        return int(self.target) != UNSET

    def advance(self, share: float) -> None:
        """Prune ``share`` of the target, in [0, 1], from now on; nothing while there is no target."""
        # On its own device, so that a schedule of steps never waits for a GPU.
        self.count.copy_((self.target.clamp(min=0).double() * share).round())
        if self.tau.end is not None:
            self.tau_bits.view(torch.float64).fill_(self.tau.at(share))

    def temperature(self, weight: Tensor) -> Temperature:
        """The tau for these weights (or channel scores) now: a constant of the step, read without waiting."""
        if self.tau.constant:
            return self.tau.start
        number = self.tau.start if self.tau.end is None else self.tau_bits.view(torch.float64)
        if not self.tau.relative:
            return number
        norm = cast(Tensor, torch.linalg.vector_norm(weight.detach(), dtype=compute_dtype(weight.dtype)))
        return (number * norm.square() / weight.numel()).clamp(min=SMALLEST_TAU)

    def idle(self, weight: Tensor) -> bool:
        """Whether nothing is pruned now, as far as that can be told without waiting for a device."""
        return readable(weight) and readable(self.count) and int(self.count) == 0

    @property
    def pruned_now(self) -> int:
        """How many units (N:M: of every group) the hard mask prunes now."""
        return int(self.count)

    @abstractmethod
    def pruned(self, *weights: Tensor) -> Tensor:
        """The units that the hard mask prunes now, as booleans in the shape of the units."""

    @abstractmethod
    def values(self, *weights: Tensor) -> Tensor:
        """The soft mask itself, in [0, 1], in the shape of the units."""

    def extra_repr(self) -> str:
        return f"tau={self.tau}"


class WeightMask(Mask):
    """Unstructured: every weight is a unit (paper, section 3.1)."""

    def __init__(self, parameters_read: tuple[str, ...], tau: Softness | float) -> None:
        super().__init__(parameters_read, tau)
        self.ranking = Ranking()

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight, same shape and dtype."""
        refuse_shard(weight)
        if self.idle(weight):
            return weight
        if self.training:
            return soft_mask(weight, self._threshold(weight), self.temperature(weight))
        return torch.where(self.pruned(weight), torch.zeros_like(weight), weight)

    def pruned(self, *weights: Tensor) -> Tensor:
        magnitude = weights[0].detach().abs()
        if readable(weights[0]) and 0 < int(self.count) < magnitude.numel():
            largest_pruned, smallest_kept = self.ranking.around(weights[0], int(self.count))
            if largest_pruned < smallest_kept:
                return magnitude <= float(largest_pruned)
        return smallest(magnitude, self.count)

    def values(self, *weights: Tensor) -> Tensor:
        return soft_mask_value(weights[0], self._threshold(weights[0]), self.temperature(weights[0]))

    def _threshold(self, weight: Tensor) -> Threshold:
        if not readable(weight) or not 0 < int(self.count) < weight.numel():
            return threshold(weight, self.count)
        largest_pruned, smallest_kept = self.ranking.around(weight, int(self.count))
        return float(0.5 * largest_pruned + 0.5 * smallest_kept)


class NMMask(Mask):
    """N:M: of every ``of`` consecutive weights along the input channels, ``keep`` stay.

    ``count`` and ``target`` are millionths of a weight per group, so that a ramp can interpolate
    between whole weights.
    """

    def __init__(self, parameters_read: tuple[str, ...], tau: Softness | float, keep: int, of: int) -> None:
        super().__init__(parameters_read, tau)
        self.keep = keep
        self.of = of
        self.target.fill_((of - keep) * MILLION)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight, same shape and dtype."""
        refuse_shard(weight)
        if self.idle(weight):
            return weight
        if not self.training:
            return torch.where(self.pruned(weight), torch.zeros_like(weight), weight)
        return nm_soft_mask(weight, self.of, self.count, self.temperature(weight))

    @property
    def pruned_now(self) -> int:
        return int(self.count) // MILLION

    def pruned(self, *weights: Tensor) -> Tensor:
        whole = self.count.div(MILLION, rounding_mode="floor")
        return nm_pruned(weights[0].detach(), self.keep, self.of, whole)

    def values(self, *weights: Tensor) -> Tensor:
        t = nm_threshold(weights[0], self.of, self.count)
        groups, tau = group_view(weights[0], self.of), self.temperature(weights[0])
        return soft_mask_value(groups, t, tau).reshape(weights[0].shape)

    def extra_repr(self) -> str:
        return f"keep={self.keep}, of={self.of}, {super().extra_repr()}"


@dataclass(frozen=True)
class Producer:
    """A weight axis that makes the channels of a group.

    Attributes:
        axis: the axis of the weight.
        places: for every row along the axis its channel in the group, or -1 for a row outside it;
            None when row i makes channel i.
    """

    axis: int
    places: tuple[int, ...] | None


class ChannelMask(Mask):
    """Whole channels: one mask for a group, shared by everything that carries the group's channels.

    A channel's score is the root mean square of all weights that produce it, over all producers of
    the group, so that its scale is that of a weight and ``tau`` means the same everywhere.

    Attributes:
        producers: the weight axes that make the channels.
        width: number of channels.
        parts: channels that are cut apart from the others; the best of each part always stays.
    """

    def __init__(
        self,
        parameters_read: tuple[str, ...],
        tau: Softness | float,
        producers: tuple[Producer, ...],
        width: int,
        parts: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        super().__init__(parameters_read, tau)
        self.producers = producers
        self.width = width
        self.parts = parts
        for index, part in enumerate(parts):
            self.register_buffer(f"part_{index}", torch.tensor(part), persistent=False)
        for index, producer in enumerate(producers):
            places = torch.tensor(producer.places or (), dtype=torch.int64)
            self.register_buffer(f"places_{index}", places, persistent=False)

    def forward(self, *weights: Tensor) -> Tensor:
        """Return the mask, shape (width,)."""
        for weight in weights:
            refuse_shard(weight)
        scores = self.scores(*weights)
        if not self.training:
            return (~smallest(self.ranked(scores), self.count)).to(scores.dtype)
        t = threshold(self.ranked(scores), self.count)
        return torch.sigmoid((scores.square() - t * t.abs()) / self.temperature(scores))

    def scores(self, *weights: Tensor) -> Tensor:
        """Root mean square weight of every channel, shape (width,), float32 or float64."""
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
        for index in range(len(self.parts)):
            part = self.get_buffer(f"part_{index}")
            best = part.index_select(0, scores.index_select(0, part).argmax().reshape(1))
            scores = scores.index_copy(0, best, 2 * scores.amax().reshape(1))
        return scores

    def _gathered(self, rows: Tensor, places: Tensor) -> Tensor:
        """Sum rows into the channels of the group; rows outside it fall into a spare place."""
        sums = rows.new_zeros(self.width + 1)
        return sums.index_add(0, torch.where(places < 0, self.width, places), rows)[: self.width]

    def pruned(self, *weights: Tensor) -> Tensor:
        return smallest(self.ranked(self.scores(*weights)), self.count)

    def values(self, *weights: Tensor) -> Tensor:
        scores = self.scores(*weights).detach()
        return soft_mask_value(scores, threshold(self.ranked(scores), self.count), self.temperature(scores))

    def extra_repr(self) -> str:
        return f"width={self.width}, {super().extra_repr()}"


def _energy(weight: Tensor, axis: int) -> Tensor:
    """Sum of squares of every row along ``axis``."""
    others = [other for other in range(weight.ndim) if other != axis]
    dtype = compute_dtype(weight.dtype)
    return cast(Tensor, torch.linalg.vector_norm(weight, dim=others, dtype=dtype)).square()


class MaskLayout(nn.Module):
    """Lays the masks of several groups out along one parameter axis; other indices get 1.

    Args:
        index: for every index of the axis its place among the groups' channels, laid side by side,
            or -1.
    """

    index: Tensor

    def __init__(self, index: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def forward(self, *masks: Tensor) -> Tensor:
        """Return the mask along the axis, shape (size of the axis,)."""
        joined = torch.cat([*masks, masks[0].new_ones(1)])
        return joined.index_select(0, torch.where(self.index < 0, joined.numel() - 1, self.index))


class MaskOwnWeight:
    """A forward hook that gives a layer its own weight, masked; for layers inside modules kept whole."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add the masked weight to the layer's arguments."""
        return args, kwargs | {"weight": self.mask(module.get_parameter("weight"))}
