"""`PruneSpec(pruned_decay=...)`: the decay of pruned weights as a term of the loss."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import pdp_fx
from benchmarks.rivals import SRSTE
from pdp_fx import NM, Channels, PruneSpec, Schedule, SpecError, Unstructured
from pdp_fx.spec import Rule
from tests.training.nets import RULES, Net, batch, prepared, sgd, state, training_step

AT_ONCE = Schedule(start=0, epsilon=1.0, per="step")
weight_rules = pytest.mark.parametrize(
    "rule", [RULES["unstructured"], RULES["n:m"]], ids=["unstructured", "n:m"]
)


@weight_rules
def test_its_gradient_is_lambda_times_the_weight_where_it_is_pruned_now(rule: Rule) -> None:
    model = prepared(rule, pruned_decay=0.3)
    assert float(pdp_fx.penalty(model)) == 0
    for seed in range(3):
        training_step(model, sgd(model), seed)
    model.zero_grad()
    penalty = pdp_fx.penalty(model)
    penalty.backward()
    hidden = 0.0
    for _, mask in state(model).mask_items():
        weight = model.get_parameter(mask.parameters_read[0])
        gone = mask.pruned(weight)
        assert gone.any()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 0.3 * weight.detach() * gone)
        hidden += float(weight.detach()[gone].square().sum())
    assert float(penalty.detach()) == pytest.approx(0.15 * hidden, rel=1e-5)


def test_without_a_decay_no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(Unstructured(0.5))
    pdp_fx.step(model)
    monkeypatch.setattr("pdp_fx.api.parameters_of", lambda *_: pytest.fail("weights were read"))
    assert float(pdp_fx.penalty(model)) == 0


def test_with_hard_masks_it_is_the_gradient_of_sr_ste() -> None:
    torch.manual_seed(0)
    net, images, labels = Net(), *batch()
    theirs = pdp_fx.prepare(net, PruneSpec(NM(1, 4, policy=SRSTE), schedule=AT_ONCE), images)
    ours = pdp_fx.prepare(
        net, PruneSpec(NM(1, 4), schedule=AT_ONCE, forward="hard", pruned_decay=2e-4), images
    )
    gradients = list[dict[str, torch.Tensor]]()
    for model in (ours, theirs):
        pdp_fx.step(model)
        loss = functional.cross_entropy(model(images), labels) + pdp_fx.penalty(model)
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-5, atol=1e-8)


def test_it_reaches_the_parameters_of_a_computed_weight() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))
    spec = PruneSpec(Unstructured(0.5), schedule=AT_ONCE, forward="hard", pruned_decay=0.1)
    model = pdp_fx.prepare(net, spec, torch.randn(3, 8))
    pdp_fx.step(model)
    pdp_fx.penalty(model).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("parametrizations" in name for name in reached)


def test_half_precision_weights_have_it_in_single_precision() -> None:
    torch.manual_seed(0)
    net = nn.Linear(64, 64, dtype=torch.bfloat16)
    spec = PruneSpec(Unstructured(0.5), schedule=AT_ONCE, forward="hard", pruned_decay=0.1)
    model = pdp_fx.prepare(net, spec, torch.randn(2, 64, dtype=torch.bfloat16))
    pdp_fx.step(model)
    penalty = pdp_fx.penalty(model)
    assert penalty.dtype == torch.float32
    squares = net.weight.detach().double().square().flatten().sort().values
    assert float(penalty.detach()) == pytest.approx(0.05 * float(squares[:2048].sum()), rel=1e-3)


def test_the_printout_names_it() -> None:
    for rule in (Unstructured(0.5), NM(2, 4)):
        assert "pruned_decay=0.3" in str(prepared(rule, pruned_decay=0.3))
        assert "pruned_decay" not in str(prepared(rule))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "2e-4"])
def test_what_is_no_number_from_0_up_is_refused(value: float) -> None:
    with pytest.raises(SpecError, match="pruned_decay"):
        PruneSpec(Unstructured(0.5), pruned_decay=value)


def test_a_spec_of_channels_alone_refuses_it_and_a_mixed_one_does_not() -> None:
    with pytest.raises(SpecError, match="Channels, which have none"):
        PruneSpec(Channels(ratio=0.5), {"head": None}, pruned_decay=2e-4)
    mixed = PruneSpec(
        Channels(ratio=0.5), {"head": Unstructured(0.5)}, AT_ONCE, forward="hard", pruned_decay=2e-4
    )
    model = pdp_fx.prepare(Net(), mixed, batch()[0])
    pdp_fx.step(model)
    pdp_fx.penalty(model).backward()
    reached = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    assert reached == ["head.weight"]
