"""Classes of the model's own that are no tensors and say what torch functions do with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured
from tests.channels.checks import check_converted, train
from tests.tracing.checks import exact

relu: Callable[[Any], Any] = torch.relu
cat: Callable[..., Tensor] = torch.cat
linear: Callable[..., Tensor] = functional.linear


def plain(found: Any) -> Any:
    """Tensors in the place of scaled numbers."""
    if isinstance(found, Scaled | Named):
        return found.value * found.scale
    return type(found)(map(plain, found)) if isinstance(found, tuple | list) else found


class Override:
    """How torch functions take scaled numbers: only ReLU keeps the scale."""

    value: Tensor
    scale: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.relu:
            return type(args[0])(torch.relu(args[0].value), args[0].scale)
        return func(*plain(args), **{name: plain(value) for name, value in (kwargs or {}).items()})


class Scaled(Override):
    """Numbers with a scale."""

    def __init__(self, value: Tensor, scale: Tensor) -> None:
        self.value, self.scale = value, scale


class Pair(NamedTuple):
    value: Tensor
    scale: Tensor


class Named(Pair, Override):
    """Numbers with a scale that look like two tensors."""


class ScaledLayers(nn.Module):
    """Weights and activations that are numbers with a scale."""

    def __init__(self, kind: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(16, 3)

    def scaled(self, x: Tensor) -> Any:
        scale = x.detach().abs().amax() / 7
        return self.kind((x / scale).tanh(), scale)

    def forward(self, x: Tensor) -> Tensor:
        x = linear(x, self.scaled(self.first.weight), bias=self.first.bias)
        y = linear(relu(self.scaled(x)), weight=self.scaled(self.second.weight))
        result: Tensor = self.third(cat([self.scaled(x), y], dim=-1))
        return result


@pytest.mark.parametrize("kind", [Scaled, Named])
def test_what_they_do_is_followed_and_their_weights_are_pruned(kind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6).double()
    model = ScaledLayers(kind).double()
    exact(model, x, x[:3] * 2)
    gm = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x)
    assert len(gm.get_submodule("pdp.masks")._modules) == 3
    train(gm, [(x,)])
    pdp_fx.step(gm.eval())
    check_converted(model, gm, [(x,), (x[:3],)])
