"""The channel scores against their equations written out once more, and what comes of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from benchmarks.rivals.channel_scores import ScoredChannels, dcp_style, nisp_style, scp_style
from pdp_fx import Channels, PruneSpec, Schedule
from tests.nets import mask_of


class Net(nn.Module):
    """Two 1x1 convolutions, the second inside a residual branch, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.conv3, self.bn3 = nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = (x + self.bn3(self.conv3(self.bn2(self.conv2(x)).relu()))).relu()
        return self.fc(x.mean((2, 3)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(5)
    net = Net()
    for norm in (net.bn1, net.bn2, net.bn3):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        if norm.running_var is not None:
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
        if norm.running_mean is not None:
            nn.init.uniform_(norm.running_mean, 20.0, 30.0)
    spec = PruneSpec(Channels(0.5, policy=ScoredChannels), schedule=Schedule(1, 1.0), allocation="uniform")
    return pdp_fx.prepare(net, spec, torch.ones(2, 3, 5, 5))


IMAGES = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 2


def loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IMAGES), LABELS)


def given(model: nn.Module, name: str) -> list[float]:
    mask = mask_of(model, name)
    assert isinstance(mask, ScoredChannels)
    return mask.given.tolist()


def test_dcp_style_scores_are_gradient_norms_of_the_readers(model: nn.Module) -> None:
    dcp_style(model, loss)
    names = ("conv2.weight", "conv3.weight", "fc.weight")
    weights = [model.get_parameter(name) for name in names]
    assert all(weight.grad is None for weight in weights)
    two, three, last = torch.autograd.grad(loss(model), weights)
    inner = [sum(abs(float(three[o, k, 0, 0])) for o in range(4)) for k in range(6)]
    stream = [
        sum(abs(float(two[o, k, 0, 0])) for o in range(6)) + sum(abs(float(last[o, k])) for o in range(2))
        for k in range(4)
    ]
    assert given(model, "conv2") == pytest.approx(inner, rel=1e-5)
    assert given(model, "conv1") == pytest.approx(stream, rel=1e-5)


def test_scp_style_scores_are_probabilities_to_pass_relu(model: nn.Module) -> None:
    scp_style(model, loss)

    def passed(name: str) -> list[float]:
        gamma, beta = (
            model.get_parameter(f"{name}.weight").tolist(),
            model.get_parameter(f"{name}.bias").tolist(),
        )
        return [0.5 * math.erfc(-b / (abs(g) * math.sqrt(2))) for g, b in zip(gamma, beta, strict=True)]

    assert given(model, "conv2") == pytest.approx(passed("bn2"), rel=1e-5)
    both = [max(a, b) for a, b in zip(passed("bn1"), passed("bn3"), strict=True)]
    assert given(model, "conv1") == pytest.approx(both, rel=1e-5)


def test_nisp_style_scores_go_back_through_absolute_weights(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nisp_style(model, loss)

    def scaled(conv: str, norm: str) -> Tensor:
        scale = (
            model.get_parameter(f"{norm}.weight").abs()
            / (model.get_buffer(f"{norm}.running_var") + 1e-5).sqrt()
        )
        return (scale[:, None] * model.get_parameter(f"{conv}.weight")[:, :, 0, 0].abs()).detach()

    features = model.get_parameter("fc.weight").detach().abs().sum(0)
    inner = scaled("conv3", "bn3").T @ features
    stream = features + scaled("conv2", "bn2").T @ inner
    assert given(model, "conv2") == pytest.approx(inner.tolist(), rel=1e-4)
    assert given(model, "conv1") == pytest.approx((features + stream).tolist(), rel=1e-4)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.endswith("given"))


@pytest.mark.parametrize("score", [dcp_style, scp_style, nisp_style])
def test_the_channels_of_least_score_go(score: object, model: nn.Module) -> None:
    assert callable(score)
    score(model, loss)
    for _ in range(2):
        pdp_fx.step(model)
    order = sorted(range(6), key=given(model, "conv2").__getitem__)
    stay = sorted(order[3:])
    small = pdp_fx.convert(model)
    kept = model.get_parameter("conv2.weight")[stay]
    assert small.get_parameter("conv2.weight").shape == (3, 2, 1, 1)
    assert kept.shape[0] == 3
    torch.testing.assert_close(small(IMAGES), model.eval()(IMAGES), rtol=1e-4, atol=1e-5)
