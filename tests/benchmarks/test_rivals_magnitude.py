"""The rivals that go by magnitude, each against its equations written out once more, in float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from benchmarks.methods import METHODS, Budget
from benchmarks.rivals import ACDC, DNW, GMP, SRSTE, ST3, STR, Feather, Fixed, GraNet
from benchmarks.rivals.acdc import phases
from benchmarks.rivals.granet import erk
from tests.benchmarks.rival_setup import (
    at,
    close,
    gradients,
    marked,
    pattern,
    pruning,
    ranked,
    unstructured,
    weight,
)


def test_gmp_zeroes_the_smallest_and_stops_their_gradient() -> None:
    w = weight(4, 5)
    mask, upstream = pruning(GMP(unstructured(w)), 7), torch.randn(4, 5, dtype=torch.float64)
    gone = marked((4, 5), ranked(w.abs())[:7])
    assert torch.equal(mask(w), w.masked_fill(gone, 0.0))
    (grad,) = gradients(lambda: mask(w), upstream, w)
    assert torch.equal(grad, upstream.masked_fill(gone, 0.0))
    assert bool((w[gone] != 0).all())


def test_gmp_lets_a_weight_return_when_it_has_grown() -> None:
    w = weight(10)
    mask = pruning(GMP(unstructured(w)), 5)
    least = ranked(w.abs())[0]
    with torch.no_grad():
        w[least] = 9.0
    assert float(mask(w)[least].detach()) == 9.0
    assert int((mask(w) == 0).sum()) == 5


def test_dnw_is_at_its_full_ratio_at_once_and_passes_every_gradient() -> None:
    w = weight(4, 5)
    mask, upstream = DNW(unstructured(w)), torch.randn(4, 5, dtype=torch.float64)
    mask.target.fill_(15)
    mask.advance(0.01)
    assert torch.equal(mask(w), w.masked_fill(marked((4, 5), ranked(w.abs())[:15]), 0.0))
    (grad,) = gradients(lambda: mask(w), upstream, w)
    assert torch.equal(grad, upstream)


def test_str_shrinks_by_the_sigmoid_of_its_score_and_trains_it() -> None:
    w = weight(4, 5)
    mask, upstream = STR(unstructured(w), start=-0.4), torch.randn(4, 5, dtype=torch.float64)
    s = 1 / (1 + math.exp(0.4))
    kept = w.abs() > s
    expected = torch.where(kept, w - s * w.sign(), 0.0)
    close(mask(w), expected)
    grad, score_grad = gradients(lambda: mask(w), upstream, w, mask.score)
    assert torch.equal(grad, upstream * kept)
    by_hand = -s * (1 - s) * float((upstream * w.detach().sign())[kept].sum())
    assert score_grad.item() == pytest.approx(by_hand, rel=1e-12)
    assert torch.equal(mask.pruned(w), ~kept)
    assert torch.equal(mask.eval()(w) == 0, ~kept)


@pytest.mark.parametrize(("keep", "of"), [(2, 4), (4, 8), (1, 4), (2, 8)])
@pytest.mark.parametrize("shape", [(3, 8), (3, 16, 2, 2)])
def test_sr_ste_keeps_the_largest_of_each_group_and_pulls_the_others_to_zero(
    keep: int, of: int, shape: tuple[int, ...]
) -> None:
    w = weight(*shape)
    mask, upstream = SRSTE(pattern(w, keep, of), decay=0.3), torch.randn(*shape, dtype=torch.float64)
    kept = torch.zeros(shape, dtype=torch.bool)
    for place in product(*[range(size) for size in (shape[0], *shape[2:])]):
        row, *rest = place
        for first in range(0, shape[1], of):
            members = [(row, channel, *rest) for channel in range(first, first + of)]
            for best in sorted(members, key=lambda index: -abs(float(w.detach()[index])))[:keep]:
                kept[best] = True
    assert torch.equal(mask(w), w * kept)
    (grad,) = gradients(lambda: mask(w), upstream, w)
    close(grad, upstream + 0.3 * (~kept) * w.detach())
    assert torch.equal(mask.eval()(w), w * kept)


def feather_by_hand(w: Tensor, t: float) -> Tensor:
    flat = [
        math.copysign((abs(v) ** 3 - t**3) ** (1 / 3), v) if abs(v) > t else 0.0 for v in w.flatten().tolist()
    ]
    return torch.tensor(flat, dtype=torch.float64).view(w.shape)


@pytest.mark.parametrize(("ratio", "theta"), [(0.9, 1.0), (0.95, 1.0), (0.96, 0.5)])
def test_feather_thresholds_all_layers_by_one_cube_and_scales_the_pruned_gradient(
    ratio: float, theta: float
) -> None:
    w, v = weight(4, 25), weight(5, 20, seed=1)
    masks = [Feather(unstructured(w, ratio)), Feather(unstructured(v, ratio))]
    at(masks, [w, v], 5, 0.5, 10)
    count = round(0.5 * ratio * 200)
    t = float(torch.cat([w.abs().flatten(), v.abs().flatten()]).detach().sort().values[count - 1])
    upstream = torch.randn(4, 25, dtype=torch.float64)
    close(masks[0](w), feather_by_hand(w.detach(), t))
    (grad,) = gradients(lambda: masks[0](w), upstream, w)
    assert torch.equal(grad, torch.where(w.abs() > t, upstream, theta * upstream))
    assert sum(int(mask.pruned(x).sum()) for mask, x in zip(masks, (w, v), strict=True)) == count
    assert torch.equal(masks[1].eval()(v) == 0, masks[1].pruned(v))


@pytest.mark.parametrize(("overall", "theta"), [(0.9, 1.0), (0.98, 0.5)])
def test_feather_scales_gradients_by_the_sparsity_of_the_net_in_every_layer(
    overall: float, theta: float
) -> None:
    net, counts = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), {"0": (99, 100), "1": (81, 100)}
    spec = METHODS["feather"](Budget(2, 4), None).spec(overall, {}, counts)
    masks = [module for module in pdp_fx.prepare(net, spec).modules() if isinstance(module, Feather)]
    assert [mask.theta for mask in masks] == [theta, theta]


def test_feather_and_st3_leave_weights_alone_before_their_ramp() -> None:
    w = weight(4, 25)
    for mask in (Feather(unstructured(w)), ST3(unstructured(w))):
        at([mask], [w], 0, 0.0, 10)
        close(mask(w), w)
        assert not bool(mask.pruned(w).any())


def st3_by_hand(w: Tensor, t: float) -> Tensor:
    rows: list[Tensor] = []
    for row in w:
        kept = (row.abs() > t).double()
        share = (float((row.abs() * kept).mean()) + 1e-6) / (float(row.abs().mean()) + 1e-6)
        rows.append(1.01 / (share + 0.01) * row.sign() * (row.abs() - t) * kept)
    return torch.stack(rows)


@pytest.mark.parametrize("scaled", [False, True])
def test_st3_shrinks_and_rescales_every_output_channel_with_an_identity_gradient(scaled: bool) -> None:
    w, v = weight(4, 5, 3, 3), weight(6, 20, seed=1)
    masks = [ST3(unstructured(x, 0.8), scaled=scaled) for x in (w, v)]
    at(masks, [w, v], 9, 1.0, 10)
    units = [math.sqrt(4 + 5 + 3 + 3), math.sqrt(6 + 20)] if scaled else [1.0, 1.0]
    both = torch.cat([units[0] * w.abs().flatten(), units[1] * v.abs().flatten()]).detach().sort().values
    t = float(both[round(0.8 * 300) - 1])
    upstream = torch.randn(4, 5, 3, 3, dtype=torch.float64)
    close(masks[0](w), st3_by_hand(w.detach(), t / units[0]))
    close(masks[1](v), st3_by_hand(v.detach(), t / units[1]))
    (grad,) = gradients(lambda: masks[0](w), upstream, w)
    assert torch.equal(grad, upstream)
    assert sum(int((mask.eval()(x) == 0).sum()) for mask, x in zip(masks, (w, v), strict=True)) == 240


def test_acdc_ranks_all_layers_when_it_compresses_and_restarts_pruned_weights_at_zero() -> None:
    w, v = weight(3, 10), weight(2, 10, seed=1)
    with torch.no_grad():
        v.mul_(0.2)
    masks = [ACDC(unstructured(x, 0.77), sparse=((2, 4), (6, 8))) for x in (w, v)]
    raw, kept = (w.detach().clone(), v.detach().clone()), math.ceil(50 * 0.23)
    at(masks, [w, v], 1, 0.0, 8)
    assert all(bool(mask.keep.all()) for mask in masks)
    at(masks, [w, v], 2, 0.0, 8)
    order = ranked(torch.cat([x.abs().flatten() for x in raw]))
    stay = marked((50,), order[50 - kept :])
    assert torch.equal(torch.cat([mask.keep.flatten() for mask in masks]), stay)
    assert torch.equal(w, raw[0] * masks[0].keep)
    (grad,) = gradients(lambda: masks[0](w), torch.ones_like(w), w)
    assert torch.equal(grad, masks[0].keep.double())
    with torch.no_grad():
        w.add_(0.01)
    at(masks, [w, v], 4, 0.0, 8)
    assert all(bool(mask.keep.all()) for mask in masks)
    assert torch.equal(w == 0, ~stay[:30].view(3, 10))
    at(masks, [w, v], 6, 0.0, 8)
    at(masks, [w, v], 8, 0.0, 8)
    assert sum(int(mask.keep.sum()) for mask in masks) == kept


def test_acdc_ranks_a_kept_weight_of_zero_above_those_that_are_pruned() -> None:
    w = weight(10)
    mask = ACDC(unstructured(w, 0.5), sparse=((1, 2), (2, 3)))
    at([mask], [w], 1, 0.0, 3)
    stay = mask.keep.clone()
    with torch.no_grad():
        w[stay.nonzero()[0]] = 0.0
    at([mask], [w], 2, 0.0, 3)
    assert torch.equal(mask.keep, stay)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 16, 120, 200])
def test_acdc_phases_scale_and_end_sparse(epochs: int) -> None:
    found = phases(epochs)
    assert found[-1][1] == epochs
    assert all(first < last for first, last in found)
    assert all(before[1] <= after[0] for before, after in zip(found, found[1:], strict=False))
    if epochs == 200:
        assert found == ((10, 30), (50, 70), (90, 110), (130, 150), (170, 200))
    if epochs == 16:
        assert found == ((1, 2), (4, 6), (7, 9), (10, 12), (14, 16))


def test_erk_follows_the_sums_of_shapes_and_caps_dense_layers() -> None:
    shapes = [(4, 3, 3, 3), (64, 64, 3, 3), (64, 32)]
    densities = erk(shapes, 0.2)
    sizes = [math.prod(shape) for shape in shapes]
    assert sum(d * n for d, n in zip(densities, sizes, strict=True)) == pytest.approx(0.2 * sum(sizes))
    assert densities[0] == 1.0
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    assert densities[1] / densities[2] == pytest.approx(raw[1] / raw[2]) or densities[2] == 1.0
    assert erk(shapes, 1.0) == pytest.approx([1.0, 1.0, 1.0])
    thin = erk(shapes, 0.01)
    assert max(thin) < 1
    assert [d / thin[0] for d in thin] == pytest.approx([each / raw[0] for each in raw])


def test_granet_follows_its_schedules() -> None:
    mask = GraNet(unstructured(weight(4, 5), 0.9), density=0.5)
    assert mask.density_at(0, 100) == 0.5
    assert mask.density_at(25, 100) == pytest.approx(0.5 - 0.4 * (1 - 0.5**3))
    assert mask.density_at(50, 100) == mask.density_at(80, 100) == pytest.approx(0.1)
    assert mask.swapped_at(0, 100) == 0.5
    assert mask.swapped_at(100, 100) == pytest.approx(0.005)
    assert mask.swapped_at(50, 100) == pytest.approx((0.5 + 0.005) / 2)


def test_granet_starts_at_random_then_prunes_by_magnitude_and_swaps_by_gradient() -> None:
    w, v = weight(8, 10), weight(12, 10, seed=1)
    masks = [GraNet(unstructured(x, 0.8), every=10, density=0.5) for x in (w, v)]
    at(masks, [w, v], 0, 0.0, 100)
    for mask, x, density in zip(masks, (w, v), erk([(8, 10), (12, 10)], 0.5), strict=True):
        assert int(mask.keep.sum()) == round(density * x.numel())
        assert torch.equal(x != 0, mask.keep)
    upstream = [torch.randn(x.shape, dtype=torch.float64) for x in (w, v)]
    for mask, x, gradient in zip(masks, (w, v), upstream, strict=True):
        (grad,) = gradients(lambda mask=mask, x=x: mask(x), gradient, x)
        assert torch.equal(grad, gradient * mask.keep)
    before, values = [mask.keep.clone() for mask in masks], [x.detach().clone() for x in (w, v)]
    at(masks, [w, v], 9, 0.0, 100)
    assert all(torch.equal(mask.keep, old) for mask, old in zip(masks, before, strict=True))
    at(masks, [w, v], 10, 0.0, 100)
    kept = round(200 * masks[0].density_at(10, 100))
    stay = marked((200,), ranked(torch.cat([x.abs().flatten() for x in values]))[200 - kept :])
    for mask, x, value, gradient, left in zip(
        masks, (w, v), values, upstream, stay.split([80, 120]), strict=True
    ):
        flat, size = value.flatten(), int(left.sum())
        count = math.ceil(masks[0].swapped_at(10, 100) * size)
        survivors = sorted(left.nonzero().flatten().tolist(), key=lambda i: abs(float(flat[i])))[count:]
        zero = [index for index in range(flat.numel()) if index not in survivors]
        grown = sorted(zero, key=lambda i: -abs(float(gradient.flatten()[i])))[:count]
        assert torch.equal(mask.keep, marked(x.shape, survivors + grown))
        assert torch.equal(x.detach(), value * marked(x.shape, survivors))


def test_granet_starts_layers_of_one_size_apart_with_unlike_masks() -> None:
    net, counts = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), {"0": (90, 100), "1": (90, 100)}
    spec = METHODS["granet"](Budget(2, 4), None).spec(0.9, {}, counts)
    first, second = (module for module in pdp_fx.prepare(net, spec).modules() if isinstance(module, GraNet))
    assert int(first.keep.sum()) == int(second.keep.sum()) == 50
    assert not first.keep.equal(second.keep)


@pytest.mark.parametrize("every", [7, 20])
def test_granet_reaches_its_target_though_no_change_falls_on_the_end_of_the_ramp(every: int) -> None:
    w = weight(20, 20)
    mask = GraNet(unstructured(w, 0.9), every=every)
    for step in range(101):
        gradients(lambda: mask(w), torch.randn(20, 20, dtype=torch.float64), w)
        with torch.no_grad():
            w.add_(torch.randn(20, 20, dtype=torch.float64))
        at([mask], [w], step, 0.0, 100)
    assert int(mask.keep.sum()) == 40
    assert int((w != 0).sum()) == 40


def test_a_fixed_mask_is_that_of_the_weights_at_the_start() -> None:
    w = weight(4, 5)
    mask = Fixed(unstructured(w, 0.4))
    gone = marked((4, 5), ranked(w.abs())[:8])
    nn.init.ones_(w)
    assert torch.equal(mask(w), (~gone).double())
