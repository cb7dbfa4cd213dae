"""Numbers of channels among others: converted models are exact at other sizes, or channels stay."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, SpecError
from tests.channels.checks import halved

Act = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act, self.stem, self.head = act, nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.stem(x))).mean((2, 3))


KERNEL = torch.randn(8, 8, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

EXACT: dict[str, Act] = {
    "step": lambda h: h[..., :: h.shape[1] // 4],
    "start behind": lambda h: h[..., h.shape[3] - h.shape[1] // 4 :],
    "start and half": lambda h: h[..., h.shape[1] // 8 : h.shape[3] // 2 + 1],
    "of the batch": lambda h: h[: h.shape[1]],
    "sum of sizes": lambda h: h * h.new_ones(h.shape[0] + h.shape[1] // 4).sum(),
    "least": lambda h: h * h.new_ones(min(h.shape[3], h.shape[1] // 2)).sum(),
    "rest": lambda h: h * h.new_ones(h.shape[3] % h.shape[1] + 1).sum(),
    "pixels of all elements": lambda h: (
        h.mean((2, 3), keepdim=True).expand(-1, -1, h.numel() // h.shape[0] // h.shape[1], 1).cumsum(2)
    ),
    "view by all elements": lambda h: (
        h.view(*h.shape[:2], h.numel() // h.shape[0] // h.shape[1]).cumsum(2).view(h.shape)
    ),
    "part of a merged axis": lambda h: h * h.new_ones(h.flatten(1).shape[1] // 8).sum(),
    "copies for a batch": lambda h: (
        h * h.new_ones(1, 1, 1, 1).repeat(h.flatten(0, 1).shape[0] // 8, 1, 1, 1).cumsum(0)
    ),
    "filled": lambda h: h * torch.full((1, h.shape[1], 1, 1), h.shape[1], dtype=h.dtype),
    "value of padding": lambda h: F.pad(h, (1, 1, 1, 1), value=h.shape[1]),
    "padding of a convolution": lambda h: F.conv2d(h, KERNEL, padding=h.shape[1] // 4),
    "unfolded": lambda h: h.unfold(3, h.shape[1] // 4, 1).sum(-1),
    "divided": lambda h: h / (h.shape[1] * h.shape[2]),
    "root": lambda h: h * torch.tensor(h.shape[1] * h.shape[2], dtype=h.dtype).sqrt(),
}


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("act", EXACT.values(), ids=EXACT)
def test_numbers_of_channels_are_those_from_before_at_all_sizes(act: Act, batch: int) -> None:
    torch.manual_seed(0)
    prepared = halved(Between(act), (torch.randn(batch, 3, 6, 6, dtype=torch.float64),))
    small = pdp_fx.convert(prepared)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in prepared.parameters())
    for shape in ((2, 3, 6, 6), (5, 3, 6, 6), (2, 3, 8, 8), (3, 3, 12, 20), (1, 3, 4, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-9)


VARYING: dict[str, Act] = {
    "by the batch": lambda h: h * h[:, : h.flatten(0, 1).shape[0] // 4].sum(1, keepdim=True),
    "by the pixels": lambda h: h * h[:, : h.flatten(1).shape[1] // 72].sum(1, keepdim=True),
    "rolled": lambda h: h * h.roll(h.flatten(0, 1).shape[0] // 8, 1)[:, :4].sum(1, keepdim=True),
    "narrowed": lambda h: h * h.narrow(1, 0, h.flatten(0, 1).shape[0] // 8).sum(1, keepdim=True),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("act", VARYING.values(), ids=VARYING)
def test_channels_stay_that_a_merged_axis_chooses(act: Act, batch: int) -> None:
    with pytest.raises(SpecError, match="is told sizes or positions of these channels"):
        halved(Between(act), (torch.randn(batch, 3, 6, 6, dtype=torch.float64),))


class MixedBySizes(nn.Module):
    """As many channels as pixels in a column; at sizes that share no factor the view mixes all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 8, 1), nn.Conv2d(2, 8, 1)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        b, c, _, w = h.shape
        y = torch.cat([h, h.tanh()], 1).reshape(b, -1, c, w)[:, :, :-3]
        return (y + 0.3 * y.square()).sum((1, 2, 3)) + self.out(self.head(x).relu().mean((2, 3))).sum(1)


