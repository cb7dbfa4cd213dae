"""Tracing without example inputs: what it sees is exact, and what it does not see is refused."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

import pdp_fx
from pdp_fx import NM, PruneSpec, Schedule, TraceError, Unstructured
from pdp_fx.trace import trace
from tests.channels.construct import Construct
from tests.channels.constructs import CONSTRUCTS
from tests.tracing.checks import assert_same, assert_same_state, outcome


class Doubled(Function):
    """Doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 2


doubled = Doubled.apply


class Part(nn.Module):
    """What stands between two layers; it may use a third, a norm and buffers."""

    calls = 0

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.does = does
        self.linear, self.norm, self.relu = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.register_buffer("scale", torch.full((8,), 4.0))

    def forward(self, x: Tensor, shift: Tensor | None = None, flip: bool = False) -> Any:
        x = self.does(self, x)
        x = x if shift is None else x + shift
        return x.flip(1) if flip else x


class Layers(nn.Module):
    """Two layers around a part."""

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), Part(does), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.part(self.first(x)))
        return result


def then(*actions: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Run statements on a tensor, which is what goes on."""

    def does(part: Any, x: Tensor) -> Tensor:
        for action in actions:
            action(part, x)
        return x

    return does


def added_to_view(part: Any, x: Tensor) -> None:
    view = x[:, :4]
    view += 1


def written(part: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 1
    x[:, 1:3] *= 2
    return part.linear(x)


def summed(part: Any, x: Tensor) -> Tensor:
    kept = x
    x += part.linear(x.clone())
    x *= 2
    return x + kept


def dropped(part: Any, x: Tensor) -> Tensor:
    if not part.training:
        return x
    mask = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
    mask.div_(0.5)
    return x * mask


def of_pair(part: Any, x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        x = (x, x)
    return part.linear(x[0]) + x[1]


def on(part: Any, x: Tensor) -> Tensor:
    return part.linear(x).T.relu().T if torch.is_tensor(x.T) else x


def averaged(part: Any, x: Tensor) -> Tensor:
    if part.training:
        part.scale.mul_(0.9)
        part.scale[:4].add_(x.detach().mean())
    return x / part.scale


SEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "method": then(lambda part, x: x.mul_(2)),
    "function": then(lambda part, x: functional.relu(x, inplace=True)),
    "module": then(lambda part, x: part.relu(x)),
    "places": written,
    "view": then(lambda part, x: x[:, :4].zero_()),
    "operator on a view": then(added_to_view),
    "operators": summed,
    "statistics": then(lambda part, x: part.norm(x)),
    "drop path": dropped,
    "average": averaged,
    "buffer": lambda part, x: x / (part.scale + 1e-5).sqrt(),
    "is a tensor": of_pair,
    "is_tensor": on,
}


@pytest.mark.parametrize("does", SEEN.values(), ids=SEEN)
def test_what_is_done_to_inputs_is_in_the_graph(does: Callable[[Any, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Layers(does), torch.randn(6, 8)
    gm = trace(model)
    assert_same_state(gm, model)
    assert_same(gm, model, x)
    for rule in (Unstructured(0.5), NM(2, 4)):
        prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=Schedule(0, 1.0)))
        for training in (False, True):
            assert torch.equal(outcome(prepared, x, training)[0], outcome(model, x, training)[0])
        pdp_fx.step(prepared.eval())
        torch.testing.assert_close(pdp_fx.convert(prepared)(x), prepared(x))


@pytest.mark.parametrize("row", CONSTRUCTS, ids=[row.name for row in CONSTRUCTS])
def test_constructs_are_exact_or_refused(row: Construct) -> None:
    torch.manual_seed(0)
    net = row.net().double()
    try:
        gm = trace(net)
    except TraceError as err:
        if "without example inputs" not in str(err):
            raise
        return
    try:
        assert_same(gm, net, row.inputs(2))
    except AssertionError as err:
        # What was left out is given here.
        if "for anything else, trace with example_inputs" not in str(err):
            raise


def test_buffers_are_read_at_each_call() -> None:
    model, x = Layers(SEEN["buffer"]), torch.randn(6, 8)
    gm = trace(model)
    gm.load_state_dict({name: value * 3 for name, value in model.state_dict().items()})
    assert torch.equal(gm(x), model(x))
    assert float(gm.get_buffer("part.scale")[0]) == 12


def without_gradient(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return part.linear(x)


def in_half(part: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return part.linear(x)


def counted(part: Any, x: Tensor) -> Tensor:
    part.calls += 1
    return x * part.calls


def renormed(part: Any, x: Tensor) -> Tensor:
    part.linear.weight.data = part.linear.weight.data.clamp(-0.1, 0.1)
    return part.linear(x)


UNSEEN: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "noise": (lambda part, x: x + torch.randn(8), "computes randn of no input"),
    "constant": (lambda part, x: x * torch.arange(8), "computes arange of no input"),
    "Python's chance": (lambda part, x: x * random.random(), "draws random numbers"),
    "NumPy's chance": (lambda part, x: x * np.random.rand(), "draws random numbers"),
    "no_grad": (without_gradient, "begins a block.*test_symbolic.py"),
    "autocast": (in_half, "begins a block"),
    "grad mode": (lambda part, x: x * 2 if torch.is_grad_enabled() else x, "asks torch.is_grad_enabled"),
    "own gradient": (lambda part, x: Doubled.apply(x), "calls the autograd function Doubled"),
    "own gradient, held": (lambda part, x: doubled(x), "calls the autograd function Doubled"),
    "counter": (counted, "does something else when it is called again"),
    "weights": (renormed, "sets the attribute data of a tensor"),
    "hidden tensor": (lambda part, x: x * HIDDEN, "no input, parameter or buffer"),
    "data": (lambda part, x: x if x.sum() > 0 else -x, "control flow"),
}
HIDDEN = torch.ones(8)


@pytest.mark.parametrize(("does", "why"), UNSEEN.values(), ids=UNSEEN)
def test_what_is_not_seen_is_refused(does: Callable[[Any, Tensor], Any], why: str) -> None:
    model = Layers(does)
    random.seed(1)
    before, state = random.getstate(), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TraceError, match=f"without example inputs: .*{why}.*; pass example_inputs"):
        trace(model)
    assert random.getstate() == before
    assert model.part.calls == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(name.startswith("_tensor_constant") for name in vars(model))


def test_arguments_that_are_left_out_must_be() -> None:
    model, x = Part(lambda part, x: part.linear(x)), torch.randn(6, 8)
    gm = trace(model)
    assert torch.equal(gm(x), model(x))
    assert torch.equal(gm(x, None, flip=False), model(x))
    for given in ({"shift": x}, {"flip": True}):
        with pytest.raises(AssertionError, match="traced with shift=None, flip=False"):
            gm(x, **given)


def test_what_was_taken_for_a_tensor_must_be_one() -> None:
    gm = trace(Part(of_pair))
    with pytest.raises(AssertionError, match="a graph for a tensor here"):
        gm((torch.randn(6, 8), torch.randn(6, 8)))


def test_symbolic_graphs_compile_in_one_piece() -> None:
    model, x = Part(of_pair).eval(), torch.randn(6, 8)
    torch.testing.assert_close(torch.compile(trace(model), fullgraph=True)(x), model(x))
