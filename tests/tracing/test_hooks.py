"""What is said of hooks that a graph does not call, or calls alone."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.trace import trace


class Collects(nn.Module):
    """Collects what its layers give.

    Args:
        empties: what its forward does with the list that they are in.
    """

    def __init__(self, empties: Callable[[Any], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.found: list[Tensor] = []
        self.empties = empties
        for layer in (self.layers[0], self.layers[2]):
            layer.register_forward_hook(self.collect)

    def collect(self, layer: nn.Module, inputs: Any, result: Tensor) -> None:
        self.found.append(result)

    def forward(self, x: Tensor) -> Tensor:
        self.empties(self)
        return self.layers(x)


def anew(model: Any) -> None:
    model.found = []


def clear(model: Any) -> None:
    model.found.clear()


def leave(model: Any) -> None:
    """The caller empties it."""


@pytest.mark.parametrize("empties", [anew, clear])
def test_hooks_that_fill_what_the_model_empties_are_named(empties: Callable[[Any], None]) -> None:
    model, x = Collects(empties), torch.randn(2, 4)
    with pytest.warns(UserWarning, match=r"hooks of layers\.0, layers\.2 fill found, which .* empties"):
        gm = trace(model, x)
    assert not model.found
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_hooks_that_only_collect_are_called_without_a_word() -> None:
    model, x = Collects(leave), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = trace(model, x)
    gm(x)
    assert len(model.found) == 2
