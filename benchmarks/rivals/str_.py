"""STR: soft threshold weight reparameterization (Kusupati et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdp_fx import MaskSite, WeightPolicy


class STR(WeightPolicy):
    """w' = sign(w) relu(|w| - sigmoid(s)) with one trained score s per layer, which decides how much goes.

    The score is decayed like a weight; how far it gets follows from where it starts, the learning rate and
    the weight decay, so a sparsity has to be searched for.

    Args:
        site: where it stands.
        start: the score at the start.
    """

    planned = False

    def __init__(self, site: MaskSite, start: float = -5.0) -> None:
        super().__init__(site)
        self.score = nn.Parameter(torch.tensor(start, dtype=site.weight.dtype))

    def soft(self, weight: Tensor) -> Tensor:
        return weight.sign() * (weight.abs() - self.score.sigmoid()).relu()

    def hard(self, weight: Tensor) -> Tensor:
        return self.soft(weight)

    def pruned(self, *weights: Tensor) -> Tensor:
        return weights[0].detach().abs() <= self.score.detach().sigmoid()
