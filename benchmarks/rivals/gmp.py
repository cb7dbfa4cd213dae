"""GMP: gradual magnitude pruning (Zhu and Gupta, 2017), as the STR paper's code base trains it."""

from __future__ import annotations

from torch import Tensor

from pdp_fx import WeightPolicy


class GMP(WeightPolicy):
    """The smallest weights of the layer are 0 and get no gradient of the loss, but keep their values.

    The original has a cubic ramp by epochs and the same ratio in every layer:
    ``PruneSpec(..., schedule=Schedule(..., shape="cubic"), allocation="uniform")``.
    """

    def soft(self, weight: Tensor) -> Tensor:
        return self.hard(weight)
