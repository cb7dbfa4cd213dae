"""Layers with explicit parameters compute what torch's own do, and keep the same statistics."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.ops.explicit import reclass, twin
from pdp_fx.ops.kinds import kind_of


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_keeps_the_statistics_of_its_plain_one(
    kind: Callable[..., nn.Module], momentum: float | None, tracks: bool, affine: bool
) -> None:
    torch.manual_seed(0)
    plain = kind(4, momentum=momentum, track_running_stats=tracks, affine=affine)
    found = kind_of(plain)
    assert found is not None
    explicit = reclass(copy.deepcopy(plain), found.explicit)
    for training in (True, True, True, False, True, False):
        x = torch.randn(3, 4, 5, 5) * 2 + 1
        assert explicit.train(training)(x).equal(plain.train(training)(x))
        theirs = dict(plain.named_buffers())
        assert all(buffer.equal(theirs[name]) for name, buffer in explicit.named_buffers())


def test_statistics_that_were_switched_off_after_they_were_made_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(4)
    plain(torch.randn(3, 4, 5, 5))
    plain.track_running_stats = False
    found = kind_of(plain)
    assert found is not None
    explicit = reclass(copy.deepcopy(plain), found.explicit)
    for training in (True, False):
        x = torch.randn(3, 4, 5, 5)
        assert explicit.train(training)(x).equal(plain.train(training)(x))
        theirs = dict(plain.named_buffers())
        assert all(buffer.equal(theirs[name]) for name, buffer in explicit.named_buffers())


class HoldsMethod(nn.Module):
    """Chooses one of its methods when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(1)), self.twice

    def twice(self, x: Tensor) -> Tensor:
        return x * self.scale * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def test_a_twin_runs_its_own_methods() -> None:
    module = HoldsMethod()
    copied = twin(module)
    copied.register_parameter("scale", nn.Parameter(torch.full((1,), 3.0)))
    assert (copied(torch.ones(1)).item(), module(torch.ones(1)).item()) == (6.0, 2.0)
