"""Converted models take inputs with another number of axes only if they are right on them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import Channels
from tests.nets import at_once

Act = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 6), act, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def converted(act: Act, shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
    """The prepared model and the converted one, in float64."""
    torch.manual_seed(0)
    model = Between(act).double()
    prepared = pdp_fx.prepare(model, at_once(Channels(ratio=0.5)), torch.randn(shape, dtype=torch.float64))
    pdp_fx.step(prepared)
    small = pdp_fx.convert(prepared)
    assert small.get_parameter("first.weight").shape[0] < 6
    return prepared.eval(), small


ALONG_ONE: tuple[tuple[str, Act, tuple[int, ...], tuple[int, ...]], ...] = (
    ("softmax over tokens", lambda h: h.softmax(1), (4, 5, 8), (5, 8)),
    ("mean of tokens", lambda h: h - h.mean(1, keepdim=True), (4, 5, 8), (5, 8)),
    ("mean of channels", lambda h: h - h.mean(1, keepdim=True), (4, 8), (4, 6, 8)),
    ("flipped channels", lambda h: h.flip(1), (4, 8), (4, 5, 8)),
    ("first token", lambda h: h + h[:, :1], (4, 5, 8), (5, 8)),
    ("cut off", lambda h: torch.cat([h, h], 1)[:, :6], (4, 8), (3, 6, 8)),
    ("halves", lambda h: h * functional.glu(h, 1).mean(1, keepdim=True), (4, 8), (4, 6, 8)),
)


@pytest.mark.parametrize(
    ("act", "example", "other"), [row[1:] for row in ALONG_ONE], ids=[r[0] for r in ALONG_ONE]
)
def test_another_number_of_axes_is_refused_where_the_outputs_would_differ(
    act: Act, example: tuple[int, ...], other: tuple[int, ...]
) -> None:
    prepared, small = converted(act, example)
    x = torch.randn(example, dtype=torch.float64)
    torch.testing.assert_close(small(x), prepared(x), rtol=1e-9, atol=1e-9)
    prepared(torch.randn(other, dtype=torch.float64))
    with pytest.raises(AssertionError, match=f"x has {len(example)} axes in the example inputs"):
        small(torch.randn(other, dtype=torch.float64))


@pytest.mark.parametrize("act", [torch.relu, functional.gelu])
def test_other_numbers_of_axes_are_taken_where_the_outputs_are_the_same(act: Act) -> None:
    prepared, small = converted(act, (4, 8))
    for shape in ((2, 4, 8), (2, 3, 4, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(small(x), prepared(x), rtol=1e-9, atol=1e-9)


def test_statistics_over_the_last_axis_are_masked_there_whatever_the_number_of_axes() -> None:
    def centre(h: Tensor) -> Tensor:
        mean, deviation = h.mean(-1, keepdim=True), h.std(dim=(-1,), keepdim=True)
        return (h - mean) / deviation

    prepared, small = converted(centre, (4, 8))
    # The other axis is as long as that of the channels.
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    apart = torch.stack([prepared(rows) for rows in x])
    torch.testing.assert_close(prepared(x), apart, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(small(x), apart, rtol=1e-9, atol=1e-9)
