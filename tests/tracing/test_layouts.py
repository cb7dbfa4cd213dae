"""How what a model returns is made: types of containers, keys and places of None stay, or it is refused."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_structure

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from pdp_fx.tracing.outcome import Given, outcome


class Returns(nn.Module):
    """Two layers, and a way of returning what they give."""

    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.hidden, self.head, self.way = nn.Linear(6, 8), nn.Linear(8, 4), way

    def forward(self, x: Tensor) -> Any:
        return self.way(self.head(self.hidden(x).relu()))


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "what max gives": lambda y: y.max(-1),
    "what it gives, in a dict": lambda y: {"best": y.max(-1), "all": y},
    "what topk gives, in a list": lambda y: [y.topk(2, dim=-1), (y, None)],
    "what qr gives": torch.linalg.qr,
    "an ordered dict": lambda y: OrderedDict(b=y, a=(y, [None, {"n": tuple(y.shape), 3: y.shape[0]}])),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_returned_is_made_in_the_same_way(way: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Returns(way), torch.randn(5, 6)
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(model, spec, x[:3])
    assert tree_structure(prepared.eval()(x)) == tree_structure(model(x))
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    (found, structure), (wanted, of_model) = tree_flatten(converted(x)), tree_flatten(prepared(x))
    assert structure == of_model
    torch.testing.assert_close(found, wanted)


def test_what_is_put_into_it_is_computed_on() -> None:
    class Takes(nn.Module):
        """What `max` gives goes through a method."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def both(self, found: Any) -> Tensor:
            return found.values + found[1]

        def forward(self, x: Tensor) -> Tensor:
            made: Callable[..., Any] = getattr(torch.return_types, "max")  # noqa: B009
            return self.both(made((self.layer(x).amax(-1), x.argmax(-1))))

    model, x = Takes(), torch.randn(5, 6)
    torch.testing.assert_close(trace(model, x[:3])(x), model(x))


class Point(NamedTuple):
    """A tuple with named places."""

    x: Tensor
    y: Tensor | None


ones = torch.ones(2)
DIFFERENT = {
    "a tuple, not a list, inside": ([[ones]], [(ones,)], "returns a tuple at [0], not a list"),
    "other names": ({"a": {"b": ones}}, {"a": {"c": ones}}, "returns a dict with other keys at ['a']"),
    "None elsewhere": ((None, ones), (ones, None), "returns a Tensor at [0], not a NoneType"),
    "a tuple without names": ([Point(ones, None)], [(ones, None)], "returns a tuple at [0], not a Point"),
    "another class of time": (time.gmtime(0), tuple(time.gmtime(0)), "returns a tuple, not a struct_time"),
}


@pytest.mark.parametrize(("mine", "theirs", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_is_made_in_another_way_counts_as_different(mine: Any, theirs: Any, said: str) -> None:
    one, other = (outcome(nn.Module(), output, Given(())) for output in (mine, theirs))
    assert one.difference(one) == ""
    assert one.is_near(one)
    assert one.difference(other) == said
    assert not one.is_near(other)


def test_what_no_graph_can_make_is_refused() -> None:
    model = Returns(lambda y: {"all": defaultdict(list, y=[y])})
    with pytest.raises(TraceError, match="first argument must be callable or None"):
        trace(model, torch.randn(3, 6))
