"""Checkpoints: resuming after a kill, dense checkpoints in and out, and how large ours are."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import NM, Channels, MaskSite, PruneSpec, Schedule, StateError, Unstructured, WeightPolicy
from pdp_fx.granularity import rule_text
from pdp_fx.spec import Allocation, Rule
from tests.training.nets import RULES, Net, batch, prepared, pruned_counts, sgd, state, training_step
from tests.training.resumable import STEPS, run

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
ROOT = Path(__file__).parents[2]


def start(checkpoint: Path, pause: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.training.resumable", str(checkpoint), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def wait_for_step(checkpoint: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if checkpoint.exists() and torch.load(checkpoint, weights_only=True)["done"] >= step:
            return
        time.sleep(0.02)
    raise TimeoutError(f"step {step} was never reached")


def test_a_run_killed_in_the_ramp_resumes_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = tmp_path / "last.pt"
    process = start(checkpoint, 0.05)
    wait_for_step(checkpoint, 12, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = torch.load(checkpoint, weights_only=True)["done"]
    assert 12 <= done < 34, "the kill came too late to be in the ramp"
    resumed = run(checkpoint)
    never_killed = run()
    assert torch.load(checkpoint, weights_only=True)["done"] == STEPS
    theirs = never_killed.state_dict()
    assert resumed.state_dict().keys() == theirs.keys()
    for name, tensor in resumed.state_dict().items():
        assert tensor.equal(theirs[name]), name
    for (name, mask), (_, other) in zip(
        state(resumed).mask_items(), state(never_killed).mask_items(), strict=True
    ):
        weights = [resumed.get_parameter(read) for read in mask.parameters_read]
        assert mask.pruned(*weights).equal(other.pruned(*weights)), name
    assert pruned_counts(resumed) == pruned_counts(never_killed)
    assert sum(pruned_counts(resumed)) > 0


@every_rule
def test_a_state_dict_goes_through_a_file_that_holds_tensors_only(rule: Rule, tmp_path: Path) -> None:
    model = prepared(rule)
    optimizer = sgd(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = prepared(rule)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    images = batch(7)[0]
    assert again(images).equal(model(images))
    assert int(state(again).counter) == 3
    again_sgd = sgd(again)
    again_sgd.load_state_dict(optimizer.state_dict())
    assert training_step(again, again_sgd, 3) == training_step(model, optimizer, 3)


@every_rule
def test_a_dense_checkpoint_loads_strictly_and_back(rule: Rule) -> None:
    torch.manual_seed(5)
    dense = Net()
    model = prepared(rule)
    model.load_state_dict(dense.state_dict())
    images = batch(7)[0]
    assert model(images).equal(dense(images))
    training_step(model, sgd(model), 0)
    mine = model.state_dict()
    back = Net()
    back.load_state_dict({name: tensor for name, tensor in mine.items() if not name.startswith("pdp.")})
    assert back.eval()(images).equal(model.eval()(images))


def test_a_dense_checkpoint_loaded_in_the_ramp_keeps_the_schedule() -> None:
    model = prepared(RULES["unstructured"])
    optimizer = sgd(model)
    for seed in range(4):
        training_step(model, optimizer, seed)
    counts = pruned_counts(model)
    model.load_state_dict(Net().state_dict())
    assert int(state(model).counter) == 4
    assert pruned_counts(model) == counts


@every_rule
def test_an_earlier_checkpoint_takes_the_ramp_back(rule: Rule) -> None:
    model = prepared(rule)
    early = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = sgd(model)
    for seed in range(4):
        training_step(model, optimizer, seed)
    assert sum(pruned_counts(model)) > 0
    model.load_state_dict(early)
    assert sum(pruned_counts(model)) == 0
    images = batch(7)[0]
    assert model(images).equal(prepared(rule)(images))


def test_a_checkpoint_of_another_spec_is_refused_by_name() -> None:
    saved = prepared(RULES["channels"]).state_dict()
    with pytest.raises(RuntimeError, match=r"pdp\.masks"):
        prepared(RULES["unstructured"]).load_state_dict(saved)


@pytest.mark.parametrize(
    ("rule", "other", "message"),
    [
        (
            Unstructured(0.8),
            Unstructured(0.9),
            r"targets are 1216 weights, but Unstructured\(ratio=0.9\) asks for",
        ),
        (NM(2, 4), NM(1, 4), r"2 of every 4 weights, but NM\(1, 4\) asks for 3 of every 4 weights"),
        (NM(1, 4), NM(2, 4), r"3 of every 4 weights, but NM\(2, 4\)"),
    ],
)
def test_a_checkpoint_of_another_target_is_refused_and_its_weights_load_alone(
    rule: Rule, other: Rule, message: str
) -> None:
    model, another = prepared(rule), prepared(other)
    optimizer = sgd(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
    with pytest.raises(RuntimeError, match=message + r"(.|\n)*begin with 'pdp\.'"):
        another.load_state_dict(model.state_dict())
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pdp.")}
    another = prepared(other)
    another.load_state_dict(weights)
    for _ in range(6):
        pdp_fx.step(another)
    assert sum(pruned_counts(another)) == sum(pruned_counts(stepped(other)))


def test_a_checkpoint_of_a_tau_that_changes_is_refused_where_it_does_not() -> None:
    specs = [PruneSpec(Unstructured(0.5), tau_end=tau_end) for tau_end in (None, 1e-6)]
    fixed, changing = (pdp_fx.prepare(nn.Linear(4, 4), spec) for spec in specs)
    for one, other in ((fixed, changing), (changing, fixed)):
        with pytest.raises(RuntimeError, match="the spec has a tau_end and that of the checkpoint has none"):
            one.load_state_dict(other.state_dict())


def stepped(rule: Rule) -> nn.Module:
    model = prepared(rule)
    for _ in range(6):
        pdp_fx.step(model)
    return model


class Narrow(nn.Module):
    """As many masked layers and as few weights as CIFAR-10's ResNet20: the worst case among real nets."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(116, 116, bias=False) for _ in range(20)]
        self.layers = nn.Sequential(*[part for layer in layers for part in (layer, nn.BatchNorm1d(116))])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map (n, 116) to (n, 116)."""
        return self.layers(rows)


@every_rule
def test_a_checkpoint_is_hardly_larger_than_the_dense_one(rule: Rule) -> None:
    dense = Narrow()
    model = pdp_fx.prepare(dense, PruneSpec(rule), torch.ones(2, 116))
    assert len(state(model).masks) >= 19
    added = _bytes(model.state_dict()) - _bytes(dense.state_dict())
    assert added < 0.01 * _bytes(dense.state_dict())


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getbuffer().nbytes


def test_a_converted_model_is_not_a_prepared_one() -> None:
    model = prepared(RULES["unstructured"])
    optimizer = sgd(model)
    for seed in range(6):
        training_step(model, optimizer, seed)
    with pytest.raises(StateError, match="prepare"):
        pdp_fx.step(pdp_fx.convert(model))


@pytest.mark.parametrize(
    ("rule", "other"),
    [
        (Channels(ratio=0.5), Channels(ratio=0.75)),
        (Channels(mac_reduction=0.5), Channels(mac_reduction=0.7)),
        (Channels(ratio=0.5), Channels(ratio=0.5, round_to=4)),
        (Channels(ratio=0.5), Channels(ratio=0.5, min_channels=6)),
    ],
)
def test_a_checkpoint_of_other_channels_is_refused_once_they_are_chosen(rule: Rule, other: Rule) -> None:
    model = prepared(rule)
    prepared(other).load_state_dict(model.state_dict())
    pdp_fx.step(model)
    pdp_fx.step(model)
    with pytest.raises(RuntimeError, match=r"follow other rules, .* than Channels\(.*begin with 'pdp\.'"):
        prepared(other).load_state_dict(model.state_dict())
    again = prepared(rule)
    again.load_state_dict(model.state_dict())
    assert pruned_counts(again) == pruned_counts(model)


@pytest.mark.parametrize(
    ("rule", "other"), [(NM(1, 2), NM(3, 4)), (NM(3, 4), NM(1, 2)), (NM(2, 4), NM(6, 8))]
)
def test_a_checkpoint_of_a_pattern_that_prunes_as_many_of_each_group_is_refused(
    rule: Rule, other: Rule
) -> None:
    model = prepared(rule)
    for _ in range(3):
        pdp_fx.step(model)
    with pytest.raises(RuntimeError, match=rf"follow other rules, .* than {re.escape(rule_text(other))}"):
        prepared(other).load_state_dict(model.state_dict())
    again = prepared(rule)
    again.load_state_dict(model.state_dict())
    assert pruned_counts(again) == pruned_counts(model)


def test_a_checkpoint_of_masks_with_other_names_does_not_give_its_counter_alone() -> None:
    model = prepared(RULES["unstructured"])
    for _ in range(3):
        pdp_fx.step(model)
    with pytest.raises(RuntimeError, match=r"follow other rules, .* than Channels\(.*begin with 'pdp\.'"):
        prepared(RULES["channels"]).load_state_dict(model.state_dict(), strict=False)
    other = prepared(RULES["channels"])
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pdp.")}
    other.load_state_dict(weights, strict=False)
    assert int(state(other).counter) == 0


@pytest.mark.parametrize(
    ("rule", "allocation"),
    [(Unstructured(0.5), "uniform"), (Unstructured(0.5, policy=pdp_fx.ShrinkMask), "global")],
)
def test_a_checkpoint_of_another_allocation_or_policy_is_refused_once_targets_are_fixed(
    rule: Rule, allocation: Allocation
) -> None:
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(2, 8)
    schedule = Schedule(start=0, epsilon=0.5)
    model = pdp_fx.prepare(net, PruneSpec(Unstructured(0.5), schedule=schedule), x)
    other = pdp_fx.prepare(net, PruneSpec(rule, schedule=schedule, allocation=allocation), x)
    other.load_state_dict(model.state_dict())
    pdp_fx.step(model)
    with pytest.raises(RuntimeError, match=rf"another policy or .*allocation='{allocation}'"):
        other.load_state_dict(model.state_dict())


def test_a_checkpoint_from_before_the_ramp_of_other_channels_leaves_a_model_that_converts() -> None:
    model = prepared(Channels(ratio=0.25))
    model.load_state_dict(prepared(Channels(ratio=0.5)).state_dict())
    for _ in range(5):
        pdp_fx.step(model)
    pdp_fx.convert(model)


@every_rule
def test_a_checkpoint_that_is_resumed_on_another_ramp_is_at_once_where_that_ramp_is(rule: Rule) -> None:
    longer = Schedule(start=1, epsilon=0.1, per="step")
    model, slow, resumed = prepared(rule), prepared(rule, longer), prepared(rule, longer)
    for _ in range(3):
        pdp_fx.step(model)
        pdp_fx.step(slow)
    resumed.load_state_dict(model.state_dict())
    assert state(resumed).share == pytest.approx(0.2)
    for (_, mask), (_, other) in zip(state(resumed).mask_items(), state(slow).mask_items(), strict=True):
        assert int(mask.count) == int(other.count)


@every_rule
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_that_was_emptied_is_whole_again_after_loading(rule: Rule, assign: bool) -> None:
    model = stepped(rule)
    emptied = prepared(rule).to("meta")
    if not assign:
        emptied.to_empty(device="cpu")
        for buffer in emptied.buffers():
            buffer.zero_()
    emptied.load_state_dict(model.state_dict(), assign=assign)
    x = batch(0)[0]
    assert torch.equal(emptied.eval()(x), model.eval()(x))
    assert torch.equal(pdp_fx.convert(emptied)(x), pdp_fx.convert(model)(x))


def _sevens(like: Tensor, **options: Any) -> Tensor:
    """Memory as it may come."""
    return torch.full_like(like, 7, **options)


@every_rule
def test_a_model_that_was_emptied_begins_anew_with_a_dense_checkpoint(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied, dense = stepped(rule).to("meta"), Net()
    monkeypatch.setattr(torch, "empty_like", _sevens)
    emptied.to_empty(device="cpu").load_state_dict(dense.state_dict())
    x = batch(0)[0]
    assert torch.equal(emptied.eval()(x), dense.eval()(x))
    fresh = prepared(rule)
    fresh.load_state_dict(dense.state_dict())
    for _ in range(6):
        for model in (emptied, fresh):
            pdp_fx.step(model)
    assert pruned_counts(emptied) == pruned_counts(fresh)
    assert torch.equal(emptied(x), fresh.eval()(x))


class Scaled(WeightPolicy):
    """A policy with a parameter of its own."""

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.scale = nn.Parameter(torch.ones(()))

    def soft(self, weight: Tensor) -> Tensor:
        return self.hard(weight) * self.scale


def test_a_dense_checkpoint_has_nothing_for_the_parameters_of_a_policy_that_was_emptied() -> None:
    rule = Unstructured(0.5, policy=Scaled)
    emptied = prepared(rule).to("meta").to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"Missing key.*pdp\.masks\.\w+\.scale"):
        emptied.load_state_dict(Net().state_dict())
    prepared(rule).load_state_dict(Net().state_dict())


@pytest.mark.parametrize(
    ("saved", "mine", "gone"),
    [
        (Unstructured(0.5), Unstructured(0.9), 0.9),
        (NM(2, 4), NM(1, 4), 0.75),
        (Channels(ratio=0.25), Channels(ratio=0.75), None),
    ],
)
def test_a_checkpoint_that_is_refused_leaves_the_schedule_as_it_was(
    saved: Rule, mine: Rule, gone: float | None
) -> None:
    trained, model, fresh = stepped(saved), prepared(mine), prepared(mine)
    checkpoint = trained.state_dict()
    with pytest.raises(RuntimeError, match=r"begin with 'pdp\.'"):
        model.load_state_dict(checkpoint)
    assert int(state(model).counter) == 0
    weights = {key: value for key, value in checkpoint.items() if not key.startswith("pdp.")}
    for each in (model, fresh):
        each.load_state_dict(weights)
        for _ in range(6):
            pdp_fx.step(each)
    assert pruned_counts(model) == pruned_counts(fresh)
    if gone is not None:
        weights_left = [p for p in pdp_fx.convert(model).parameters() if p.ndim > 1]
        zeros, size = (sum(int(f(p)) for p in weights_left) for f in (lambda p: (p == 0).sum(), Tensor.numel))
        assert zeros / size == pytest.approx(gone, abs=0.01)


SAME_TOTAL = PruneSpec(
    None, {"0": Unstructured(0.25), "2": Unstructured(0.75)}, Schedule(0, 0.5), allocation="uniform"
)


@pytest.mark.parametrize(
    ("saved", "mine", "message"),
    [
        (
            SAME_TOTAL,
            PruneSpec(Unstructured(0.5), schedule=Schedule(0, 0.5), allocation="uniform"),
            "targets in 0_weight are 64 weights, but .* for 128 weights",
        ),
        (
            PruneSpec(None, SAME_TOTAL.overrides, Schedule(0, 0.5)),
            PruneSpec(Unstructured(0.5), schedule=Schedule(0, 0.5)),
            r"follow other rules, .* than Unstructured\(ratio=0.5\) with",
        ),
        (
            PruneSpec(Unstructured(0.5), schedule=Schedule(0, 0.5)),
            PruneSpec(Unstructured(0.5), schedule=Schedule(0, 0.5), min_keep=1.0),
            "another way of allocation, than .* min_keep=1",
        ),
        (
            PruneSpec(Unstructured(0.5), schedule=Schedule(100, 0.5, per="step")),
            PruneSpec(Unstructured(0.5), schedule=Schedule(100, 0.5)),
            "schedule counts steps, and the spec's per='epoch'",
        ),
    ],
    ids=["uniform", "global", "min_keep", "per"],
)
def test_a_checkpoint_of_another_spec_with_the_same_total_is_refused(
    saved: PruneSpec, mine: PruneSpec, message: str
) -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
    model = pdp_fx.prepare(net, saved, x)
    pdp_fx.step(model)
    with pytest.raises(RuntimeError, match=message):
        pdp_fx.prepare(net, mine, x).load_state_dict(model.state_dict())
    pdp_fx.prepare(net, saved, x).load_state_dict(model.state_dict())


@every_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_checkpoint_whose_whole_numbers_were_cast_is_refused(rule: Rule, dtype: torch.dtype) -> None:
    cast = {key: value.to(dtype) for key, value in stepped(rule).state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"whole numbers of the schedule are {dtype} in the checkpoint"):
        prepared(rule).load_state_dict(cast)


@every_rule
def test_loading_does_not_go_by_the_default_device(rule: Rule) -> None:
    model, saved = prepared(rule), stepped(rule)
    with torch.device("meta"):
        model.load_state_dict(saved.state_dict())
    assert pruned_counts(model) == pruned_counts(saved)


def test_what_is_no_tensor_in_a_checkpoint_is_told_by_torch() -> None:
    arrays = {key: value.numpy() for key, value in stepped(NM(2, 4)).state_dict().items()}
    with pytest.raises(RuntimeError, match="expected torch.Tensor or Tensor-like object"):
        prepared(NM(2, 4)).load_state_dict(arrays)
