"""Layers that a part which is kept whole reaches by something else than its attributes."""

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import NM, Unstructured
from tests.nets import at_once


class Holder:
    """An object that holds a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.size = layer, 8

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Pair(NamedTuple):
    """A layer and a number."""

    first: nn.Module
    second: int


def through(layer: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    return layer(x) * scale


def by_default(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor, layer: nn.Module = layer) -> Tensor:
        return layer(x)

    return call


def by_keyword(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor, *, layer: nn.Module = layer) -> Tensor:
        return layer(x)

    return call


def in_a_closure(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        result: Tensor = layer(x)
        return result

    return call


def itself(layer: nn.Module) -> list[Any]:
    held: list[Any] = [layer]
    held.append(held)
    return held


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Tensor], Tensor]]] = {
    "list": (lambda layer: [layer], lambda held, x: held[0](x)),
    "list in itself": (itself, lambda held, x: held[0](x)),
    "tuple in a dict": (lambda layer: {"a": (1, layer)}, lambda held, x: held["a"][1](x)),
    "key": (lambda layer: {layer: 1}, lambda held, x: next(iter(held))(x)),
    "set": (lambda layer: {layer}, lambda held, x: next(iter(held))(x)),
    "deque": (lambda layer: deque([layer], maxlen=2), lambda held, x: held[0](x)),
    "named tuple": (lambda layer: Pair(layer, 1), lambda held, x: held.first(x)),
    "object": (Holder, lambda held, x: held(x)),
    "method": (lambda layer: layer.forward, lambda held, x: held(x)),
    "method of an object": (lambda layer: Holder(layer).__call__, lambda held, x: held(x)),
    "partial": (lambda layer: partial(through, layer, scale=1.0), lambda held, x: held(x)),
    "keyword of a partial": (lambda layer: partial(through, layer=layer), lambda held, x: held(x=x)),
    "closure": (in_a_closure, lambda held, x: held(x)),
    "default": (by_default, lambda held, x: held(x)),
    "keyword default": (by_keyword, lambda held, x: held(x)),
    "weak reference": (weakref.ref, lambda held, x: held()(x)),
}


class Whole(nn.Module):
    """Decides by its data, so that it is kept whole, and calls its layer by what it holds."""

    def __init__(self, way: str, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        hold, self.call = WAYS[way]
        self.held = hold(layer)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 1e9:
            return x
        return self.call(self.held, x)


class HasMethod(Whole):
    """The same in a method."""

    def decide(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 1e9:
            return x
        return self.call(self.held, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decide(x) * 2


def net(kind: type[Whole], way: str, layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), kind(way, layer), nn.Linear(8, 4)).double()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Whole, HasMethod])
@pytest.mark.parametrize("way", WAYS)
def test_masks_reach_layers_that_are_reached_by_something_else(kind: type[Whole], way: str) -> None:
    model, x = net(kind, way, nn.Linear(8, 8)), torch.randn(3, 8, dtype=torch.float64)
    before = model(x)
    for rule in (Unstructured(0.75), NM(2, 4)):
        prepared = pdp_fx.prepare(model, at_once(rule), x)
        pdp_fx.step(prepared)
        prepared.eval()
        masked = {row.layer: row.left for row in pdp_fx.report(prepared).rows}
        # What calls the code of a layer without the layer reads its weight without its mask.
        assert (masked["1.layer"] < 64) is (way != "method")
        pruned = net(kind, way, nn.Linear(8, 8))
        converted = pdp_fx.convert(prepared)
        pruned.load_state_dict(converted.state_dict())
        assert int((pruned.get_parameter("1.layer.weight") != 0).sum()) == masked["1.layer"]
        for small in (converted, pruned):
            torch.testing.assert_close(small(x), prepared(x), rtol=1e-9, atol=1e-9)
        assert torch.equal(model(x), before)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Whole, HasMethod])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
def test_modes_reach_layers_that_are_reached_by_something_else(
    kind: type[Whole], way: str, training: bool
) -> None:
    model, x = net(kind, way, nn.BatchNorm1d(8)).train(training), torch.randn(3, 8, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.5)), x)
    before = prepared.get_buffer("1.layer.running_mean").clone()
    prepared.eval()(x)
    assert torch.equal(prepared.get_buffer("1.layer.running_mean"), before)
    prepared.train()(x)
    assert not torch.equal(prepared.get_buffer("1.layer.running_mean"), before)
    assert model.training is training
    assert all(part.training is training for part in model.modules())


def test_modes_reach_a_layer_that_a_hook_of_another_calls() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    norm = nn.BatchNorm1d(8)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = net, norm
            net[0].register_forward_hook(lambda layer, args, result: norm(result))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    prepared = pdp_fx.prepare(Adapted(), at_once(Unstructured(0.5)), torch.randn(3, 8))
    before = norm.running_mean
    assert before is not None
    for training in (False, True):
        was = before.clone()
        prepared.train(training)(torch.randn(3, 8))
        assert torch.equal(before, was) is not training


def test_what_leads_to_no_layer_stays_the_same_object() -> None:
    notes = {"seen": [1, 2], "by": Holder(nn.Identity())}
    whole = Whole("list", nn.Linear(8, 8))
    vars(whole)["notes"] = notes
    prepared = pdp_fx.prepare(nn.Sequential(whole), at_once(Unstructured(0.5)), torch.randn(3, 8))
    mine: Any = prepared.get_submodule("0")
    assert mine.notes is notes
    assert mine.held is not whole.held
    assert mine.held[0] is mine.layer
    assert whole.held[0] is whole.layer


def test_an_object_that_leads_to_layers_and_cannot_be_copied_is_refused() -> None:
    class Single(Holder):
        def __copy__(self) -> "Single":
            raise TypeError("there is only one")

    whole = Whole("list", nn.Linear(8, 8))
    vars(whole)["single"] = Single(whole.layer)
    with pytest.raises(pdp_fx.StateError, match="holds a Single that leads to layers .*: there is only one"):
        pdp_fx.prepare(nn.Sequential(whole), at_once(Unstructured(0.5)), torch.randn(3, 8))
