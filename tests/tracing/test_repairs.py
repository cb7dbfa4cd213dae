"""Branches that replace numbers which are not finite: both ways are recorded, and `torch.where` chooses."""

import pytest
import torch
from torch import Tensor, nn

from tests.tracing.checks import exact, opaque, targets

FINITE = torch.linspace(-1, 1, 8).view(2, 4)
BROKEN = [FINITE.index_fill(1, torch.tensor(1), value) for value in (torch.inf, -torch.inf, torch.nan)]


class Layer(nn.Module):
    """Clamps what overflows while it trains, as layers of detection transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        if self.training and not torch.isfinite(y).all():
            most = torch.finfo(y.dtype).max - 1000
            y = torch.clamp(y, min=-most, max=most)
        return y + 1


class InBothModes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if x.dtype == torch.float32 and (torch.isnan(y).any() | y.isinf().any()):
            y = torch.nan_to_num(y, 0.5)
        return y * 2


class WithDropping(Layer):
    """A layer that repairs may be dropped, too: its branch is not always met."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        if self.training and drawn < 0.5:
            return x
        return super().forward(x) + x


class OtherwiseElse(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if torch.isfinite(y).all() else torch.zeros_like(y)


class ByPlace(Layer):
    """Writes in place, which no choice between two values undoes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not torch.isfinite(y).all():
            _ = y.zero_()
        return y


class Counts(Layer):
    """Counts what it repairs."""

    repaired = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not torch.isfinite(y).all():
            y = torch.nan_to_num(y)
            self.repaired += 1
        return y


class AsksMore(Layer):
    """Asks for large numbers, too: a branch by data."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if (y.isinf() | (y > 2)).any():
            y = y / 2
        return y


@pytest.mark.parametrize("layer", [Layer, InBothModes])
def test_the_graph_repairs_what_the_model_repairs(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(), layer(), nn.Linear(4, 3))
    gm = exact(model, FINITE, *BROKEN)
    assert not opaque(gm)
    assert targets(gm).count("where") == 2


@pytest.mark.parametrize("layer", [OtherwiseElse, ByPlace, Counts, AsksMore, WithDropping])
def test_what_does_more_than_to_repair_is_kept_whole(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    gm = exact(nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 3)), FINITE, *BROKEN)
    assert list(opaque(gm)) == ["1"]
