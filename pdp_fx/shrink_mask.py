"""A mask that is exactly 0 for what is pruned and rises from there without a jump: for high sparsities.

PDP's mask m = sigmoid((w^2 - t^2) / tau) (paper, equation 1) is 1/2 at the threshold t. Stretched to be 0
there, and with tau = c t^2 so that it means the same at every scale, it becomes

    m = max(0, 2 sigmoid((w^2 - t^2) / (c t^2)) - 1) = max(0, tanh((w^2 / t^2 - 1) / 2 c))

A weight that crosses the threshold starts from 0, so the net does not feel masks that change, and pruned
weights are 0 while the net trains, so it does not get used to what `convert` removes. What remains above the
threshold is a little smaller than the weight itself; it is what eval mode and the converted model use, too.
The gradient goes straight through to all weights (Bengio et al., 2013, arXiv:1308.3432), half of it to those
that are pruned, as in Feather (Glentis Georgoulakis et al., 2023) above 95 %.
"""

import torch
from torch import Tensor

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import finite_number
from pdp_fx.masks import Thresholded
from pdp_fx.ops.soft_mask import Threshold
from pdp_fx.ops.straight import straight_through
from pdp_fx.ops.threshold import compute_dtype
from pdp_fx.policy import MaskSite

SOFTNESS = 1.0
"""c, chosen on held out images of CIFAR-10 at a sparsity of 98 %."""

PRUNED_GRADIENT = 0.5
LEAST = 1e-3
"""The mask of a weight that is kept is at least this, so that ties with the threshold do not become zeros."""


class ShrinkMask(Thresholded):
    """A policy for `Unstructured`: kept weights shrink towards the threshold, pruned ones are 0.

    It ignores ``tau`` and ``forward`` of the spec. Use it with ``allocation="dynamic"`` and a ramp per step
    that ends at half of the training.

    Args:
        site: what the mask is made for.
        softness: c, above 0: at |w| = t sqrt(1 + c) the mask is 0.46.

    Raises:
        SpecError: ``softness`` is no finite number above 0.

    Example:
        >>> from pdp_fx import PruneSpec, Unstructured
        >>> spec = PruneSpec(Unstructured(0.98, policy=ShrinkMask), allocation="dynamic")
    """

    def __init__(self, site: MaskSite, softness: float = SOFTNESS) -> None:
        super().__init__(site)
        self.softness = finite_number("ShrinkMask: softness", softness)
        if self.softness <= 0:
            raise SpecError(f"ShrinkMask: softness must be above 0, got {softness:g}")

    def soft(self, weight: Tensor) -> Tensor:
        if self.idle(weight):
            return weight
        pruned = self.pruned(weight)
        factor = torch.where(pruned, PRUNED_GRADIENT, 1.0).to(weight.dtype)
        return straight_through(weight, self._shrunk(weight.detach(), pruned), factor)

    def hard(self, weight: Tensor) -> Tensor:
        return weight if self.idle(weight) else self._shrunk(weight, self.pruned(weight))

    def values(self, *weights: Tensor) -> Tensor:
        (weight,) = weights
        return self._mask(weight.detach(), self.pruned(weight))

    def _shrunk(self, weight: Tensor, pruned: Tensor) -> Tensor:
        return (weight * self._mask(weight.detach(), pruned)).to(weight.dtype)

    def _mask(self, weight: Tensor, pruned: Tensor) -> Tensor:
        """m, in the shape of the weight and in `compute_dtype`; 1 everywhere while nothing is pruned."""
        t = self.threshold(weight, self.known_count(weight))
        wide = weight.to(compute_dtype(weight.dtype))
        rising = torch.tanh((_squared_share(wide, t) - 1) / (2 * self.softness)).clamp(min=LEAST)
        return torch.where(pruned, 0.0, rising)

    def extra_repr(self) -> str:
        return f"softness={self.softness:g}"


def _squared_share(wide: Tensor, threshold: Threshold) -> Tensor:
    """w^2 / t^2, infinite where t is not above 0, so that the mask is 1 there."""
    t = threshold.to(wide.dtype) if isinstance(threshold, Tensor) else wide.new_full((), threshold)
    return torch.where(t > 0, (wide / t).square(), torch.inf)
