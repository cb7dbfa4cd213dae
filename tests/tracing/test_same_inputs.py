"""Models that go by whether two of their inputs are one tensor."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, TraceError
from pdp_fx.tracing.given import TAKE_ONCE
from tests.tracing.checks import exact

ASKS: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "is": lambda one, other: one is other,
    "id": lambda one, other: id(one) == id(other),
    "memory": lambda one, other: one.data_ptr() == other.data_ptr(),
    "keys": lambda one, other: len({one: 1, other: 2}) == 1,
}


class Nearest(nn.Module):
    """The distance to the nearest point of a set; in a set itself, to the nearest other."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks
        self.wide, self.narrow, self.head = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(1, 3)

    def forward(self, inputs: Any, others: Any = None) -> Tensor:
        points, others = inputs if others is None else (inputs, others)
        distances = torch.cdist(self.embedded(points), self.embedded(others))
        if ASKS[self.asks](points, others):
            distances = distances + torch.eye(len(points)) * 1e9
        result: Tensor = self.head(distances.amin(1, keepdim=True))
        return result

    def embedded(self, points: Tensor) -> Tensor:
        return cast(Tensor, self.narrow(self.wide(points).relu()))


class OfOne(nn.Module):
    """Calls a model with one set twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, points: Tensor) -> Tensor:
        result: Tensor = self.inner(points, points)
        return result


class Attention(nn.Module):
    """torch's attention asks whether its inputs are one tensor, and computes the same either way."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        result: Tensor = self.attention(query, key, key, need_weights=False)[0]
        return result


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("asks", ASKS)
def test_a_graph_of_different_tensors_refuses_one(asks: str, nested: bool) -> None:
    model, (one, other) = Nearest(asks).eval(), points()
    example = ([one, other],) if nested else (one, other)
    gm = exact(model, example)
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), example)
    pdp_fx.step(prepared)
    for graph in (gm, prepared, pdp_fx.convert(prepared)):
        with pytest.raises(AssertionError, match="different tensors.*takes it once"):
            graph([one, one] if nested else one, *(() if nested else (one,)))
    if not nested:
        torch.testing.assert_close(torch.compile(gm, fullgraph=True)(*example), model(*example))


@pytest.mark.parametrize("asks", ASKS)
def test_an_example_of_one_tensor_is_refused_and_the_way_out_works(asks: str) -> None:
    model, (one, other) = Nearest(asks), points()
    for example in ((one, one), ([one, one],)):
        with pytest.raises(TraceError, match=TAKE_ONCE):
            pdp_fx.prepare(model, PruneSpec(Channels(0.5)), example)
    exact(OfOne(model), one, other)


def test_where_it_does_not_matter_one_tensor_is_taken() -> None:
    one, other = (rows[None] for rows in points())
    model = Attention().eval()
    for example in ((one, other), (one, one)):
        gm = exact(model, example)
        for given in ((one, other), (one, one)):
            torch.testing.assert_close(gm(*given), model(*given))
