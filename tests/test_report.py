"""The numbers of each layer: counted by hand here, and against the paper's dense counts."""

import json
import sys
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models  # pyright: ignore[reportMissingTypeStubs]

import pdp_fx
from benchmarks.mobilenet_v1 import MobileNetV1
from pdp_fx import NM, Channels, PruneSpec, Report, Schedule, Unstructured
from pdp_fx.report import Row
from pdp_fx.report import _soft_share as soft_share  # pyright: ignore[reportPrivateUsage]
from tests.nets import NETS, RULES, at_once, counts, mask_of, net, pruned, snapshot, state, train

every_net = pytest.mark.parametrize("name", NETS)
every_rule = pytest.mark.parametrize("rule", RULES)


def rows(found: Report) -> dict[str, Row]:
    return {row.layer: row for row in found.rows}


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (models.resnet18, 1814.1),
        (models.resnet50, 4089.2),
        (MobileNetV1, 568.7),
        (models.mobilenet_v2, 300.8),
    ],
)
def test_dense_multiply_accumulates_are_those_of_the_paper(
    make: Callable[[], nn.Module], millions: float
) -> None:
    macs = pdp_fx.report(make(), torch.randn(1, 3, 224, 224)).macs
    assert macs is not None
    assert round(macs / 1e6, 1) == millions


def test_counts_are_for_one_example_whatever_the_batch() -> None:
    model, x = net("conv")
    one, four = (pdp_fx.report(model, x[:batch]) for batch in (1, 4))
    assert one == four
    found = rows(one)
    assert [found[name].macs for name in ("conv1", "conv2", "fc")] == [64 * 216, 9 * 1152, 80]


def test_a_plain_model_is_counted_and_left_alone() -> None:
    model, x = net("residual")
    before = snapshot(model)
    found = pdp_fx.report(model, x)
    after = snapshot(model)
    assert before["modules"] == after["modules"]
    assert all(torch.equal(t, after["state"][name]) for name, t in before["state"].items())
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert {row.rule for row in found.rows} == {""}
    assert found.macs == found.macs_left


class Counted(nn.Linear):
    """Draws random numbers, and counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, input: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(input + torch.rand(1))


def test_counting_draws_no_numbers_and_writes_to_no_buffer() -> None:
    model, state_before = Counted(), torch.get_rng_state()
    pdp_fx.report(model, torch.ones(2, 4))
    assert int(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), state_before)


def test_without_example_inputs_there_are_no_multiply_accumulates() -> None:
    found = pdp_fx.report(net("mlp")[0])
    assert (found.macs, found.macs_left) == (None, None)
    assert [row.weights for row in found.rows] == [128, 192, 48]
    assert "MACs" in str(found)


@every_net
@every_rule
def test_what_is_left_is_what_convert_leaves(name: str, rule: str) -> None:
    model, x = net(name)
    prepared = pruned(model, RULES[rule], x)
    before, after = pdp_fx.report(prepared), pdp_fx.report(pdp_fx.convert(prepared), x)
    assert sum(row.left for row in before.rows) == sum(row.left for row in after.rows)
    assert before.macs_left == after.macs_left


def test_unstructured_rows_tell_targets_and_zeros() -> None:
    model, x = net("conv")
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.7), allocation="uniform"), x)
    assert {row.target for row in pdp_fx.report(prepared).rows} == {None}
    pdp_fx.step(prepared)
    found = rows(pdp_fx.report(prepared))
    assert found["conv2"].rule == "unstructured"
    assert found["conv2"].target == round(0.7 * 1152) / 1152
    assert found["conv2"].left == 1152 - round(0.7 * 1152)
    assert found["conv2"].sparsity == found["conv2"].target


def test_the_soft_share_counts_units_between_hard_and_soft() -> None:
    model, x = net("conv")
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.7), tau=0.05), x)
    assert {row.soft for row in pdp_fx.report(prepared).rows} == {0.0}
    pdp_fx.step(prepared)
    values = mask_of(prepared, "conv2_weight").values(prepared.get_parameter("conv2.weight"))
    share = float(((values > 0.01) & (values < 0.99)).float().mean())
    assert share > 0.5
    assert rows(pdp_fx.report(prepared))["conv2"].soft == pytest.approx(share)


def test_the_soft_share_of_a_group_is_found_once_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net("residual")
    prepared = pruned(model, at_once(Channels(ratio=0.5)), x)
    shares = Mock(wraps=soft_share)
    monkeypatch.setattr(sys.modules["pdp_fx.report"], "_soft_share", shares)
    pdp_fx.report(prepared)
    assert shares.call_count == len(state(prepared).mask_items())


def test_n_m_rows_name_their_pattern() -> None:
    model, x = net("conv")
    found = rows(pdp_fx.report(pruned(model, NM(2, 4), x)))
    assert (found["conv2"].rule, found["conv2"].target, found["conv2"].sparsity) == ("2:4", 0.5, 0.5)
    assert (found["conv1"].rule, found["conv1"].target, found["conv1"].soft) == ("", None, None)


def test_channel_rows_count_removed_rows_and_columns() -> None:
    model, x = net("conv")
    prepared = pruned(model, Channels(ratio=0.5), x)
    gone = counts(prepared)
    kept1, kept2 = 8 - gone["conv1"], 16 - gone["conv2"]
    found = rows(pdp_fx.report(prepared))
    assert found["conv1"].target == gone["conv1"] / 8
    assert found["conv1"].left == kept1 * 27
    assert found["conv2"].left == kept2 * kept1 * 9
    assert found["conv2"].macs_left == 9 * found["conv2"].left
    assert (found["fc"].rule, found["fc"].left) == ("", 5 * kept2)


class TwoHalves(nn.Module):
    """One layer makes two groups: half of its channels are read by another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 16)
        self.left = nn.Linear(12, 8)
        self.right = nn.Linear(4, 8)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.relu(self.stem(x)).split([12, 4], dim=1)
        return self.head(torch.cat([self.left(first).relu(), self.right(second.softmax(1)).relu()], 1))


