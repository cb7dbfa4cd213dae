"""The masks of the ablations against their equations, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from benchmarks.ablation_masks import RawNorm, ThroughThreshold, mask_before_norms
from benchmarks.resnet_cifar import ResNet20
from pdp_fx import Channels, MaskSite, PruneSpec, Schedule, Unstructured
from pdp_fx.masks import WeightMask
from pdp_fx.policy import Producer
from pdp_fx.softness import Softness
from tests.benchmarks.rival_setup import close, gradients, marked, pruning, ranked, weight

TAU = 0.05
EXAMPLE = torch.zeros(2, 3, 32, 32)


def site(w: Tensor, tau: Softness | float = TAU) -> MaskSite:
    return MaskSite(("w",), Unstructured(0.5), tau, (w,))


def test_a_hard_mask_follows_the_ramp_and_lets_every_gradient_through() -> None:
    w, upstream = weight(4, 5), torch.randn(4, 5, dtype=torch.float64)
    mask = pruning(WeightMask(site(w, Softness(TAU, hard=True))), 16)
    mask.advance(0.5)
    assert torch.equal(mask(w), w.masked_fill(marked((4, 5), ranked(w.abs())[:8]), 0.0))
    (grad,) = gradients(lambda: mask(w), upstream, w)
    assert torch.equal(grad, upstream)


def test_a_gradient_through_the_threshold_changes_two_weights_only() -> None:
    w, upstream = weight(4, 5), torch.randn(4, 5, dtype=torch.float64)
    count = 8
    through, constant = (pruning(kind(site(w)), count) for kind in (ThroughThreshold, WeightMask))
    close(through(w), constant(w))
    (found,) = gradients(lambda: through(w), upstream, w)
    (usual,) = gradients(lambda: constant(w), upstream, w)

    around = [ranked(w.abs())[place] for place in (count - 1, count)]
    values = w.detach()
    t = float(values.abs().flatten()[around].mean())
    m = torch.sigmoid((values.square() - t * t) / TAU)
    total = float((upstream * values * m * (1 - m)).sum())
    expected = usual.clone().flatten()
    expected[around] -= t / TAU * values.sign().flatten()[around] * total
    close(found, expected.view(4, 5))
    assert float((found - usual).abs().max()) > 1e-3


@pytest.mark.parametrize("count", [0, 1, 7, 19])
def test_the_gradient_through_the_threshold_is_the_numerical_one(count: int) -> None:
    w = weight(4, 5)
    mask = pruning(ThroughThreshold(site(w)), count)
    assert torch.autograd.gradcheck(mask, (w,))


def test_a_relative_tau_is_a_constant_even_if_the_threshold_is_none() -> None:
    w, upstream = weight(30), torch.randn(30, dtype=torch.float64)
    tau = 0.1 * float(w.detach().square().mean())
    relative = pruning(ThroughThreshold(site(w, Softness(0.1, relative=True))), 20)
    absolute = pruning(ThroughThreshold(site(w, tau)), 20)
    (found,), (expected,) = (gradients(lambda m=m: m(w), upstream, w) for m in (relative, absolute))
    close(found, expected)


def test_raw_norms_are_those_of_all_weights_that_make_a_channel() -> None:
    w, v = weight(4, 3, 2, 2), weight(6, 5, seed=1)
    producers = (Producer(0, None), Producer(0, (-1, 2, 0, 1, 3, -1)))
    where = MaskSite(("w", "v"), Channels(0.5), TAU, (w, v), producers, 4)
    made = torch.tensor([2, 3, 1, 4])
    norms = (w.detach().square().sum((1, 2, 3)) + v.detach().square().sum(1)[made]).sqrt()
    mask = RawNorm(where)
    mask.target.fill_(2)
    mask.advance(1.0)
    close(mask.scores(w, v), norms, rtol=1e-6)
    order = norms.argsort()
    t = norms[order[1:3]].mean()
    expected = torch.sigmoid((norms.square() - t.square()) / TAU)
    close(mask(w, v), expected, rtol=1e-6)
    close(mask.values(w, v), expected, rtol=1e-6)
    assert torch.equal(mask.pruned(w, v), norms < t)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.bn1(self.conv1(x)).relu()).mean((2, 3))


def prepared(model: nn.Module) -> nn.Module:
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(0, 1.0), tau=1e-2)
    found = pdp_fx.prepare(model, spec, EXAMPLE)
    pdp_fx.step(found)
    return found


def test_a_mask_ahead_of_a_norm_prunes_weights_and_leaves_a_constant() -> None:
    torch.manual_seed(0)
    after = prepared(Pair())
    before = copy.deepcopy(after)
    mask_before_norms(before)
    assert list(before.state_dict()) == list(after.state_dict())
    conv1, bn1, conv2 = (before.get_submodule(name) for name in ("conv1", "bn1", "conv2"))
    nn.init.normal_(bn1.get_parameter("bias"))
    images = torch.randn(2, 3, 32, 32)
    rows: Tensor = after.get_submodule("pdp.masks.conv1")(conv1.weight).detach()
    assert 0 < float(rows.min()) < 0.5 < float(rows.max()) < 1

    plain = nn.functional.conv2d(images, rows.view(6, 1, 1, 1) * conv1.get_parameter("weight"))
    frozen = copy.deepcopy(bn1)
    close(before(images), conv2(frozen(plain).relu()).mean((2, 3)), rtol=1e-5, atol=1e-6)

    before.eval()
    gone = before.get_submodule("pdp.masks.conv1")(conv1.weight) == 0
    assert int(gone.sum()) == 3
    kept = ~gone.view(6, 1, 1, 1) * conv1.get_parameter("weight")
    constants = bn1(nn.functional.conv2d(images, kept)).detach()[:, gone].transpose(0, 1).flatten(1)
    assert torch.equal(constants.amin(1), constants.amax(1))
    assert float(constants.abs().min()) > 0
    after.load_state_dict(before.state_dict())
    small = pdp_fx.convert(after.eval())
    assert float((small(images) - before(images)).abs().max().detach()) > 1e-3


def test_a_residual_net_trains_with_masks_ahead_of_norms_and_others_are_refused() -> None:
    torch.manual_seed(0)
    model = prepared(ResNet20())
    mask_before_norms(model)
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="whole rows"):
        mask_before_norms(pdp_fx.prepare(ResNet20(), PruneSpec(Unstructured(0.5)), EXAMPLE))
    with pytest.raises(ValueError, match="whole rows"):
        mask_before_norms(ResNet20())
