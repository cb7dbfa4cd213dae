"""Functions that several rivals share: kept sets, global thresholds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdp_fx import MaskSite, Unstructured, WeightPolicy
from pdp_fx.ops.select import smallest


def global_threshold(magnitudes: Sequence[Tensor], count: int) -> Tensor:
    """The ``count``-th smallest of all magnitudes, 0-dim; 0 when nothing is to be pruned."""
    if count <= 0:
        return magnitudes[0].new_zeros(())
    return torch.cat([m.detach().flatten() for m in magnitudes]).kthvalue(count).values


def global_smallest(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Mark exactly the ``count`` smallest of all scores; ties go to earlier layers and lower indices."""
    marked = smallest(torch.cat([score.detach().flatten() for score in scores]), count)
    parts = torch.split(marked, [score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


class OwnAllocation(WeightPolicy):
    """A method that ranks the layers of its rule against each other itself.

    Attributes:
        ratio: the share of all weights of the rule to prune in the end.
    """

    planned = False

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        if not isinstance(site.rule, Unstructured):
            raise TypeError(f"{type(self).__name__} prunes single weights, but the rule is {site.rule}")
        self.ratio = site.rule.ratio


class KeptSet(OwnAllocation):
    """A method with a set of weights that stay, which changes now and then.

    Attributes:
        keep: True for the weights that stay, a buffer.
    """

    keep: Tensor

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.register_buffer("keep", torch.ones_like(site.weight, dtype=torch.bool))

    def soft(self, weight: Tensor) -> Tensor:
        return weight * self.keep

    def pruned(self, *weights: Tensor) -> Tensor:
        return ~self.keep