def test_a_weight_with_channels_that_stay_has_the_target_of_its_rows() -> None:
    prepared = pdp_fx.prepare(TwoHalves(), at_once(Channels(ratio=0.5)), torch.randn(3, 4))
    pdp_fx.step(prepared)
    found = rows(pdp_fx.report(prepared))
    gone = 16 - found["stem"].left // 4
    assert gone > 0
    assert found["stem"].target == pytest.approx(gone / 16)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_layer_without_weights_is_counted() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = nn.Linear(6, 8), nn.Linear(8, 0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.some(x)
            return torch.cat([x, self.none(x)], 1)

    model = pdp_fx.prepare(Both(), PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), torch.randn(2, 6))
    pdp_fx.step(model)
    row = next(row for row in pdp_fx.report(model).rows if row.layer == "none")
    assert (row.weights, row.left, row.sparsity) == (0, 0, 0.0)
    assert "0.00%" in str(pdp_fx.report(model))


def test_a_tied_weight_is_one_row_used_twice() -> None:
    model, x = net("tied")
    found = rows(pdp_fx.report(pruned(model, Unstructured(0.5), x)))
    assert sorted(found) == ["encoder", "head", "stem"]
    assert (found["encoder"].weights, found["encoder"].macs) == (64, 128)
    assert found["encoder"].macs_left == 2 * found["encoder"].left
    assert pdp_fx.report(model, x).parameters == sum(p.numel() for p in model.parameters())


class DecidesByData(nn.Module):
    """Runs its layer or not, as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.sum() > -1e9) else x


class WithOpaque(nn.Module):
    """A layer, a module that can only be run as a whole, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.opaque = DecidesByData()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.opaque(self.first(x)))


def test_weights_inside_an_opaque_module_are_counted_but_not_their_uses() -> None:
    prepared = pruned(WithOpaque(), Unstructured(0.5), torch.randn(3, 4))
    found = rows(pdp_fx.report(prepared))
    inner = found["opaque.inner"]
    assert (inner.rule, inner.weights, inner.macs, inner.macs_left) == ("unstructured", 64, None, None)
    assert inner.left < 64
    assert (found["first"].macs, found["last"].macs) == (32, 32)


def test_json_holds_the_rows_and_the_totals() -> None:
    model, x = net("conv")
    found = pdp_fx.report(pruned(model, Channels(ratio=0.5), x))
    read = json.loads(found.to_json())
    assert read == found.to_dict()
    assert read["macs"] == found.macs
    assert [row["layer"] for row in read["rows"]] == ["conv1", "conv2", "fc"]
    assert read["rows"][0]["shape"] == [8, 3, 3, 3]
    assert read["sparsity"] == 1 - sum(row["left"] for row in read["rows"]) / (216 + 1152 + 80)


def test_the_table_has_a_line_a_layer_and_a_total() -> None:
    model, x = net("mlp")
    lines = str(pdp_fx.report(model, x)).splitlines()
    assert lines[2].split() == ["fc1", "16x8", "128", "128", "0.00%", "0.000", "M", "0.000", "M"]
    assert lines[-1].split()[:3] == ["total", "368", "368"]


