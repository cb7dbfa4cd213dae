from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import pdp_fx
from pdp_fx import Channels
from pdp_fx.channels.analysis import analyse
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.mac_model import mac_model
from pdp_fx.trace import trace
from tests.nets import NETS, at_once, counts, net, prepare_until, pruned, state


def counted(model: nn.Module, x: torch.Tensor) -> int:
    """Multiply-accumulates of one example, read off the layers while they run."""
    total = 0

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        nonlocal total
        total += module.get_parameter("weight").numel() * out[0, 0].numel()

    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("name", NETS)
def test_the_dense_count_is_that_of_the_layers(name: str) -> None:
    model, x = net(name)
    found = analyse(trace(model, x), ((x,), {}))
    assert mac_model(found, []).macs([]) == counted(model, x)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_the_count_of_a_pruned_model_is_foretold_exactly(name: str, ratio: float) -> None:
    model, x = net(name)
    prepared = pruned(model, Channels(ratio=ratio), x)
    foretold = state(prepared).mac_model
    assert foretold is not None
    assert foretold.macs(list(counts(prepared).values())) == counted(pdp_fx.convert(prepared), x)


class TrainsMore(nn.Module):
    """What training alone computes: a head, or a layer once more.

    Args:
        how: which.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.stem, self.body = how, nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 4)
        self.aux = nn.Sequential(
            nn.Conv2d(16, 16, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Conv2d(16, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        y = x
        for _ in range(3 if self.how == "loop" and self.training else 1):
            y = self.body(y).relu_()
        y = self.head(y.mean((2, 3)))
        return y + 0.3 * self.aux(x).mean((2, 3)) if self.how == "head" and self.training else y


@pytest.mark.parametrize("how", ["head", "loop"])
def test_what_training_alone_computes_does_not_count(how: str) -> None:
    model, x = TrainsMore(how), torch.randn(2, 3, 8, 8)
    prepared = pdp_fx.prepare(model, at_once(Channels(mac_reduction=0.5)), x)
    dense = counted(model, x)
    assert pdp_fx.report(prepared).macs == dense
    pdp_fx.step(prepared)
    left = pdp_fx.report(prepared).macs_left
    assert left is not None
    converted = pdp_fx.convert(prepared)
    assert left == counted(converted, x) == pdp_fx.report(converted, x).macs
    assert 0.5 <= 1 - left / dense < 0.6


def test_macs_are_per_example_at_the_resolution_of_the_inputs() -> None:
    model, _ = net("conv")
    for batch, size in ((1, 8), (5, 8), (2, 12)):
        x = torch.randn(batch, 3, size, size)
        found = analyse(trace(model, x), ((x,), {}))
        assert mac_model(found, []).macs([]) == counted(model, x)


def test_groups_that_are_not_pruned_count_as_they_are() -> None:
    model, x = net("residual")
    _, ctx = prepare_until(model, at_once(Channels(ratio=0.5)), x, "label-channels")
    found = ctx.get(ChannelMap)
    (group,) = [group for group in found.groups if group.name == "expand.0"]
    only = mac_model(found, [group])
    assert only.widths == (16,)
    dense = counted(model, x)
    # Eight of sixteen hidden channels: half of expand, depthwise and project.
    assert dense - only.macs([8]) == 64 * (16 * 8 + 16 * 9 + 16 * 8) / 2


def test_a_weight_used_twice_counts_twice() -> None:
    model, x = net("tied")
    found = analyse(trace(model, x), ((x,), {}))
    assert [c.weight for c in found.contractions].count("encoder.weight") == 2


class Adapted(nn.Linear):
    """A layer with a low-rank product added to its weight, which is computed once for all examples."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.down = nn.Parameter(0.1 * torch.randn(8, in_features))
        self.up = nn.Parameter(0.1 * torch.randn(out_features, 8))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight + self.up @ self.down, self.bias)


class Repeated(nn.Linear):
    """A layer that uses each row of its weight twice."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight.repeat_interleave(2, 0))


def normed(in_features: int, out_features: int) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(in_features, out_features))


def normed_by_columns(in_features: int, out_features: int) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(in_features, out_features), dim=1)


def flops(model: nn.Module, x: torch.Tensor) -> int:
    """Multiply-accumulates of one example in layers, as torch counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x)
    of_layers = counter.get_flop_counts()["Global"]
    return sum(of_layers.get(kind, 0) for kind in (torch.ops.aten.addmm, torch.ops.aten.mm)) // 2 // len(x)


@pytest.mark.parametrize("layer", [normed, normed_by_columns, Adapted, Repeated, nn.Linear])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_computed_weights_count_as_they_are_used(layer: Callable[[int, int], nn.Module], batch: int) -> None:
    torch.manual_seed(0)
    wide = 64 if layer is Repeated else 32
    model = nn.Sequential(layer(16, 32), nn.ReLU(), layer(wide, 32), nn.ReLU(), nn.Linear(wide, 4))
    x = torch.randn(batch, 16)
    dense = 16 * wide + wide * wide + wide * 4
    prepared = pruned(model, Channels(mac_reduction=0.5), x)
    assert pdp_fx.report(prepared).macs == dense
    left = flops(pdp_fx.convert(prepared), x)
    assert pdp_fx.report(prepared).macs_left == left
    assert 0.5 <= 1 - left / dense < 0.56


class MixesTokens(nn.Module):
    """A layer between others that is used once for each of their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(6, 32), nn.Linear(5, 5), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.mix(self.up(x).relu().mT).mT)


class FiltersAlike(nn.Module):
    """One filter for all channels, which lie on the axis of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.filter, self.down = nn.Conv2d(6, 32, 1), nn.Conv2d(1, 1, 3), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x).relu()
        return self.down(self.filter(up.flatten(0, 1)[:, None]).view(len(up), -1, 4, 4))


class Pairs(nn.Module):
    """A layer that is used for each channel of one layer and each of another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.mix = nn.Linear(6, 8), nn.Linear(6, 12), nn.Linear(1, 4)
        self.down = nn.Linear(8 * 12 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.left(x)[:, :, None] * self.right(x)[:, None]
        return self.down(self.mix(pairs[..., None]).relu().flatten(1))


@pytest.mark.parametrize(
    ("kind", "shape"), [(MixesTokens, (2, 5, 6)), (FiltersAlike, (2, 6, 6, 6)), (Pairs, (2, 6))]
)
def test_a_weight_that_is_used_for_each_channel_is_used_less_often_without_some(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)

    def all_flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(x)
        return counter.get_total_flops() // 2 // len(x)

    dense = kind()
    prepared = pruned(dense, Channels(mac_reduction=0.5), x)
    found = pdp_fx.report(prepared)
    left = all_flops(pdp_fx.convert(prepared))
    assert (found.macs, found.macs_left) == (all_flops(dense), left)
    assert 0.5 <= 1 - left / all_flops(dense) < 0.6
