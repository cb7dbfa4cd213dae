"""Sizes and positions that the code writes out, on inputs of other sizes than the example's."""

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule
from tests.channels.checks import EXACT, difference

View = Callable[[Tensor], Tensor]


class Viewed(nn.Module):
    """A layer whose 8 channels are prunable, a view of what it gives, and a sum over the view's last axis."""

    def __init__(self, layer: nn.Module, view: View) -> None:
        super().__init__()
        self.layer, self.view = layer, view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.layer(x)).sum(-1)


class WithAnother(nn.Module):
    """Such a net, and another layer beside it whose channels can go."""

    def __init__(self, layer: nn.Module, view: View) -> None:
        super().__init__()
        self.layer, self.view = layer, view
        self.side, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.side(x).relu()).mean((2, 3)) + self.view(self.layer(x)).square().sum()


class Acts(nn.Module):
    """A function as a module."""

    def __init__(self, act: View) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def converted(net: nn.Module, example: Tensor) -> tuple[nn.Module, nn.Module]:
    """The prepared model in eval mode and what convert makes of it, half of the channels gone."""
    prepared = pdp_fx.prepare(net.double(), PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), example)
    pdp_fx.step(prepared)
    made = pdp_fx.convert(prepared.eval())
    assert sum(p.numel() for p in made.parameters()) < sum(p.numel() for p in net.parameters())
    return prepared, made


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64)


MIXING: dict[str, View] = {
    "channels": lambda h: h.view(h.shape[0], -1, 36).sum(1),
    "batch": lambda h: h.reshape(-1, 8, 36).sum(1),
    "batch, before channels and pixels": lambda h: torch.reshape(h, (-1, 8 * 36)),
    "batch and channels": lambda h: h.view(-1, 36).view(h.shape[0], -1),
    "channels, from channels and pixels": lambda h: h.flatten(1).view(h.shape[0], -1, 36).sum(1),
    "channels, unflattened": lambda h: h.flatten(1).unflatten(1, (-1, 36)).sum(1),
}
"""Views that rely on 36 pixels, by what is left to -1."""

FOLLOWING: dict[str, View] = {
    "pixels": lambda h: h.view(h.shape[0], 8, -1).sum(1),
    "batch": lambda h: h.reshape(-1, 8, h.shape[2] * h.shape[3]).sum(1),
    "batch and heads": lambda h: h.reshape(-1, 4, *h.shape[2:]).square().view(h.shape[0], -1),
    "channels of a head": lambda h: h.view(h.shape[0], 2, -1, *h.shape[2:]).sum((1, 2)),
    "all before channels": lambda h: h.permute(0, 2, 3, 1).reshape(-1, 36, 8).sum(2).view(-1, 36),
}
"""Views that rely on no number of pixels, or in which the channels come last."""


@pytest.mark.parametrize("name", MIXING)
def test_channels_are_refused_where_the_view_would_mix_them_with_pixels(name: str) -> None:
    torch.manual_seed(0)
    prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), MIXING[name]), images(2, 6))
    assert difference(prepared, made, (images(3, 6),)) <= EXACT
    with pytest.raises(RuntimeError, match="invalid for input of size|don't multiply up"):
        made(images(3, 12))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FOLLOWING)
def test_views_follow_other_sizes(name: str, batch: int) -> None:
    torch.manual_seed(0)
    prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), FOLLOWING[name]), images(batch, 6))
    for inputs in (images(3, 6), images(1, 12), images(2, 12)):
        assert difference(prepared, made, (inputs,)) <= EXACT


PICKING: dict[str, View] = {
    "slice": lambda h: h.flatten(1)[:, :144],
    "slice from the end": lambda h: h.flatten(1)[:, -144:],
    "narrow": lambda h: h.flatten(1).narrow(1, 0, 144),
}
"""Positions along an axis of channels and pixels."""


@pytest.mark.parametrize("name", PICKING)
def test_channels_are_refused_where_positions_would_be_those_of_others(name: str) -> None:
    torch.manual_seed(0)
    prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), PICKING[name]), images(2, 6))
    assert difference(prepared, made, (images(3, 6),)) <= EXACT
    with pytest.raises(AssertionError, match="those of channels only where it has as many entries"):
        made(images(3, 12))


def test_slices_count_from_the_end_that_the_code_counts_from() -> None:
    torch.manual_seed(0)
    net = Viewed(nn.Conv2d(3, 8, 1), lambda h: h.flatten(0, 1)[4:].sum((0, 1)) + h[:, -6:-1].sum((0, 1, 2)))
    prepared, made = converted(net, images(2, 6))
    assert difference(prepared, made, (images(3, 6),)) <= EXACT
    assert difference(prepared, made, (images(1, 12),)) <= EXACT


