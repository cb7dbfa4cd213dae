"""PDP's masks, which are the default policies, and the modules that lay masks out along parameters.

A mask follows the mode of the model: in training mode it computes the soft mask of the paper (equation 1), in
eval mode the hard mask that `convert` will apply, which is exact in the number of pruned units. A mask has no
trainable parameter; its state is integers, so that casting the model to another dtype does not change it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pdp_fx.channel_policy import ChannelPolicy, set_table
from pdp_fx.ops import gpu
from pdp_fx.ops.nm import group_view, nm_threshold
from pdp_fx.ops.nm_mask import nm_soft_mask
from pdp_fx.ops.soft_mask import Temperature, Threshold, sigmoid, soft_mask, soft_mask_value
from pdp_fx.ops.squares import sum_of_squares
from pdp_fx.ops.straight import straight_through
from pdp_fx.ops.threshold import threshold
from pdp_fx.ops.together import Together
from pdp_fx.policy import MaskPolicy, MaskSite, NMPolicy, WeightPolicy
from pdp_fx.softness import SMALLEST_TAU, Softness


class Tempered(MaskPolicy):
    """The common base of PDP's masks: a mask with the softness tau.

    Attributes:
        tau: softness of the mask.
        units: as in `MaskPolicy`; if tau changes during the ramp, a third entry holds the bits of its present
            number, a float64.
    """

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.tau = site.tau if isinstance(site.tau, Softness) else Softness(site.tau)
        if self.tau.end is not None:
            bits = torch.tensor(self.tau.start, dtype=torch.float64).view(torch.int64)
            self.units = torch.cat((self.units, bits.reshape(1)))

    def advance(self, share: float) -> None:
        super().advance(share)
        if self.tau.end is not None:
            self._number().fill_(self.tau.at(share))

    def _number(self) -> Tensor:
        """The present number of a tau that changes: a 0-dim float64 view into `units`."""
        return self.units[2].view(torch.float64)

    def temperature(self, weight: Tensor) -> Temperature:
        """The present tau for these weights or channel scores, without a gradient and without waiting."""
        if self.tau.constant:
            return self.tau.start
        # A copy, so that a step before the backward pass leaves that pass the tau of its forward pass.
        number = self.tau.start if self.tau.end is None else self._number().clone()
        if not self.tau.relative:
            return number
        return (number * sum_of_squares(weight.detach()) / weight.numel()).clamp(min=SMALLEST_TAU)

    def values(self, *weights: Tensor) -> Tensor:
        return super().values(*weights) if self.tau.hard else self.soft_values(*weights)

    @abstractmethod
    def soft_values(self, *weights: Tensor) -> Tensor:
        """The soft mask of the paper, even if layers compute with hard masks."""

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"tau={self.tau}")))


class Thresholded(WeightPolicy):
    """A mask of single weights that is made from the layer's threshold t.

    Attributes:
        together: finds the thresholds on a GPU; all masks of a model share one.
    """

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.together = Together()

    def threshold(self, weight: Tensor, count: int | None) -> Threshold:
        """T for pruning `count` weights, halfway between the largest pruned and the smallest kept magnitude.

        Args:
            weight: the weights of the layer.
            count: what `known_count` says of them.

        Returns:
            A number where it can be read without waiting for a device, else a 0-dim tensor; -inf where
            nothing is pruned.
        """
        if gpu.usable(weight):
            return self.together.threshold(self, weight)
        if count is None or not 0 < count < weight.numel():
            return threshold(weight, self.count)
        largest_pruned, smallest_kept = self.ranking.around(weight, count)
        return float(0.5 * largest_pruned + 0.5 * smallest_kept)


class WeightMask(Tempered, Thresholded):
    """PDP for single weights (paper, section 3.1)."""

    def soft(self, weight: Tensor) -> Tensor:
        count = self.known_count(weight)
        if count == 0:
            return weight
        if self.tau.hard:
            return straight_through(weight, self.hard(weight))
        return soft_mask(weight, self.threshold(weight, count), self.temperature(weight))

    def soft_values(self, *weights: Tensor) -> Tensor:
        (weight,) = weights
        t = self.threshold(weight, self.known_count(weight))
        return soft_mask_value(weight, t, self.temperature(weight))


class NMMask(Tempered, NMPolicy):
    """PDP within groups of consecutive input channels (paper, section 3.4)."""

    def soft(self, weight: Tensor) -> Tensor:
        if self.idle(weight):
            return weight
        if self.tau.hard:
            return straight_through(weight, self.hard(weight))
        # A copy, so that a step before the backward pass leaves that pass the count of its forward pass.
        return nm_soft_mask(weight, self.of, self.count.clone(), self.temperature(weight))

    def soft_values(self, *weights: Tensor) -> Tensor:
        t = nm_threshold(weights[0], self.of, self.count)
        groups, tau = group_view(weights[0], self.of), self.temperature(weights[0])
        return soft_mask_value(groups, t, tau).reshape(weights[0].shape)


class ChannelMask(Tempered, ChannelPolicy):
    """PDP for whole channels: the soft mask of their scores, which are on the scale of weights."""

    def soft(self, *weights: Tensor) -> Tensor:
        scores = self.scores(*weights)
        if self.idle(scores):
            return torch.ones_like(scores, requires_grad=False)
        t, lifted = self._threshold(scores)
        mask = sigmoid((lifted.square() - t * t.abs()) / self.temperature(scores))
        return self.kept(scores) + (mask - mask.detach()) if self.tau.hard else mask

    def soft_values(self, *weights: Tensor) -> Tensor:
        scores = self.scores(*weights).detach()
        t, lifted = self._threshold(scores)
        return soft_mask_value(lifted, t, self.temperature(scores))

    def _threshold(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The threshold, 0-dim, and the scores to compare with it, shape (width,).

        The best channel of each part stays even if its score is below the threshold. Its score is replaced by
        the one that the hard mask ranks it by; otherwise its soft mask would be near 0 in training, although
        its hard mask is 1.
        """
        ranked = self.ranked(scores)
        t = threshold(ranked, self.count)
        return t, torch.where((scores < t) & (ranked > t), ranked, scores) if self.parts else scores


class MaskLayout(nn.Module):
    """Lays the masks of one or more groups out along one parameter axis; indices outside the groups get 1.

    Args:
        index: for every index of the axis its place in the concatenation of the groups' masks, or -1 if it
            belongs to none of them.
    """

    index: Tensor

    def __init__(self, index: tuple[int, ...]) -> None:
        super().__init__()
        self.places = index
        self.set_tables()

    def set_tables(self) -> None:
        """Fill the index table, a buffer that checkpoints do not contain."""
        set_table(self, "index", self.places)

    def forward(self, *masks: Tensor) -> Tensor:
        """Return the mask along the axis, shape (size of the axis,)."""
        joined = torch.cat([*masks, masks[0].new_ones(1)])
        return joined.index_select(0, torch.where(self.index < 0, joined.numel() - 1, self.index))


class MaskOwnWeight:
    """A forward pre-hook that passes a layer its own weight, masked; for layers inside modules kept whole."""

    def __init__(self, mask: MaskPolicy, name: str) -> None:
        self.mask = mask
        self.name = name

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the layer's arguments with the masked weight added."""
        return args, kwargs | {self.name: self.mask(module.get_parameter(self.name))}
