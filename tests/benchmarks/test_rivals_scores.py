"""The rivals with trained scores, and Spartan, against their equations written out once more, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.rivals import CS, Movement, OptG, Spartan
from benchmarks.rivals.optg import ramp
from benchmarks.rivals.spartan import balance
from tests.benchmarks.rival_setup import at, close, gradients, marked, pruning, ranked, unstructured, weight


def fill(score: nn.Parameter, seed: int = 7) -> Tensor:
    """Give a score values, no two alike."""
    with torch.no_grad():
        score.copy_(
            torch.randn(score.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        )
    return score.detach()


@pytest.mark.parametrize("start", [0.0, -1.0])
def test_cs_begins_with_a_mask_of_ones_and_follows_its_sigmoid(start: float) -> None:
    w = weight(4, 5)
    mask = CS(unstructured(w), start=start, strength=0.3)
    close(mask(w), w)
    s, upstream = fill(mask.score), torch.randn(4, 5, dtype=torch.float64)
    at([mask], [w], 40, 0.0, 500)
    beta, scale = 200 ** (40 / 84), 1 / (1 / (1 + math.exp(-start)))
    m = torch.sigmoid(beta * s) * scale
    close(mask(w), w * m)
    grad, score_grad = gradients(lambda: mask(w), upstream, w, mask.score)
    close(grad, upstream * m)
    slope = beta * torch.sigmoid(beta * s) * torch.sigmoid(-beta * s) * scale
    close(score_grad, upstream * w.detach() * slope)
    penalty = mask.penalty(w)
    assert penalty is not None
    close(penalty, 0.3 * m.sum())
    (score_grad,) = torch.autograd.grad(penalty, mask.score)
    close(score_grad, 0.3 * slope)


def test_cs_goes_through_its_rounds_and_draws_the_ticket() -> None:
    w = weight(4, 5)
    mask = CS(unstructured(w), start=-0.2, epochs=5, rounds=3)
    betas: list[float] = []
    for epoch in range(15):
        s = fill(mask.score, seed=epoch).clone()
        at([mask], [w], epoch, 0.0, 20)
        betas.append(float(mask.beta))
        assert torch.equal(mask.score.detach(), s.clamp(max=-0.2) if epoch in (5, 10) else s)
    assert betas == pytest.approx(3 * [200 ** (place / 4) for place in range(5)])
    assert betas[4] == pytest.approx(200)
    assert not bool(mask.ticket)
    fill(mask.score)[0, 0] = 0.0
    drawn = mask.score.detach().clone()
    at([mask], [w], 15, 0.0, 20)
    assert torch.equal(mask.score.detach(), drawn)
    assert bool(mask.ticket)
    assert CS.drawn(15, 5, 3)
    expected = w * (mask.score > 0) * (1 + math.exp(0.2))
    close(mask(w), expected)
    close(mask.eval()(w), expected)
    assert mask.penalty(w) is None
    assert torch.equal(mask.pruned(w), mask.score <= 0)


def test_movement_masks_the_lowest_scores_and_trains_them_through_the_mask() -> None:
    w = weight(4, 5)
    mask, upstream = pruning(Movement(unstructured(w)), 12), torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(mask.pruned(w), marked((4, 5), range(12)))
    gone = marked((4, 5), fill(mask.score).flatten().argsort()[:12].tolist())
    assert torch.equal(mask(w), w.masked_fill(gone, 0.0))
    grad, score_grad = gradients(lambda: mask(w), upstream, w, mask.score)
    assert torch.equal(grad, upstream.masked_fill(gone, 0.0))
    assert torch.equal(score_grad, upstream * w.detach())


def test_optg_ramps_over_the_middle_of_the_training() -> None:
    assert ramp(80, 160, 1.0) == 0.5
    assert ramp(0, 160, 1.0) < 1e-30
    assert ramp(84, 160, 1.0) == pytest.approx(1 / (1 + math.exp(-4)))
    assert ramp(159, 160, 1.0) == pytest.approx(1.0)


def test_optg_gives_each_layer_the_rate_of_one_threshold_and_freezes_its_masks() -> None:
    w, v = weight(3, 10), weight(7, 10, seed=1)
    masks = [OptG(unstructured(x, 0.8), beta=0.5) for x in (w, v)]
    at(masks, [w, v], 0, 0.0, 20)
    assert all(bool(mask.keep.all()) for mask in masks)
    scores = [fill(mask.score, seed) for seed, mask in enumerate(masks)]
    at(masks, [w, v], 11, 0.0, 20)
    kept = math.floor((1 - 0.8 / (1 + math.exp(-0.5))) * 100)
    threshold = sorted(torch.cat([s.flatten() for s in scores]).tolist())[100 - kept]
    for mask, score in zip(masks, scores, strict=True):
        assert torch.equal(mask.keep, score >= threshold)
    assert sum(int(mask.keep.sum()) for mask in masks) == kept
    upstream = torch.randn(3, 10, dtype=torch.float64)
    grad, score_grad = gradients(lambda: masks[0](w), upstream, w, masks[0].score)
    assert torch.equal(grad, upstream * masks[0].keep)
    assert torch.equal(score_grad, upstream * w.detach())
    before = masks[0].keep.clone()
    fill(masks[0].score, 99)
    assert torch.equal(masks[0](w) != 0, before)
    at(masks, [w, v], 20, 1.0, 20)
    assert torch.equal(masks[0].keep, before)


def test_optg_keeps_ties_at_its_threshold() -> None:
    w = weight(4, 5)
    mask = OptG(unstructured(w, 0.5), beta=9.0)
    at([mask], [w], 19, 1.0, 20)
    assert bool(mask.keep.all())


def spartan(ratio: float = 0.7) -> tuple[list[Spartan], list[nn.Parameter]]:
    weights = [weight(4, 10), weight(6, 10, seed=1)]
    return [Spartan(unstructured(x, ratio)) for x in weights], weights


def balanced(weights: list[Tensor], beta: float, budget: int) -> tuple[list[Tensor], float]:
    """The soft masks that sum to the budget, by bisection."""
    low, high = -1000.0, 1000.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        total = sum(float(torch.sigmoid(beta * w.abs() + middle).sum()) for w in weights)
        low, high = (low, middle) if total > budget else (middle, high)
    return [torch.sigmoid(beta * w.abs() + low) for w in weights], low


def test_spartan_is_dense_at_first_then_spends_one_budget_over_all_layers() -> None:
    masks, weights = spartan()
    at(masks, weights, 0, 0.0, 100)
    assert all(torch.equal(mask(w), w) for mask, w in zip(masks, weights, strict=True))
    at(masks, weights, 10, 0.0, 100)
    soft, _ = balanced([w.detach() for w in weights], 1 + 19 * 0.1 / 0.8, 100 - 35)
    order = ranked(torch.cat([w.abs().flatten() for w in weights]))
    stay = marked((100,), order[35:]).split([40, 60])
    for mask, w, m, kept in zip(masks, weights, soft, stay, strict=True):
        expected = w.detach() * m * kept.view(w.shape)
        close(mask(w), expected, rtol=1e-6, atol=1e-7)
        close(mask.eval()(w), expected, rtol=1e-6, atol=1e-7)
        mask.train()


def test_spartan_goes_through_the_soft_mask_and_its_shift_over_all_layers() -> None:
    masks, weights = spartan()
    at(masks, weights, 40, 0.0, 100)
    beta, budget = 1 + 19 * 0.5, 30
    soft, _ = balanced([w.detach() for w in weights], beta, budget)
    upstream = [torch.randn(w.shape, dtype=torch.float64) for w in weights]
    total = sum((mask(w) * g).sum() for mask, w, g in zip(masks, weights, upstream, strict=True))
    grads = torch.autograd.grad(torch.as_tensor(total), weights)
    through = [g * w.detach() for g, w in zip(upstream, weights, strict=True)]
    slope = [m * (1 - m) for m in soft]
    spread = budget - sum(float((m * m).sum()) for m in soft)
    mean = sum(float((g * s).sum()) for g, s in zip(through, slope, strict=True)) / spread
    for grad, w, g, m, gm, s in zip(grads, weights, upstream, soft, through, slope, strict=True):
        expected = g * m + beta * s * (gm - mean) * w.detach().sign()
        close(grad, expected, rtol=1e-5, atol=1e-6)


def test_spartan_gradient_is_that_of_numerical_differences_of_the_soft_part() -> None:
    masks, weights = spartan()
    at(masks, weights, 40, 0.0, 100)
    upstream = [torch.randn(w.shape, dtype=torch.float64) for w in weights]
    total = sum((mask(w) * g).sum() for mask, w, g in zip(masks, weights, upstream, strict=True))
    (grad, _) = torch.autograd.grad(torch.as_tensor(total), weights)

    def soft_loss(change: float) -> float:
        moved = [weights[0].detach().clone(), weights[1].detach()]
        moved[0][1, 3] += change
        soft, _ = balanced(moved, 1 + 19 * 0.5, 30)
        return sum(float((w * m * g).sum()) for w, m, g in zip(moved, soft, upstream, strict=True))

    numerical = (soft_loss(1e-5) - soft_loss(-1e-5)) / 2e-5
    assert float(grad[1, 3]) == pytest.approx(numerical, rel=1e-4)


def test_spartan_freezes_its_masks_for_the_last_fifth() -> None:
    masks, weights = spartan()
    at(masks, weights, 79, 0.0, 100)
    assert not bool(masks[0].frozen)
    at(masks, weights, 80, 0.0, 100)
    fixed = [mask.eval()(w).detach() / w.detach() for mask, w in zip(masks, weights, strict=True)]
    assert sum(int((mask == 0).sum()) for mask in fixed) == 70
    with torch.no_grad():
        weights[0].mul_(-3)
    at(masks, weights, 99, 0.0, 100)
    close(masks[0].train()(weights[0]), weights[0] * fixed[0])
    assert torch.equal(masks[0].pruned(weights[0]), fixed[0] == 0)
    (grad,) = gradients(lambda: masks[0](weights[0]), torch.ones(4, 10, dtype=torch.float64), weights[0])
    close(grad, fixed[0])


@pytest.mark.parametrize("beta", [1.0, 20.0, 300.0])
@pytest.mark.parametrize("budget", [1, 50, 999])
@pytest.mark.parametrize("start", [-500.0, 0.0, 40.0])
def test_the_budget_is_met_from_anywhere(beta: float, budget: int, start: float) -> None:
    magnitudes = weight(1000).detach().abs()
    mu = balance(magnitudes, beta, budget, torch.tensor(start, dtype=torch.float64))
    assert float(torch.sigmoid(beta * magnitudes + mu).sum()) == pytest.approx(budget, rel=1e-6)
