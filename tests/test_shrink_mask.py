"""Masks that rise from 0 at the threshold: values, gradients, exact counts, and models made with them."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import pdp_fx
from pdp_fx import PruneSpec, Schedule, ShrinkMask, SpecError, Unstructured
from pdp_fx.ops.threshold import threshold
from pdp_fx.policy import MaskSite
from tests.nets import at_once, net, pruned

RULE = Unstructured(0.6, policy=ShrinkMask)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def masked(count: int, softness: float = 1.0) -> ShrinkMask:
    mask = ShrinkMask(MaskSite(("w",), Unstructured(0.5), 1e-4), softness)
    mask.target.fill_(count)
    mask.advance(1.0)
    return mask


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * 0.05).to(dtype).requires_grad_()


@pytest.mark.parametrize("softness", [0.2, 1.0, 5.0])
def test_the_mask_is_the_stretched_one_of_the_paper(softness: float) -> None:
    w = weight(40, 30)
    t = float(threshold(w, torch.tensor(700)))
    m = 2 * torch.sigmoid((w.square() - t * t) / (softness * t * t)) - 1
    expected = torch.where(m > 0, m.clamp(min=1e-3), 0.0) * w
    for training in (True, False):
        torch.testing.assert_close(masked(700, softness).train(training)(w), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("softness", [0.0, -1.0, math.nan, math.inf, "1"])
def test_a_softness_that_is_no_number_above_0_is_refused(softness: float) -> None:
    with pytest.raises(SpecError, match=r"ShrinkMask: softness must be"):
        masked(1, softness)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 300, 1199])
def test_as_many_weights_are_zero_as_asked_for_ties_included(dtype: torch.dtype, count: int) -> None:
    w = weight(40, 30, dtype=dtype).detach().mul(100).round().add(0.5).div(64).to(dtype).requires_grad_()
    for training in (True, False):
        mask = masked(count).train(training)
        assert int((mask(w) == 0).sum()) == count
        assert torch.equal(mask(w) == 0, mask.pruned(w))
        assert mask(w).dtype == dtype


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes_while_nothing_is_pruned(training: bool) -> None:
    w = weight(6, 8)
    assert masked(0).train(training)(w) is w


def test_zeros_beyond_the_target_make_no_nan() -> None:
    w = torch.cat([torch.zeros(50), torch.ones(14)]).requires_grad_()
    given: Tensor = masked(20)(w)
    given.sum().backward()
    assert torch.equal(given, w)
    assert w.grad is not None
    assert bool(w.grad.isfinite().all())


def test_kept_weights_get_the_whole_gradient_and_pruned_ones_half() -> None:
    w = weight(10, 10)
    mask = masked(40)
    mask(w).backward(torch.full((10, 10), 3.0, dtype=w.dtype))
    assert w.grad is not None
    assert torch.equal(w.grad, torch.where(mask.pruned(w), 1.5, 3.0).double())


def test_in_eval_mode_kept_weights_get_their_share_of_the_gradient() -> None:
    w = weight(10, 10)
    mask = masked(40).eval()
    mask(w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, mask.values(w).double(), rtol=1e-6, atol=0)
    assert int((w.grad == 0).sum()) == 40


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    w, mask = weight(10, 10), masked(40)
    (expected,) = torch.autograd.grad(mask(w).square().sum(), w)
    recomputed = checkpoint(mask, w, use_reentrant=reentrant)
    assert isinstance(recomputed, Tensor)
    recomputed.square().sum().backward()
    assert w.grad is not None
    assert w.grad.equal(expected)


def test_a_threshold_that_is_not_read_gives_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    w, mask = weight(20, 20, dtype=torch.float32), masked(150)
    expected = mask(w)
    monkeypatch.setattr(ShrinkMask, "known_count", lambda self, weight: None)
    torch.testing.assert_close(mask(w), expected, rtol=1e-6, atol=0)
    mask.count.fill_(0)
    assert torch.equal(mask(w), w)


def test_torch_func_sees_the_same_values_and_gradients() -> None:
    w, mask = weight(8, 9), masked(30)
    mask(w).sum().backward()
    gradient = torch.func.grad(lambda value: mask(value).sum())(w.detach())
    assert w.grad is not None
    assert torch.equal(gradient, w.grad)


@pytest.mark.parametrize("allocation", ["global", "dynamic", "uniform"])
def test_the_converted_model_is_what_was_trained(allocation: str) -> None:
    model, x = net("residual")
    model, x = model.double(), x.double()
    prepared = pruned(model, at_once(RULE, allocation=allocation), x)  # pyright: ignore[reportArgumentType]
    small = pdp_fx.convert(prepared)
    assert torch.allclose(small(x), prepared.eval()(x), rtol=0, atol=1e-12)
    rows = pdp_fx.report(prepared).rows
    pruned_weights = [row.weights - row.left for row in rows]
    if allocation == "uniform":
        assert pruned_weights == [round(0.6 * row.weights) for row in rows]
    else:
        assert sum(pruned_weights) == round(0.6 * sum(row.weights for row in rows))


def test_compiled_training_has_the_losses_of_eager_training() -> None:
    model, x = net("residual")
    spec = PruneSpec(RULE, schedule=Schedule(0, 0.5), allocation="dynamic")
    eager = pdp_fx.prepare(model, spec, x)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(4):
        losses: list[float] = []
        for called, owner in ((eager, eager), (compiled, twin)):
            torch.manual_seed(0)
            loss = called(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in owner.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
                        parameter.grad = None
            pdp_fx.step(owner)
            losses.append(loss.item())
        assert math.isclose(*losses, rel_tol=1e-5)


def test_weights_above_the_threshold_shrink_and_those_far_above_stay() -> None:
    w = torch.linspace(0.0, 10.0, 101).requires_grad_()
    given: Tensor = masked(20)(w)
    share = (given / w)[21:].detach()
    assert bool((share.diff() >= 0).all())
    assert 0 < float(share[0]) < 0.1
    assert float(share[-1]) == pytest.approx(1, abs=1e-3)


def test_a_spec_with_it_is_written_and_read() -> None:
    spec = PruneSpec(RULE, allocation="dynamic")
    assert PruneSpec.from_toml(spec.to_toml()) == spec