def test_channels_stay_that_a_view_mixes_at_other_sizes() -> None:
    prepared = halved(MixedBySizes(), (torch.randn(2, 2, 8, 8, dtype=torch.float64),))
    small = pdp_fx.convert(prepared)
    for shape in ((3, 2, 8, 8), (2, 2, 5, 7), (3, 2, 10, 10), (2, 2, 7, 7)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-9)


def into_a_part(v: Tensor) -> Tensor:
    """Write as many channels as there are tokens."""
    result = torch.zeros_like(v)
    result[..., : v.shape[1]] = v[..., : v.shape[1]]
    return result


def all_of_a_merged_axis(v: Tensor) -> Tensor:
    """Cut tokens and channels off at their number."""
    merged = v.flatten(1)
    return merged[:, : merged.shape[1]].view(v.shape)


WHOLE_ON_THE_EXAMPLE: dict[str, Act] = {
    "unpacked": lambda v: v.flatten(1)[:, : v.shape[1] * v.shape[2]].view(v.shape[0], -1, v.shape[2]),
    "from behind": lambda v: v.flatten(1)[:, -v.shape[1] * v.shape[2] :].view(v.shape[0], -1, v.shape[2]),
    "merged": all_of_a_merged_axis,
    "slice": lambda v: v[..., : v.shape[1]].sum(-1, keepdim=True) + v,
    "written": into_a_part,
    "rolled": lambda v: v.roll(v.shape[1] - 6, -1),
    "padded": lambda v: F.pad(v, (v.shape[1] - 6, 6 - v.shape[1])),
    "split": lambda v: v.split(v.shape[1], -1)[0].sum(-1, keepdim=True) + v,
    "chunk": lambda v: v.chunk(v.shape[1] - 5, -1)[0].sum(-1, keepdim=True) + v,
    "narrow": lambda v: v.narrow(-1, 0, 12 - v.shape[1]).sum(-1, keepdim=True) + v,
    "flat": lambda v: v.reshape(-1)[: v.numel()].view(v.shape),
}
"""Choices of all channels for six tokens, and of others for other numbers of them."""


class Tokens(nn.Module):
    """Something between two layers, beside others that can go."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act, self.stem, self.head = act, nn.Linear(4, 6), nn.Linear(6, 4)
        self.other, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.act(self.stem(x).relu()))
        return y.mean(1) + self.out(self.other(x).relu()).mean(1)


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("act", WHOLE_ON_THE_EXAMPLE.values(), ids=WHOLE_ON_THE_EXAMPLE)
def test_channels_stay_of_which_other_sizes_choose_others(act: Act, batch: int) -> None:
    torch.manual_seed(0)
    prepared = halved(Tokens(act), (torch.randn(batch, 6, 4, dtype=torch.float64),))
    small = pdp_fx.convert(prepared)
    assert small.get_submodule("stem").out_features == 6
    assert small.get_submodule("other").out_features == 4
    for shape in ((2, 6, 4), (3, 7, 4), (5, 6, 4), (2, 8, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-9)


class OfOnePixel(nn.Module):
    """Tokens of the pixels become channels as they lie; of the example a single pixel is left (MAnet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.value, self.head = nn.Conv2d(3, 8, 32, 32), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(self.stem(x).relu())
        return self.head(value.flatten(2).transpose(1, 2).reshape(value.shape))


def test_channels_stay_that_more_than_one_pixel_mixes() -> None:
    prepared = halved(OfOnePixel(), (torch.randn(2, 3, 32, 32, dtype=torch.float64),))
    small = pdp_fx.convert(prepared)
    assert small.get_submodule("stem").out_channels == 4
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-9)


class Branches(nn.Module):
    """Adds two functions of a flattened picture, many times over, and divides by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).flatten(1)
        for _ in range(40):
            x = x.relu() + x.tanh()
        return self.outer((x / x.shape[1]).view(-1, 4, 6, 6))


def test_each_node_is_asked_once_whether_its_size_is_fixed() -> None:
    """Asked anew for each operand, 40 blocks would take 2 ** 40 answers."""
    spec = PruneSpec(Channels(0.5), schedule=Schedule(start=0, epsilon=1.0))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    masked = pdp_fx.prepare(Branches().double(), spec, (x,))
    pdp_fx.step(masked)
    torch.testing.assert_close(pdp_fx.convert(masked)(x), masked.eval()(x), rtol=0, atol=1e-12)
