from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, Unstructured
from tests.nets import at_once, counts, difference, listing, mask_of, net, prepare_until, pruned, state

BEHIND_BATCH_NORM = """\
x = input
conv = conv(x)
conv_weight = conv.weight
conv_mask = pdp.masks.conv(conv_weight)
bn_weight = bn.weight
bn_weight_masked = mask_axis(bn_weight, conv_mask, 0)
bn_bias = bn.bias
bn_bias_masked = mask_axis(bn_bias, conv_mask, 0)
bn = bn(conv, weight=bn_weight_masked, bias=bn_bias_masked)
relu = relu(bn)
head = head(relu)"""

BEHIND_THE_LAYER = """\
x = input
fc1_weight_1 = fc1.weight
fc1_mask = pdp.masks.fc1(fc1_weight_1)
fc1_weight = fc1.weight
fc1_weight_masked = mask_axis(fc1_weight, fc1_mask, 0)
fc1_bias = fc1.bias
fc1_bias_masked = mask_axis(fc1_bias, fc1_mask, 0)
fc1 = fc1(x, weight=fc1_weight_masked, bias=fc1_bias_masked)"""


def test_behind_batch_norm_its_weight_and_bias_are_masked() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "mask-channels")
    assert listing(gm) == BEHIND_BATCH_NORM


def test_without_batch_norm_rows_and_bias_are_masked() -> None:
    model, x = net("mlp")
    gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "mask-channels")
    assert listing(gm).startswith(BEHIND_THE_LAYER)


def test_a_residual_stream_shares_one_mask() -> None:
    model, x = net("residual")
    gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "mask-channels")
    uses = [line.partition(" ")[0] for line in listing(gm).splitlines() if "stem_0_mask, 0)" in line]
    assert uses == [
        "stem_1_weight_masked",
        "stem_1_bias_masked",
        "project_1_weight_masked",
        "project_1_bias_masked",
    ]
    assert mask_of(gm, "stem_0").parameters_read == ("stem.0.weight", "project.0.weight")


class Joined(nn.Module):
    """Two groups side by side, normalised together."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 1)
        self.right = nn.Conv2d(3, 6, 1)
        self.bn = nn.BatchNorm2d(10)
        self.head = nn.Conv2d(10, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(torch.cat([self.left(x), self.right(x)], 1)))


def test_groups_that_share_an_axis_are_laid_out_along_it() -> None:
    x = torch.randn(2, 3, 4, 4)
    gm, _ = prepare_until(Joined(), at_once(Channels(ratio=0.5)), x, "mask-channels")
    lines = listing(gm).splitlines()
    assert "bn_weight_0_mask = pdp.layouts.bn_weight_0(left_mask, right_mask)" in lines
    assert "bn_weight_masked = mask_axis(bn_weight, bn_weight_0_mask, 0)" in lines
    prepared = pruned(Joined(), Channels(ratio=0.5), x).eval()
    assert difference(prepared, pdp_fx.convert(prepared), x) <= 1e-5


class Shifted(nn.Module):
    """A sigmoid is 0.5 where its input is 0, so the columns of the reader are masked instead."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.sigmoid(self.fc1(x)))


