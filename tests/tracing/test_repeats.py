"""What a model computes of its parameters more than once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdp_fx
from pdp_fx import NM, Channels, Unstructured
from pdp_fx.spec import Rule
from pdp_fx.trace import trace
from tests.nets import at_once
from tests.tracing.checks import exact

NORMS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "hook": nn.utils.weight_norm,  # pyright: ignore[reportDeprecated]
    "parametrization": nn.utils.parametrizations.weight_norm,
}


class Discriminator(nn.Module):
    """Judges two batches by layers whose weights are normalised at each call."""

    def __init__(self, norm: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(norm(nn.Linear(8, 12)), nn.LeakyReLU(0.1), norm(nn.Linear(12, 4)))

    def forward(self, real: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(real), self.layers(made)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4), Channels(ratio=0.5)])
@pytest.mark.parametrize("norm", NORMS)
def test_a_weight_that_is_computed_at_each_call_is_pruned(norm: str, rule: Rule) -> None:
    model = Discriminator(NORMS[norm]).double()
    inputs = tuple(torch.randn(3, 8, dtype=torch.float64) for _ in range(2))
    prepared = pdp_fx.prepare(model, at_once(rule), inputs)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    assert all(map(torch.allclose, converted(*inputs), prepared(*inputs)))
    weights = [parameter for parameter in converted.parameters() if parameter.shape[1:].numel() > 1]
    assert len(weights) == 2
    if isinstance(rule, Channels):
        assert weights[0].shape[0] == 6
    else:
        assert [weight.numel() for weight in weights] == [96, 48]
        assert sum(int((weight == 0).sum()) for weight in weights) == 72


def changed_in_place(model: nn.Linear, x: Tensor) -> Tensor:
    first, second = model.weight.abs(), model.weight.abs()
    first.mul_(2)
    return F.linear(x, first) + F.linear(x, second)


def without_gradients(model: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = model.weight.abs()
    return F.linear(x, first) + F.linear(x, model.weight.abs())


def in_less_precision(model: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = model.weight @ model.weight
    return F.linear(x, first.float() + model.weight @ model.weight)


def at_random(model: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, F.dropout(model.weight, 0.5)) + F.linear(x, F.dropout(model.weight, 0.5))


def returned(model: nn.Linear, x: Tensor) -> Any:
    return x, model.weight.abs(), model.weight.abs()


@pytest.mark.parametrize("act", [changed_in_place, without_gradients, in_less_precision, at_random, returned])
def test_what_may_differ_is_computed_as_often_as_in_the_model(
    act: Callable[[nn.Linear, Tensor], Any],
) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return act(self, x)

    torch.manual_seed(0)
    gm = exact(Model(4, 4, bias=False), torch.randn(3, 4), torch.randn(5, 4))
    kinds = ("abs", "dropout", "matmul")
    made = [node for node in gm.graph.nodes if getattr(node.target, "__name__", node.target) in kinds]
    assert len(made) == 2, gm.code


def test_what_is_computed_before_and_after_a_write_is_computed_twice() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            first = F.linear(x, self.weight.abs())
            self.weight.data.clamp_(-0.1, 0.1)
            return first + F.linear(x, self.weight.abs())

    gm = trace(Model(4, 4), torch.randn(3, 4))
    assert sum(node.target == "abs" for node in gm.graph.nodes) == 2


def test_what_is_the_same_is_computed_once() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return F.linear(F.linear(x, self.weight.abs() / 2), self.weight.abs() / 2)

    gm = exact(Model(4, 4), torch.randn(3, 4))
    assert sum(node.target == "abs" for node in gm.graph.nodes) == 1
