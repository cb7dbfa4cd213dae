"""Movement pruning with a hard mask (Sanh, Wolf and Rush, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.rivals.optg import score_through_mask
from pdp_fx import MaskSite, WeightPolicy
from pdp_fx.ops.select import smallest


class Movement(WeightPolicy):
    """A score per weight; the layer's lowest scores are masked, and the gradient of the mask trains them.

    The original has a cubic ramp, the same ratio in every layer, and Adam at 1e-2 for the scores.
    """

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.score = nn.Parameter(torch.zeros_like(site.weight))

    def soft(self, weight: Tensor) -> Tensor:
        return score_through_mask(weight, self.score, ~self.pruned(weight))

    def pruned(self, *weights: Tensor) -> Tensor:
        """The `count` lowest scores; ties are pruned from the front."""
        return smallest(self.score.detach(), self.count)
