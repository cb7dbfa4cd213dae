"""Weights that are computed from parameters: pruned in the parameters where that is exact, else listed."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.prune import l1_unstructured

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, SpecError, Unstructured
from pdp_fx.spec import Rule
from tests.channels import nets_weights
from tests.channels.checks import check_converted, pruner_of, train
from tests.channels.construct import Construct

AT_ONCE = Schedule(0, 1.0)
PRUNED = {
    "LowRankAdapter": {"head.weight"},
    "SumOfKernels": {"stem.0.weight", "head.weight"},
    "MaskedKernel": {"stem.0.weight", "conv.weight", "head.weight"},
    "TiedAutoencoder": {"encoder.weight"},
    "CatOfWeights": {"q.weight", "k.weight", "v.weight", "head.weight"},
    "HalfOfWeight": {"hidden.weight", "head.weight"},
    "ScaledWeight": {"stem.0.weight", "conv.weight", "head.weight"},
    "MixedKernels": {"stem.0.weight", "head.weight"},
}
SKIPPED = {
    "LowRankAdapter": {"hidden", "up", "down"},
    "SumOfKernels": {"wide", "point"},
    "MixedKernels": {"experts"},
}
ROWS = [row for row in nets_weights.WEIGHTS if row.name in PRUNED]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_single_weights_are_pruned_in_their_parameters_or_listed(row: Construct) -> None:
    torch.manual_seed(0)
    model = row.net().double()
    spec = PruneSpec(Unstructured(0.5), schedule=AT_ONCE, allocation="uniform")
    prepared = pdp_fx.prepare(model, spec, row.inputs(2))
    skipped = dict(pdp_fx.explain(prepared).skipped)
    assert {weight.name for weight in pdp_fx.explain(prepared).weights} == PRUNED[row.name]
    assert set(skipped) == SKIPPED.get(row.name, set())
    assert all("nets_weights.py" in why for why in skipped.values()), skipped
    train(prepared, [row.inputs(2)])
    pdp_fx.step(prepared)
    left = dict(check_converted(model, prepared.eval(), [row.inputs(3)]).named_parameters())
    for name in PRUNED[row.name]:
        assert int((left[name] == 0).sum()) == round(0.5 * left[name].numel())
    assert pruner_of(prepared).skipped == tuple(skipped.items())


class Turned(nn.Module):
    """One matrix is multiplied from the other side, one is joined below another, one loses columns."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.top, self.low = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(4, 20))

    def forward(self, x: Tensor) -> Tensor:
        joined = functional.linear(x @ self.right, torch.cat([self.top, 2 * self.low]))
        return functional.linear(joined, self.wide[:, 2:18])


def test_groups_of_weights_need_the_input_channels_on_axis_1() -> None:
    prepared = pdp_fx.prepare(Turned(), PruneSpec(NM(2, 4), schedule=AT_ONCE), torch.randn(3, 8))
    found = pdp_fx.explain(prepared)
    assert [weight.name for weight in found.weights] == ["low", "top"]
    assert [name for name, _ in found.skipped] == ["right", "wide"]
    assert all("axis 1 does not run along the input channels" in why for _, why in found.skipped)


class OnlySums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.one + self.other)


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.linear(x, torch.linalg.inv(self.one)))


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4)])
def test_a_model_of_sums_is_refused_with_the_reason(rule: Rule) -> None:
    with pytest.raises(
        SpecError, match=r"one: a zero in it is no zero of the weight that %add \(test_computed"
    ):
        pdp_fx.prepare(OnlySums(), PruneSpec(rule), torch.randn(2, 6))


def test_a_weight_that_is_an_inverse_is_listed() -> None:
    prepared = pdp_fx.prepare(Inverse(), PruneSpec(Unstructured(0.5)), torch.randn(2, 6))
    assert [name for name, _ in pdp_fx.explain(prepared).skipped] == ["one"]


class Scaled(nn.Module):
    """The scale of a weight stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 8, 3), nn.Parameter(torch.rand(8, 1, 1, 1))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.scale * self.conv.weight, self.conv.bias)
        return self.head(functional.relu(x))


def test_channels_of_a_scaled_weight_are_ranked_by_the_weight() -> None:
    prepared = pdp_fx.prepare(Scaled(), PruneSpec(Channels(ratio=0.5)), torch.randn(2, 3, 6, 6))
    (group,) = pdp_fx.explain(prepared).groups
    assert group.producers == ("conv",)
    assert set(group.masked) == {"conv"}
    assert "scale[0]" in group.members


class FromBuffer(nn.Module):
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 6))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(functional.linear(x, self.weight)).relu())


def test_channels_of_a_buffer_stay() -> None:
    with pytest.raises(SpecError, match="weight is a buffer, which is not trained; make it a parameter"):
        pdp_fx.prepare(FromBuffer(), PruneSpec(Channels(ratio=0.5)), torch.randn(2, 6))


def test_rows_that_are_cut_off_stay_and_are_listed() -> None:
    net = nets_weights.HalfOfWeight()
    prepared = pdp_fx.prepare(net, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), torch.randn(2, 5, 6))
    found = pdp_fx.explain(prepared)
    assert [(group.name, group.width) for group in found.groups] == [("hidden", 8)]
    assert [(kept.width, kept.why) for kept in found.kept if "hidden" in kept.group] == [
        (4, "the model cuts these rows off and never uses them")
    ]
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared).get_parameter("hidden.weight").shape == (8, 6)


def test_multiply_accumulates_are_those_of_the_weight_that_is_computed() -> None:
    x = torch.randn(1, 5, 6)
    rows = {row.layer: row.macs for row in pdp_fx.report(nets_weights.HalfOfWeight(), x).rows}
    assert rows == {"hidden": 5 * 6 * 8, "head": 5 * 8 * 5}
    rows = {row.layer: row.macs for row in pdp_fx.report(nets_weights.CatOfWeights(), x).rows}
    assert rows["q"] == rows["k"] == rows["v"] == 5 * 6 * 8
    rows = {row.layer: row.macs for row in pdp_fx.report(nets_weights.LowRankAdapter(), x).rows}
    assert (rows["hidden"], rows["up"]) == (5 * 6 * 8, None)


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
def test_what_torch_itself_has_pruned_stays_pruned(rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).double()
    l1_unstructured(model[0], "weight", 0.25)
    x = torch.randn(4, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE), x)
    train(prepared, [(x,)])
    pdp_fx.step(prepared)
    left = dict(check_converted(model, prepared.eval(), [(x,)]).named_parameters())
    assert "0.weight_orig" in left
