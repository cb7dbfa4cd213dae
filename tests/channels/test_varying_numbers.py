"""Numbers that are inputs: one that is 0 in the example may be another at the next call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule
from tests.nets import state


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


class Enlarges(nn.Module):
    """Makes what it computes as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.interpolate(self.first(x).relu(), size=x.shape[-2:], mode="bilinear")
        return self.last(F.adaptive_avg_pool2d(hidden, (x.shape[-1] // 2, 2)))


def test_how_many_pixels_are_made_of_others_does_not_say_what_becomes_of_channels() -> None:
    torch.manual_seed(0)
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(start=0, epsilon=1.0))
    prepared = pdp_fx.prepare(Enlarges().double(), spec, torch.randn(2, 3, 9, 9, dtype=torch.float64))
    pdp_fx.step(prepared)
    channels = state(prepared).channels
    assert channels is not None
    assert not channels.by_sizes
    small = pdp_fx.convert(prepared)
    assert small.get_parameter("first.weight").shape[0] == 4
    for size in (9, 8, 14):
        x = torch.randn(1, 3, size, size, dtype=torch.float64)
        torch.testing.assert_close(small(x), prepared.eval()(x), rtol=1e-9, atol=1e-9)