class Beside(nn.Module):
    """Puts what its layers give side by side, behind a norm of some name."""

    def __init__(self, name: str, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.name = nn.ModuleList(layers), name
        self.add_module(name, nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.get_submodule(self.name)(torch.cat([layer(x) for layer in self.layers], 1)))


class Alike(nn.Module):
    """Two norms whose names are the same once their dots are underscores."""

    def __init__(self) -> None:
        super().__init__()
        twice = nn.Linear(6, 4)
        self.a, self.a_b = Beside("b_c", nn.Linear(6, 4), nn.Linear(6, 4)), Beside("c", twice, twice)

    def forward(self, x: Tensor) -> Tensor:
        return self.a_b(self.a(x))


def test_layouts_of_masks_are_told_apart_where_names_are_alike() -> None:
    torch.manual_seed(0)
    model, x = Alike().double(), torch.randn(5, 6).double()
    for name in ("a.b_c.bias", "a_b.c.bias"):
        nn.init.uniform_(model.get_parameter(name), 1, 2)
    prepared = pruned(model, Channels(ratio=0.5), x)
    assert difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 1e-9


def test_where_zero_does_not_stay_zero_the_columns_of_the_reader_are_masked() -> None:
    x = torch.randn(5, 8)
    gm, _ = prepare_until(Shifted(), at_once(Channels(ratio=0.5)), x, "mask-channels")
    lines = listing(gm).splitlines()
    assert "fc1 = fc1(x)" in lines
    assert "fc2_weight_masked = mask_axis(fc2_weight, fc1_mask, 1)" in lines
    prepared = pruned(Shifted(), Channels(ratio=0.5), x).eval()
    assert difference(prepared, pdp_fx.convert(prepared), x) <= 1e-5


def test_a_reader_may_have_a_rule_of_its_own() -> None:
    x = torch.randn(5, 8)
    prepared = pruned(Shifted(), at_once(Channels(ratio=0.5), {"fc2": Unstructured(0.5)}), x).eval()
    assert counts(prepared) == {"fc2_weight": 9, "fc1": 3}
    assert difference(prepared, pdp_fx.convert(prepared), x) <= 1e-5


def test_masks_that_prune_nothing_change_nothing() -> None:
    for name in ("small", "residual", "mlp", "tied"):
        model, x = net(name)
        gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "mask-channels")
        assert torch.equal(gm.eval()(x), model.eval()(x))


def test_without_channels_to_mask_nothing_is_edited() -> None:
    model, x = net("small")
    before, _ = prepare_until(model, at_once(Unstructured(0.5)), x, "mask-weights")
    gm, _ = prepare_until(model, at_once(Unstructured(0.5)), x, "mask-channels")
    assert listing(gm) == listing(before)
    assert not state(gm).layouts


class Variances(nn.Module):
    """Adds a variance of eight channels to them."""

    def __init__(self, variance: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.variance = nn.Linear(6, 8), nn.Linear(8, 5), variance

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.head(x + self.variance(x))


def of_half_twice(x: Tensor) -> Tensor:
    half = x[..., :4]
    half = half / half.std(-1, keepdim=True)
    return torch.cat((half, half), -1)


@pytest.mark.parametrize(
    ("variance", "kept"),
    [
        (lambda x: x.var(-1, keepdim=True), 2),
        (lambda x: x.var(-1, False, keepdim=True), 1),
        (lambda x: x.var(-1, correction=3, keepdim=True), 4),
        (lambda x: torch.std(x, dim=-1, correction=2.5, keepdim=True), 3),
        (lambda x: torch.cat((x, x), -1).std(-1, correction=2, keepdim=True), 2),
        (of_half_twice, 4),
    ],
)
def test_variances_are_left_with_more_channels_than_they_take_off(
    variance: Callable[[Tensor], Tensor], kept: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6).double()
    prepared = pdp_fx.prepare(Variances(variance).double(), at_once(Channels(ratio=0.9), min_keep=0.0), x)
    pdp_fx.step(prepared)
    assert prepared(x).isfinite().all()
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_parameter("layer.weight").shape[0] == kept
    assert difference(prepared, converted, x) < 1e-12


class ChannelsOfGroups(nn.Module):
    """Of eight channels one of each half goes with one of the other, behind a convolution of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 4, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(self.stem(x))


def test_channels_are_counted_where_they_are_made() -> None:
    x = torch.randn(2, 3, 5)
    prepared = pdp_fx.prepare(ChannelsOfGroups(), at_once(Channels(ratio=0.5, min_channels=3)), x)
    (group,) = pdp_fx.explain(prepared).groups
    assert (group.name, group.width, group.least) == ("stem", 4, 2)
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared.eval()).get_parameter("stem.weight").shape[0] == 4
