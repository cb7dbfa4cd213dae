"""Models that put results into the lists, dicts and objects that they are given."""

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdp_fx import Channels, PruneSpec, Schedule, convert, explain, prepare, step
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import opaque


class Slotted:
    __slots__ = ("made", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclasses.dataclass
class Sample:
    x: Tensor
    made: Any = None


def adds(net: nn.Module, given: Any) -> None:
    given["made"] = net(given["x"])


def replaces(net: nn.Module, given: Any) -> Tensor:
    given["x"] = net(given["x"])
    return given["x"] + 1


def swaps(net: nn.Module, given: Any) -> Tensor:
    x, y = given["x"], given["y"]
    given["x"], given["y"] = y, net(x)
    return given["x"]


def takes_out(net: nn.Module, given: Any) -> Tensor:
    return net(given.pop("x"))


def puts_back(net: nn.Module, given: Any) -> Tensor:
    x = given.pop("x")
    given["x"] = x
    return net(x)


def adds_by_mode(net: nn.Module, given: Any) -> Tensor:
    made = net(given["x"])
    if net.training:
        given["loss"] = made.square().mean()
    else:
        given["label"] = made.argmax(1)
    return made


def adds_numbers(net: nn.Module, given: Any) -> Tensor:
    given["rows"], given["name"] = given["x"].shape[0], "rows"
    return net(given["x"])


def adds_an_object(net: nn.Module, given: Any) -> None:
    given["made"] = SimpleNamespace(parts=[net(given["x"])])


def appends(net: nn.Module, given: Any) -> Tensor:
    given.append(net(given[0]))
    return given[1].relu()


def shortens(net: nn.Module, given: Any) -> Tensor:
    return net(given.pop())


def sets(net: nn.Module, given: Any) -> None:
    given.made = net(given.x)


def deletes(net: nn.Module, given: Any) -> Tensor:
    made = net(given.x)
    del given.x
    return made


def reaches(net: nn.Module, given: Any) -> None:
    given["batch"][0].made = {"features": net(given["batch"][0].x)}


X, Y = torch.randn(3, 4), torch.randn(3, 4)
CASES: list[tuple[Callable[..., Any], Any]] = [
    *((fill, {"x": X, "y": Y}) for fill in (adds, replaces, swaps, takes_out, puts_back)),
    *((fill, {"x": X, "y": Y}) for fill in (adds_by_mode, adds_numbers, adds_an_object)),
    *((fill, [X]) for fill in (appends, shortens)),
    *((fill, kind(X)) for fill in (sets, deletes) for kind in (Slotted, lambda x: SimpleNamespace(x=x))),
    (sets, Sample(X)),
    (reaches, {"batch": [SimpleNamespace(x=X)], "rest": []}),
]


class Fills(nn.Module):
    def __init__(self, fill: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._fill = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), fill

    def forward(self, given: Any) -> Any:
        return self._fill(self.net, given)


def shown(thing: Any) -> Any:
    """All that a structure holds, with lists in the place of tensors; what equals it holds the same."""
    if isinstance(thing, Tensor):
        return thing.tolist()
    if isinstance(thing, dict):
        return [(key, shown(part)) for key, part in thing.items()]
    if isinstance(thing, list | tuple):
        return [shown(part) for part in thing]
    if isinstance(thing, Slotted):
        return {name: shown(getattr(thing, name)) for name in thing.__slots__ if hasattr(thing, name)}
    return shown(sorted(vars(thing).items())) if hasattr(thing, "__dict__") else thing


def after(model: nn.Module, given: Any, training: bool) -> Any:
    """What a call returns, and what is in the input afterwards."""
    given = copy.deepcopy(given)
    returned = model.train(training)(given)
    return shown(returned), shown(given)


@pytest.mark.parametrize(("fill", "given"), CASES)
def test_the_graph_leaves_what_the_model_leaves(fill: Callable[..., Any], given: Any) -> None:
    model = Fills(fill)
    gm = trace(model, (copy.deepcopy(given),))
    for training in (False, True):
        assert after(gm, given, training) == after(model, given, training)


@pytest.mark.parametrize(("fill", "given"), CASES)
def test_so_does_a_converted_model(fill: Callable[..., Any], given: Any) -> None:
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0))
    model = prepare(Fills(fill), spec, (copy.deepcopy(given),))
    step(model)
    converted = convert(model)
    assert converted.get_parameter("net.0.weight").shape == (4, 4)
    wanted, got = after(model, given, False), after(converted, given, False)
    numbers = [torch.tensor(list(_numbers(each)), dtype=torch.float64) for each in (wanted, got)]
    torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-6)


def _numbers(thing: Any) -> Any:
    if isinstance(thing, int | float):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _numbers(part)
    elif isinstance(thing, dict):
        yield from _numbers(list(thing.values()))


def test_channels_that_are_left_there_stay() -> None:
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0))
    model = prepare(nn.Sequential(Fills(adds)), spec, ({"x": X},))
    assert "the model leaves these channels in what it is given" in str(explain(model))


class Hides(nn.Module):
    """Takes its input out of a dict, and hides how many examples it has from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = given.pop("x")
        try:
            raise ValueError(f"{x.shape[0]}")
        except ValueError as err:
            return self.net(x) * int(str(err))


def test_what_is_taken_out_is_held_to_its_size() -> None:
    model = Hides()
    gm = trace(model, ({"x": X},))
    assert torch.equal(gm({"x": Y}), model({"x": Y}))
    for size in (1, 2, 4):
        with pytest.raises(AssertionError, match="holds for a batch of 3 only"):
            gm({"x": torch.randn(size, 4)})


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fills, self.head = Fills(adds), nn.Linear(4, 4)

    def forward(self, given: dict[str, Any]) -> Tensor:
        self.fills(given)
        return self.head(given["made"])


def test_a_part_fills_what_the_next_one_reads() -> None:
    model = Inner()
    gm = trace(model, ({"x": X},))
    assert not opaque(gm)
    assert after(gm, {"x": X}, True) == after(model, {"x": X}, True)


def test_a_model_compiles_that_fills_a_dict() -> None:
    model = Fills(adds)
    gm = torch.compile(trace(model, ({"x": X},)), fullgraph=True, backend="eager")
    mine, theirs = {"x": X}, {"x": X}
    gm(mine)
    model(theirs)
    assert torch.equal(mine["made"], theirs["made"])


def test_what_a_graph_cannot_hold_is_refused_there() -> None:
    def hands_out_a_lock(net: nn.Module, given: Any) -> Tensor:
        given["thing"] = iter([1, 2])
        return net(given["x"])

    with pytest.raises(TraceError, match="leaves something in an input: it passes a list_iterator"):
        trace(Fills(hands_out_a_lock), ({"x": X},))