CHOOSING: dict[str, tuple[View, Tensor, Tensor]] = {
    "slice of two": (
        lambda h: torch.cat([h.flatten(1), h.flatten(1)], 1)[:, 288:], images(2, 6), images(3, 12),
    ),
    "slice, one pixel": (lambda h: h.flatten(1)[:, :4].square(), images(2, 1), images(3, 2)),
    "end, one pixel": (lambda h: h.flatten(1)[:, -4:].square(), images(2, 1), images(3, 2)),
    "narrow, one pixel": (lambda h: h.flatten(1).narrow(1, 0, 4).square(), images(2, 1), images(3, 2)),
    "indices, one pixel": (lambda h: h.flatten(1)[:, [0, 3, 5]].square(), images(2, 1), images(3, 2)),
    "padding, one pixel": (
        lambda h: functional.pad(h.flatten(1), (1, 1))[:, :5].square(), images(2, 1), images(3, 2),
    ),
    "steps, one image": (lambda h: h.flatten(0, 1)[::2].square().sum((0, 1)), images(1, 6), images(3, 6)),
    "parts, one image": (
        lambda h: torch.cat(h.unbind(0))[:4].square().sum((0, 1)), images(1, 6), images(3, 6),
    ),
    "images, channels and rows": (lambda h: h.flatten(0, 2)[:4], images(8, 2), images(4, 4)),
    "rows of a mean": (
        lambda h: h.mean(3).flatten(1)[:, :4].square(), images(2, 4)[:, :, :1], images(2, 4),
    ),
    "channels to parts": (
        lambda h: h.permute(0, 2, 3, 1).flatten(1).unflatten(-1, (8, -1)).mean(-1), images(1, 2),
        images(2, 4)[:, :, :3],
    ),
    "rows of eight": (lambda h: h.reshape(8, -1).mean(-1), images(1, 2), images(3, 2)),
    "halves of an even number of pixels": (
        lambda h: functional.avg_pool2d(h, 2).permute(0, 2, 3, 1).reshape(len(h), 2, -1).mean(1),
        images(2, 16)[:, :, :, :4], images(2, 6),
    ),
    "groups by height": (
        lambda h: functional.group_norm(h, max(1, h.shape[2] // 8)).relu(), images(2, 8), images(2, 16),
    ),
    "shuffle by height": (
        lambda h: torch.channel_shuffle(h, max(1, h.shape[2] // 8)).square(), images(2, 8), images(2, 16),
    ),
    "diagonal by width": (
        lambda h: h.transpose(1, 2).diagonal(h.shape[3] // 12, 1, 2), images(2, 8), images(2, 12),
    ),
}  # fmt: skip
"""Channels that belong together, or are chosen, by sizes or positions that do not show it on the example."""


@pytest.mark.parametrize("name", CHOOSING)
def test_what_one_pixel_or_one_image_hides_is_seen_elsewhere(name: str) -> None:
    view, example, other = CHOOSING[name]
    torch.manual_seed(0)
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0), allocation="uniform")
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    model = WithAnother(net, view).double()
    prepared = pdp_fx.prepare(model, spec, example)
    pdp_fx.step(prepared)
    made = pdp_fx.convert(prepared.eval())
    assert made.get_parameter("side.weight").shape[0] == 3
    for inputs in (example, other):
        with contextlib.suppress(AssertionError, RuntimeError):
            got = made(inputs)
            continue
        assert inputs is other, "only other sizes may be refused"
        got = None
    assert got is None or torch.allclose(got, prepared(other), rtol=1e-9, atol=1e-9)


ZERO_HERE: dict[str, View] = {
    "sum": lambda h: h + math.log(h.shape[2]),
    "sum in place": lambda h: h.clone().add_(h.shape[2] - 1),
    "factor of a sum": lambda h: torch.add(h, torch.ones_like(h), alpha=h.shape[2] - 1),
    "between": lambda h: torch.lerp(h, torch.ones_like(h), (h.shape[2] - 1) / 8),
    "clamp": lambda h: h.clamp(min=(h.shape[2] - 1) / 4),
    "power": lambda h: h.square() ** (2 - h.shape[2] // 2),
    "padding": lambda h: functional.pad(h, (1, 1), value=h.shape[2] - 1.0),
    "mask": lambda h: h.masked_fill(h > 0.4, h.shape[2] - 1.0),
    "constant": lambda h: h + torch.full_like(h, h.shape[2] - 1.0),
    "index": lambda h: h.index_fill(2, torch.tensor([0]), h.shape[2] - 1.0),
    "threshold": lambda h: functional.threshold(h, 0.1, (h.shape[2] - 1) / 2),
    "comparison": lambda h: (h > h.shape[2] - 2).double(),
}
"""Functions of channels that keep 0 on images of one row, and on no others."""


@pytest.mark.parametrize("name", ZERO_HERE)
def test_a_number_that_follows_sizes_may_make_something_of_zero_elsewhere(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), Acts(ZERO_HERE[name]), nn.Conv2d(8, 4, 1)
    )
    prepared, made = converted(net, images(2, 4)[:, :, :1])
    for inputs in (images(2, 4)[:, :, :1], images(2, 4), images(3, 5)[:, :, :2]):
        assert difference(prepared, made, (inputs,)) <= EXACT


def test_channels_made_up_to_a_multiple_need_not_be_more() -> None:
    torch.manual_seed(0)

    def made_up(h: Tensor) -> Tensor:
        zeros = h.new_zeros(h.shape[0], -h.shape[1] % 8, *h.shape[2:])
        return torch.cat([h, zeros], 1).relu().sum(1)

    prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), made_up), images(2, 6))
    for inputs in (images(2, 6), images(3, 5)):
        assert difference(prepared, made, (inputs,)) <= EXACT


def test_what_an_example_with_a_batch_of_one_leaves_open_follows_the_batch() -> None:
    torch.manual_seed(0)
    for view in MIXING.values():
        prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), view), images(1, 6))
        assert difference(prepared, made, (images(3, 6),)) <= EXACT
