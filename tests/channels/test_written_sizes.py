"""Sizes and positions that the code writes out, on inputs of other sizes than the example's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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
    "slice of two": lambda h: torch.cat([h.flatten(1), h.flatten(1)], 1)[:, 288:],
}
"""Positions along an axis of channels and pixels."""


@pytest.mark.parametrize("name", PICKING)
def test_channels_are_refused_where_positions_would_be_those_of_others(name: str) -> None:
    torch.manual_seed(0)
    prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), PICKING[name]), images(2, 6))
    assert difference(prepared, made, (images(3, 6),)) <= EXACT
    with pytest.raises(AssertionError, match="those of channels only where it has as many entries"):
        made(images(3, 12))


@pytest.mark.parametrize("batch", [1, 2])
def test_slices_count_from_the_end_that_the_code_counts_from(batch: int) -> None:
    torch.manual_seed(0)
    net = Viewed(nn.Conv2d(3, 8, 1), lambda h: h.flatten(0, 1)[4:].sum((0, 1)) + h[:, -6:-1].sum((0, 1, 2)))
    prepared, made = converted(net, images(batch, 6))
    assert difference(prepared, made, (images(3, 6),)) <= EXACT
    assert difference(prepared, made, (images(1, 12),)) <= EXACT


def test_what_an_example_with_a_batch_of_one_leaves_open_follows_the_batch() -> None:
    torch.manual_seed(0)
    for view in MIXING.values():
        prepared, made = converted(Viewed(nn.Conv2d(3, 8, 1), view), images(1, 6))
        assert difference(prepared, made, (images(3, 6),)) <= EXACT
