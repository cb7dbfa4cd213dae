"""Arguments that torch does not pass to function modes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.tracing.checks import exact, opaque

L1: Any = functional.l1_loss


class Weighted(nn.Module):
    """Two layers and the weighted distance of what they give."""

    def __init__(self, kept_whole: bool) -> None:
        super().__init__()
        self.first, self.second, self.kept_whole = nn.Linear(4, 4), nn.Linear(4, 4), kept_whole
        self.distance = Distance()

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x, y = self.first(x), self.second(x)
        if self.kept_whole:
            return self.distance(x, y, weight), x
        each = L1(x, y, None, None, "none", weight)
        return L1(x, y, reduction="sum", weight=weight), each, functional.l1_loss(x, y)


class Distance(nn.Module):
    """A distance that is another for other data, so that no graph shows it."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        far = L1(x, y, weight=weight)
        return far * 2 if float(far) > 0.3 and bool(weight[0, 0] > 0.3) else far


@pytest.mark.parametrize("kept_whole", [False, True])
def test_the_weight_of_a_loss_is_followed_where_the_examples_are_ones(kept_whole: bool) -> None:
    x, ones = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    others: list[Any] = [(x, ones * 0.2), (x + 1, x.abs())]
    gm = exact(Weighted(kept_whole), (x, ones), *others)
    assert bool(opaque(gm)) == kept_whole