def test_reporting_changes_nothing_of_a_prepared_model() -> None:
    model, x = net("residual")
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5)), x)
    train(prepared, x)
    before, counter = snapshot(prepared), int(state(prepared).counter)
    pdp_fx.report(prepared)
    after = snapshot(prepared)
    assert int(state(prepared).counter) == counter
    assert prepared.training
    then = cast("dict[str, Tensor]", before["state"])
    assert all(torch.equal(tensor, then[name]) for name, tensor in after["state"].items())


class Experts(nn.Module):
    """A matrix for each of four experts, to which all rows go."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, -1, 8).expand(4, -1, -1)
        return torch.bmm(torch.bmm(rows, self.up).relu(), self.down).mean(0).view_as(x)


class BroadcastExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return ((x.unsqueeze(1) @ self.up).relu() @ self.down).mean(1)


class EinsumExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bteo,eoi->bti", torch.einsum("bti,eio->bteo", x, self.up).relu(), self.down)


@pytest.mark.parametrize("kind", [Experts, BroadcastExperts, EinsumExperts])
def test_each_matrix_of_a_stack_is_multiplied_with_its_own_rows(kind: type[nn.Module]) -> None:
    """Five rows in each example, and every number of the matrices meets each of them once."""
    assert pdp_fx.report(kind(), torch.randn(2, 5, 8)).macs == 5 * 2 * 4 * 8 * 16


def test_the_multiply_accumulates_that_a_spec_wants_are_those_of_stacks_too() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.experts = nn.Linear(8, 160), nn.Linear(160, 8), Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x + self.down(self.up(x).relu()))

    x = torch.randn(2, 5, 8)
    spec = PruneSpec(
        Channels(mac_reduction=0.25), schedule=Schedule(start=0, epsilon=1.0), overrides={"up": None}
    )
    masked = pdp_fx.prepare(Both(), spec, (x,))
    pdp_fx.step(masked)
    found = pdp_fx.report(masked)
    assert found.macs == 5 * 2 * (8 * 160 + 4 * 8 * 16)
    assert found.macs_left is not None
    assert found.macs_left <= 0.75 * found.macs
    converted = pdp_fx.convert(masked)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        converted(x)
    assert counted.get_total_flops() == 2 * 2 * found.macs_left


class Elastic(nn.Module):
    """Uses the first rows of a layer, and the first columns of the next, as one of a family of nets does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.a(x).relu(), self.b.weight[:12], self.b.bias[:12]).relu()
        return F.linear(y, self.c.weight[:, :12], self.c.bias)


class Recurrent(nn.Module):
    """Starts from a state that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


class Narrow(nn.Module):
    """Has a layer of a single weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1), nn.Linear(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("kind", "shape"), [(Elastic, (2, 8)), (Recurrent, (2, 1, 8)), (Recurrent, (2, 5, 8)), (Narrow, (2, 8))]
)
def test_torch_counts_the_same_multiply_accumulates(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = kind(), torch.randn(shape)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(x)
    assert pdp_fx.report(model, x).macs == counted.get_total_flops() / 2 / 2


def test_what_is_left_of_a_part_of_a_weight_is_what_convert_leaves() -> None:
    model, x = Elastic(), torch.randn(2, 8)
    masked = pdp_fx.prepare(model, at_once(Channels(ratio=0.3)), x)
    pdp_fx.step(masked)
    left = pdp_fx.report(masked).macs_left
    assert left == pdp_fx.report(pdp_fx.convert(masked), x).macs


def test_zeros_in_the_unused_part_of_a_weight_save_nothing() -> None:
    model, x = Elastic(), torch.randn(2, 8)
    with torch.no_grad():
        model.b.weight[12:] *= 1e-3
    spec = PruneSpec(
        Unstructured(0.25), schedule=Schedule(start=0, epsilon=1.0), overrides={"a": None, "c": None}
    )
    masked = pdp_fx.prepare(model, spec, x)
    pdp_fx.step(masked)
    row = rows(pdp_fx.report(masked))["b"]
    assert (row.left, row.macs_left) == (12 * 16, 12 * 16)


@pytest.mark.parametrize("classes", [3, 7])
def test_a_new_head_behind_pruned_channels_is_counted_as_convert_leaves_it(classes: int) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)), torch.randn(2, 8)
    masked = pdp_fx.prepare(model, at_once(Channels(ratio=0.5)), x)
    masked.set_submodule("2", nn.Linear(16, classes))
    pdp_fx.step(masked)
    row = rows(pdp_fx.report(masked))["2"]
    assert (row.weights, row.left) == (16 * classes, 8 * classes)
    assert pdp_fx.convert(masked).get_parameter("2.weight").shape == (classes, 8)


def test_a_model_without_weights_is_not_sparse() -> None:
    assert pdp_fx.report(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), torch.randn(2, 4)).sparsity == 0
