from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, SpecError, Unstructured
from pdp_fx.masks import Tempered
from pdp_fx.policy import MaskPolicy
from pdp_fx.softness import Softness
from pdp_fx.spec import Rule
from tests.training.nets import RULES, Net, batch, sgd, state, training_step

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RAMP = Schedule(start=0, epsilon=0.25, per="step")


def masked(
    rule: Rule,
    tau: float | str,
    tau_end: float | None = None,
    scale: float = 1.0,
    forward: Literal["soft", "hard"] = "soft",
) -> nn.Module:
    """A net half of the way, its weights scaled."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    spec = PruneSpec(rule, schedule=RAMP, tau=tau, tau_end=tau_end, forward=forward)
    model = pdp_fx.prepare(net, spec, batch()[0])
    for _ in range(2):
        pdp_fx.step(model)
    return model


def values(model: nn.Module) -> list[Tensor]:
    masks: list[tuple[str, MaskPolicy]] = state(model).mask_items()
    return [mask.values(*(model.get_parameter(name) for name in mask.parameters_read)) for _, mask in masks]


def test_tau_is_parsed_and_printed() -> None:
    assert Softness.parse(1e-4, None) == Softness(1e-4)
    assert Softness.parse("rel:0.1", 0.01) == Softness(0.1, 0.01, relative=True)
    assert [str(Softness(1e-4)), str(Softness(0.1, 0.01, relative=True))] == ["0.0001", "rel:0.1..0.01"]
    assert str(Softness(0.1, hard=True)) == "0.1, hard forward"
    assert Softness(1e-4).constant
    assert not Softness(1e-4, 1e-5).constant


@pytest.mark.parametrize("text", ["auto", "rel:", "rel:x", "rel:0", "rel:nan", "rel:inf", "0.1"])
def test_a_tau_that_is_no_number_and_not_relative_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"rel:0\.1"):
        PruneSpec(NM(2, 4), tau=text)


def test_tau_goes_to_its_end_geometrically() -> None:
    softness = Softness(1e-2, 1e-6)
    assert [softness.at(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([1e-2, 1e-4, 1e-6])


@every_rule
def test_a_relative_tau_means_the_same_at_every_scale(rule: Rule) -> None:
    small, large = values(masked(rule, "rel:0.1")), values(masked(rule, "rel:0.1", scale=10.0))
    for one, other in zip(small, large, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    absolute = zip(values(masked(rule, 1e-3)), values(masked(rule, 1e-3, scale=10.0)), strict=True)
    assert max(float((one - other).abs().max()) for one, other in absolute) > 0.1


@every_rule
def test_a_relative_tau_is_its_factor_times_the_mean_square(rule: Rule) -> None:
    model = masked(rule, "rel:0.5")
    for _, mask in state(model).mask_items():
        assert isinstance(mask, Tempered)
        weight = model.get_parameter(mask.parameters_read[0])
        if isinstance(rule, Channels):
            weight = torch.rand(8)
        expected = 0.5 * float(weight.detach().square().mean())
        assert float(mask.temperature(weight)) == pytest.approx(expected, rel=1e-5)


@every_rule
@pytest.mark.parametrize("tau", [1e-3, "rel:0.3"])
def test_a_falling_tau_hardens_the_masks_and_follows_the_schedule(rule: Rule, tau: float | str) -> None:
    soft, hard = masked(rule, tau), masked(rule, tau, tau_end=1e-9)
    both = zip(values(soft), values(hard), strict=True)
    assert any(float((b - b.round()).abs().sum()) < float((a - a.round()).abs().sum()) for a, b in both)
    again = masked(rule, tau, tau_end=1e-9)
    again.load_state_dict(hard.state_dict())
    for one, other in zip(values(hard), values(again), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4)])
def test_a_hard_forward_passes_the_gradient_to_all_weights(rule: Rule) -> None:
    model = masked(rule, 1e-4, forward="hard")
    for _, mask in state(model).mask_items():
        weight = model.get_parameter(mask.parameters_read[0]).detach().requires_grad_()
        given, shown = mask.train()(weight), mask.eval()(weight)
        assert given.equal(shown)
        assert not given.all()
        direction = torch.randn_like(given)
        assert torch.autograd.grad(given, weight, direction)[0].equal(direction)


def test_a_hard_forward_of_channels_has_the_gradient_of_soft_scores() -> None:
    soft, hard = (masked(Channels(ratio=0.5), "rel:1", forward=forward) for forward in ("soft", "hard"))
    for (_, one), (_, other) in zip(state(soft).mask_items(), state(hard).mask_items(), strict=True):
        weights = [hard.get_parameter(name).detach().requires_grad_() for name in other.parameters_read]
        given, wanted, shown = one(*weights), other(*weights), other.eval()(*weights)
        assert wanted.equal(shown)
        assert not given.equal(wanted)
        direction = torch.randn_like(given)
        gradients = [torch.autograd.grad(out, weights, direction) for out in (given, wanted)]
        for expected, got in zip(*gradients, strict=True):
            assert got.equal(expected)
            assert got.any()


@every_rule
def test_a_model_with_a_hard_forward_computes_in_training_what_it_converts_to(rule: Rule) -> None:
    model = masked(rule, "rel:1", forward="hard")
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    images = batch()[0]
    small = pdp_fx.convert(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images), small(images), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@every_rule
@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_a_relative_falling_tau_compiles_in_one_graph(rule: Rule, forward: Literal["soft", "hard"]) -> None:
    torch.compiler.reset()
    eager, twin = (masked(rule, "rel:0.3", 0.01, forward=forward) for _ in range(2))
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    eager_sgd, twin_sgd = sgd(eager), sgd(twin)
    for seed in range(4):
        expected = training_step(eager, eager_sgd, seed)
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            assert training_step(twin, twin_sgd, seed, compiled) == pytest.approx(expected, rel=1e-4)


@every_rule
def test_a_relative_tau_of_a_layer_of_zeros_is_not_zero(rule: Rule) -> None:
    model = masked(rule, "rel:0.1")
    with torch.no_grad():
        model.get_parameter("inner.weight").zero_()
    assert training_step(model, sgd(model), 0) < 10
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_model_in_bfloat16_keeps_a_falling_tau_exact() -> None:
    model = masked(Unstructured(0.5), 1e-3, tau_end=1e-7).bfloat16()
    masks = [mask for mask in state(model).modules() if isinstance(mask, Tempered)]
    taus = [mask.temperature(torch.ones(1)) for mask in masks]
    assert [float(tau) for tau in taus] == pytest.approx([1e-5] * len(taus), rel=1e-12)
