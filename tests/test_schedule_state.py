"""The counter, the targets and the counts, from the first step to the last, and across a checkpoint."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import fx, nn

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, SpecError, Unstructured
from pdp_fx.granularity import Rule
from pdp_fx.policy import MILLION
from pdp_fx.schedule import ranks_anew, share
from tests.nets import RULES, at_once, counts, mask_of, net, state

RAMP = Schedule(start=2, epsilon=0.3)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def trainer(rule: Rule) -> tuple[fx.GraphModule, torch.optim.Optimizer]:
    model, x = net("residual")
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=RAMP), x)
    return prepared, torch.optim.SGD(prepared.parameters(), lr=0.05, momentum=0.9)


def epoch(prepared: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    torch.manual_seed(number)
    prepared.train()
    optimizer.zero_grad()
    prepared(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    pdp_fx.step(prepared)


@every_rule
def test_every_step_prunes_what_the_schedule_says(rule: Rule) -> None:
    prepared, optimizer = trainer(rule)
    for number in range(1, 8):
        epoch(prepared, optimizer, number)
        assert int(state(prepared).counter) == number
        assert state(prepared).share == share(RAMP, number)
        for name, mask in state(prepared).mask_items():
            assert mask.allocated or number < RAMP.start
            assert int(mask.count) == round(share(RAMP, number) * int(mask.target))
            size = prepared.get_parameter(mask.parameters_read[0]).numel()
            groups = size // rule.of if isinstance(rule, NM) else 1
            assert counts(prepared)[name] == mask.pruned_now * groups
    assert state(prepared).share == 1.0


def test_targets_are_fixed_once_from_the_weights_at_the_start_of_the_ramp() -> None:
    prepared, _ = trainer(Unstructured(0.7))
    pdp_fx.step(prepared)
    assert not mask_of(prepared, "fc_weight").allocated
    with torch.no_grad():
        prepared.get_parameter("fc.weight").mul_(100)
    pdp_fx.step(prepared)
    targets = {name: int(mask.target) for name, mask in state(prepared).mask_items()}
    assert targets["fc_weight"] < 5
    assert sum(targets.values()) == round(0.7 * sum(w.numel() for w in pruned_weights(prepared)))
    with torch.no_grad():
        prepared.get_parameter("fc.weight").mul_(1e-4)
    for _ in range(5):
        pdp_fx.step(prepared)
    assert {name: int(mask.target) for name, mask in state(prepared).mask_items()} == targets
    assert counts(prepared) == targets


def pruned_weights(prepared: nn.Module) -> list[torch.Tensor]:
    return [prepared.get_parameter(mask.parameters_read[0]) for _, mask in state(prepared).mask_items()]


def test_groups_of_weights_ramp_in_millionths() -> None:
    prepared, optimizer = trainer(NM(2, 4))
    found: list[tuple[int, int]] = []
    for number in range(1, 8):
        epoch(prepared, optimizer, number)
        mask = mask_of(prepared, "fc_weight")
        found.append((int(mask.count), mask.pruned_now))
    assert found == [
        (0, 0),
        (0, 0),
        (600_000, 0),
        (1_200_000, 1),
        (1_800_000, 1),
        (2 * MILLION, 2),
        (2 * MILLION, 2),
    ]


@every_rule
@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(rule: Rule, stop: int) -> None:
    whole, optimizer = trainer(rule)
    for number in range(1, 8):
        epoch(whole, optimizer, number)

    first, optimizer = trainer(rule)
    for number in range(1, stop + 1):
        epoch(first, optimizer, number)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint: dict[str, Any] = torch.load(file, weights_only=True)
    assert int(checkpoint["model"]["pdp.counter"]) == stop

    second, optimizer = trainer(rule)
    second.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    for number in range(stop + 1, 8):
        epoch(second, optimizer, number)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert counts(second) == counts(whole)
    _, x = net("residual")
    torch.testing.assert_close(whole.eval()(x), second.eval()(x), rtol=0, atol=0)


def test_evaluation_right_after_loading_uses_the_loaded_masks() -> None:
    prepared, optimizer = trainer(Unstructured(0.7))
    for number in range(1, 8):
        epoch(prepared, optimizer, number)
    fresh, _ = trainer(Unstructured(0.7))
    fresh.load_state_dict(prepared.state_dict())
    _, x = net("residual")
    torch.testing.assert_close(fresh.eval()(x), prepared.eval()(x), rtol=0, atol=0)
    assert pdp_fx.convert(fresh)


def test_state_is_registered_in_graph_order() -> None:
    model, x = net("residual")
    prepared = pdp_fx.prepare(model, at_once(Channels(ratio=0.5), {"fc": Unstructured(0.5)}), x)
    assert [name for name in prepared.state_dict() if name.startswith("pdp")] == [
        "pdp.counter",
        "pdp.seal",
        "pdp.masks.fc_weight.units",
        "pdp.masks.stem_0.units",
        "pdp.masks.expand_0.units",
    ]


def test_broken_weights_are_found_when_the_targets_are_fixed() -> None:
    prepared, _ = trainer(Unstructured(0.7))
    pdp_fx.step(prepared)
    with torch.no_grad():
        prepared.get_parameter("fc.weight")[0, 0] = float("nan")
    with pytest.raises(SpecError, match=r"fc.weight: weights are NaN or infinite.*check the training"):
        pdp_fx.step(prepared)
    assert int(state(prepared).counter) == 1


def test_a_dynamic_allocation_follows_the_weights_until_the_ramp_is_over() -> None:
    model, x = net("residual")
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.7), schedule=RAMP, allocation="dynamic"), x)
    fc, mask, found = prepared.get_parameter("fc.weight"), mask_of(prepared, "fc_weight"), list[int]()
    for number in range(1, 9):
        with torch.no_grad():
            fc.mul_(100.0 if number % 2 else 0.01)
        pdp_fx.step(prepared)
        found.append(int(mask.target))
        if number >= RAMP.start:
            targets = [int(each.target) for _, each in state(prepared).mask_items()]
            sizes = [
                prepared.get_parameter(m.parameters_read[0]).numel() for _, m in state(prepared).mask_items()
            ]
            assert sum(targets) == round(0.7 * sum(sizes))
    assert RAMP.ramp_end == 6
    assert found[1] > found[2] < found[3] > found[4] < found[5]
    assert found[5:] == [found[5]] * 3


def grow(prepared: fx.GraphModule, steps: int) -> None:
    """Steps between which one layer grows, so that each ranking gives it less to lose."""
    for _ in range(steps):
        with torch.no_grad():
            prepared.get_parameter("fc.weight").mul_(1.5)
        pdp_fx.step(prepared)


def test_a_dynamic_allocation_goes_on_as_if_it_had_not_been_stopped() -> None:
    spec = PruneSpec(Unstructured(0.7), schedule=RAMP, allocation="dynamic")
    whole, again = (pdp_fx.prepare(net("residual")[0], spec, net("residual")[1]) for _ in range(2))
    grow(whole, 4)
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    grow(whole, 4)
    grow(again, 4)
    assert counts(again) == counts(whole)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


@pytest.mark.parametrize("length", [1, 7, 99, 100, 101, 5000, 123_457])
def test_layers_are_ranked_anew_about_a_hundred_times_and_last_at_the_end_of_the_ramp(length: int) -> None:
    ramp = Schedule(start=3, epsilon=1 / length, per="step")
    ranked = [counter for counter in range(ramp.ramp_end + 10) if ranks_anew(ramp, counter)]
    assert ranked[0] == 3
    assert ranked[-1] == ramp.ramp_end
    assert len(ranked) <= 102
    assert len(ranked) >= min(length, 50)
