"""Models that go by the order of keys of a dict: their graphs insist on it, and no others."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace


class Walks(nn.Module):
    """Computes with the values of a dict, in some way."""

    def __init__(self, way: Callable[[Any, dict[str, Tensor]], Any], width: int) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(width, 8), nn.Linear(8, 2)
        self.way = way

    def layers(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x)))

    def forward(self, given: dict[str, Tensor]) -> Any:
        return self.way(self, given)


def joins(model: Walks, given: dict[str, Tensor]) -> Tensor:
    return model.layers(torch.cat(list(given.values()), -1))


def takes_first(model: Walks, given: dict[str, Tensor]) -> Tensor:
    return model.layers(next(iter(given.values())))


def takes_first_in_training(model: Walks, given: dict[str, Tensor]) -> Tensor:
    return model.layers(next(iter(given.values())) if model.training else given["a"])


def adds_up(model: Walks, given: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(())
    for value in given.values():
        total = total + model.layers(value)
    return total


def returns_all(model: Walks, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: model.layers(value) for key, value in given.items()}


def by_name(model: Walks, given: dict[str, Tensor]) -> Tensor:
    return model.layers(torch.cat([given["a"], given["b"]], -1))


def dicts() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    return {"a": a, "b": b}, {"b": b, "a": a}


@pytest.mark.parametrize(("way", "width"), [(joins, 6), (takes_first, 3), (takes_first_in_training, 3)])
def test_a_model_that_goes_by_the_order_is_held_to_it(way: Any, width: int) -> None:
    example, turned = dicts()
    model = Walks(way, width)
    gm = trace(model, (example,))
    torch.testing.assert_close(gm(example), model(example), rtol=0, atol=0)
    with pytest.raises(AssertionError, match=r"traced with list\(given\)=\['a', 'b'\]"):
        gm(turned)


@pytest.mark.parametrize(("way", "width"), [(adds_up, 3), (returns_all, 3), (by_name, 6)])
def test_any_other_model_takes_every_order(way: Any, width: int) -> None:
    example, turned = dicts()
    model = Walks(way, width)
    gm = trace(model, (example,))
    torch.testing.assert_close(gm(turned), model(turned))


def test_keys_may_be_numbers() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    gm = trace(Walks(joins, 6), ({4: a, 7: b},))
    with pytest.raises(AssertionError, match=r"traced with list\(given\)=\[4, 7\]"):
        gm({7: b, 4: a})


def test_keys_that_a_graph_cannot_hold_are_refused() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(TraceError, match="goes by the order of keys of a dict among its inputs that a graph"):
        trace(Walks(joins, 6), ({("a", 1): a, ("b", 2): b},))
    gm = trace(Walks(adds_up, 3), ({("a", 1): a, ("b", 2): b},))
    torch.testing.assert_close(gm({("b", 2): b, ("a", 1): a}), gm({("a", 1): a, ("b", 2): b}))


class OwnDict(dict[str, Tensor]):
    """A dict of a class of its own."""


@pytest.mark.parametrize("kind", [OrderedDict, OwnDict, UserDict, partial(defaultdict, Tensor)])
def test_what_is_like_a_dict_is_held_to_its_order_too(kind: Callable[[Any], Any]) -> None:
    example, turned = map(kind, dicts())
    model = Walks(joins, 6)
    gm = trace(model, (example,))
    torch.testing.assert_close(gm(example), model(example), rtol=0, atol=0)
    with pytest.raises(AssertionError, match=r"traced with list\(given\)=\['a', 'b'\]"):
        gm(turned)


def test_a_record_that_lets_no_items_be_taken_out_is_held_to_its_order_too() -> None:
    generic = pytest.importorskip("transformers.utils.generic")
    example, turned = map(generic.ModelOutput, dicts())
    with pytest.raises(AssertionError, match=r"traced with list\(given\)=\['a', 'b'\]"):
        trace(Walks(joins, 6), (example,))(turned)


class Keywords(nn.Module):
    """Takes the dict as keyword arguments."""

    def __init__(self, way: Callable[[Any, dict[str, Tensor]], Any], width: int) -> None:
        super().__init__()
        self.walks = Walks(way, width)

    def forward(self, **given: Tensor) -> Any:
        return self.walks(given)


@pytest.mark.parametrize(("way", "width"), [(joins, 6), (takes_first, 3), (takes_first_in_training, 3)])
def test_a_model_that_goes_by_the_order_of_keyword_arguments_is_refused(way: Any, width: int) -> None:
    example, _ = dicts()
    with pytest.raises(
        TraceError, match=r"Keywords goes by the order of the keyword .* \(test_key_order.py:"
    ):
        trace(Keywords(way, width), example)


@pytest.mark.parametrize(("way", "width"), [(adds_up, 3), (returns_all, 3), (by_name, 6)])
def test_any_other_model_takes_keyword_arguments_in_every_order(way: Any, width: int) -> None:
    example, turned = dicts()
    model = Keywords(way, width)
    torch.testing.assert_close(trace(model, example)(**turned), model(**turned))


def test_a_converted_model_insists_on_the_order_too() -> None:
    example, turned = dicts()
    spec = PruneSpec(Channels(0.5), schedule=Schedule(start=0, epsilon=1.0))
    masked = pdp_fx.prepare(Walks(joins, 6), spec, (example,))
    pdp_fx.step(masked)
    converted = pdp_fx.convert(masked)
    torch.testing.assert_close(converted(example), masked.eval()(example))
    with pytest.raises(AssertionError, match="traced with list"):
        converted(turned)
