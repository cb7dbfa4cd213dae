"""A mask that never changes: the floor of what any masking costs, and a random or magnitude baseline."""

from __future__ import annotations

from torch import Tensor

from benchmarks.rivals.common import KeptSet
from pdp_fx import MaskSite
from pdp_fx.ops.select import smallest


class Fixed(KeptSet):
    """The smallest weights as they were when the model was prepared, at the full ratio."""

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        magnitude: Tensor = site.weight.detach().abs()
        self.keep.copy_(~smallest(magnitude, round(self.ratio * magnitude.numel())))
