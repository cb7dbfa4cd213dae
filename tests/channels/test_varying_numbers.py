"""Numbers that are inputs: one that is 0 in the example may be another at the next call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule


def pads(x: Tensor, number: float) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), value=number)


def pads_by_the_constant(x: Tensor, number: float) -> Tensor:
    return torch.constant_pad_nd(x, (0, 2), number)


def fills_rows(x: Tensor, number: float) -> Tensor:
    return x.index_fill(2, torch.tensor([0, 3]), number)


def scatters(x: Tensor, number: float) -> Tensor:
    return x.scatter(2, torch.zeros(x.shape, dtype=torch.long), number)


def fills_a_view(x: Tensor, number: float) -> Tensor:
    x = x.clone()
    x[:, :, 0].fill_(number)
    return x


def fills_where(x: Tensor, number: float) -> Tensor:
    return x.masked_fill(x > 1, number)


def fills_another(x: Tensor, number: float) -> Tensor:
    return x + torch.full_like(x, number)


class Fills(nn.Module):
    """Writes a number into channels between two convolutions."""

    def __init__(self, fill: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.fill = fill

    def forward(self, x: Tensor, number: float) -> Tensor:
        return self.outer(self.fill(self.inner(x).relu(), number))


@pytest.mark.parametrize(
    "fill",
    [pads, pads_by_the_constant, fills_rows, scatters, fills_a_view, fills_where, fills_another],
)
def test_a_number_that_is_0_in_the_example_may_be_another(fill: Callable[[Tensor, float], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 10, dtype=torch.float64)
    spec = PruneSpec(Channels(0.5), schedule=Schedule(start=0, epsilon=1.0))
    masked = pdp_fx.prepare(Fills(fill).double(), spec, (x, 0.0))
    pdp_fx.step(masked)
    converted = pdp_fx.convert(masked)
    for number in (0.0, 1.0, -2.5):
        torch.testing.assert_close(converted(x, number), masked.eval()(x, number), rtol=0, atol=1e-12)
