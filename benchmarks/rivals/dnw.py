"""DNW: discovering neural wirings (Wortsman et al., 2019)."""

from __future__ import annotations

from torch import Tensor

from pdp_fx import WeightPolicy
from pdp_fx.ops.straight import straight_through


class DNW(WeightPolicy):
    """The smallest weights of the layer are 0, at the full ratio from the start; all get the gradient.

    For the first training step to be sparse, the schedule must have begun: ``Schedule(0, 1.0)`` and one
    `pdp_fx.step` before the training.
    """

    def soft(self, weight: Tensor) -> Tensor:
        return straight_through(weight, self.hard(weight))

    def advance(self, share: float) -> None:
        super().advance(1.0)
