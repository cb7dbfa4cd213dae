"""Objects with tensors as inputs: what a model reads of them beside the tensors is checked at each call."""

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec
from pdp_fx.trace import trace
from tests.channels.nets_regions import RegionsOfTwoScales
from tests.channels.nets_varying import ColumnFirst

ONE = torch.ones(1)


class Graphs:
    """Has the attributes that it is given."""

    n: int
    starts: Tensor
    w: Tensor
    weighted: bool

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def doubled(self) -> int:
        return 2 * self.n

    @property
    def weight(self) -> Tensor | None:
        return self.w if self.weighted else None

    def is_large(self) -> bool:
        return self.n > 2


class Twins(Graphs):
    """Another class with the same attributes."""

    @property
    def doubled(self) -> int:
        return 4 * self.n


class Slotted:
    __slots__ = ("n", "x")

    def __init__(self, x: Tensor, n: int) -> None:
        self.x, self.n = x, n


class Store:
    """Holds attributes in a dict inside an object of its own, as batches of graphs do; can be called."""

    def __init__(self, **given: Any) -> None:
        self.__dict__["_inner"] = Graphs(held={})
        for name, value in given.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_inner"].held[name] = value

    def __getattr__(self, name: str) -> Any:
        if "_inner" in self.__dict__ and name in self.__dict__["_inner"].held:
            return self.__dict__["_inner"].held[name]
        raise AttributeError(name)

    def __getitem__(self, name: str) -> Any:
        return self._inner.held[name]

    def __contains__(self, name: str) -> bool:
        return name in self._inner.held

    def __call__(self) -> list[str]:
        return sorted(self._inner.held)


@dataclasses.dataclass
class Row:
    x: Tensor
    w: Tensor | None = None
    n: int = 1


def written(given: Any) -> float:
    given.k = given.n + 1
    return given.k


def double_if(known: object) -> float:
    return 2.0 if known else 1.0


class Case(NamedTuple):
    """How a model reads a factor of an input, how that is made, and what makes another factor of it."""

    factor: Callable[[Any], Any]
    make: Callable[..., Any]
    other: dict[str, Any]


def graphs(**given: Any) -> Graphs:
    return Graphs(**{"x": torch.randn(3, 4), **given})


def store(**given: Any) -> Store:
    return Store(**{"x": torch.randn(3, 4), **given})


def row(w: Tensor | None, n: int = 1) -> Row:
    return Row(torch.randn(3, 4), w, n)


def with_settings(n: int) -> Graphs:
    return graphs(settings=Graphs(n=n, kind="a"))


CASES = {
    "attribute": Case(lambda g: g.n, lambda n=2: graphs(n=n), {"n": 3}),
    "slot": Case(lambda g: g.n, lambda n=2: Slotted(torch.randn(3, 4), n), {"n": 3}),
    "namespace": Case(lambda g: g.n, lambda n=2: SimpleNamespace(x=torch.randn(3, 4), n=n), {"n": 3}),
    "list": Case(lambda g: g.n[1], lambda n=2: graphs(n=[1, n]), {"n": 3}),
    "dict": Case(lambda g: g.held["n"], lambda n=2: graphs(held={"n": n, "w": ONE}), {"n": 3}),
    "object": Case(lambda g: g.settings.n, lambda n=2: with_settings(n), {"n": 3}),
    "property": Case(lambda g: g.doubled, lambda n=2: graphs(n=n), {"n": 3}),
    "method": Case(lambda g: double_if(g.is_large()), lambda n=2: graphs(n=n), {"n": 3}),
    "text": Case(lambda g: {"a": 1.0, "b": 2.0}[g.n], lambda n="a": graphs(n=n), {"n": "b"}),
    "function": Case(lambda g: g.n(ONE), lambda n=torch.relu: graphs(n=n), {"n": torch.neg}),
    "missing": Case(lambda g: double_if(hasattr(g, "w")), graphs, {"w": ONE}),
    "left out": Case(lambda g: double_if(hasattr(g, "w")), lambda **w: graphs(**(w or {"w": ONE})), {"v": 1}),
    "None": Case(lambda g: double_if(g.w is None), lambda w=None: graphs(w=w), {"w": ONE}),
    "tensor": Case(lambda g: double_if(g.w is None), lambda w=ONE: graphs(w=w), {"w": None}),
    "flag": Case(lambda g: double_if(g.weight is None), lambda n=True: graphs(weighted=n, w=ONE), {"n": 0}),
    "vars": Case(lambda g: vars(g)["n"], lambda n=2: graphs(n=n), {"n": 3}),
    "copied": Case(lambda g: copy.copy(g).n, lambda n=2: graphs(n=n), {"n": 3}),
    "class": Case(lambda g: g.doubled, lambda kind=Graphs: kind(x=torch.randn(3, 4), n=2), {"kind": Twins}),
    "written": Case(written, lambda n=2: graphs(n=n), {"n": 3}),
    "in a list": Case(lambda g: g.parts[0].n, lambda n=2: graphs(parts=[graphs(n=n)]), {"n": 3}),
    "stored": Case(lambda g: g.n, lambda n=2: store(n=n), {"n": 3}),
    "stored item": Case(lambda g: g["n"], lambda n=2: store(n=n), {"n": 3}),
    "stored missing": Case(lambda g: double_if(hasattr(g, "w")), store, {"w": ONE}),
    "not in": Case(lambda g: double_if("w" in g), store, {"w": ONE}),
    "called": Case(lambda g: len(g()), store, {"w": ONE}),
    "record": Case(lambda g: g.n, lambda n=2: row(None, n), {"n": 3}),
    "record tensor": Case(lambda g: double_if(g.w is None), lambda w=ONE: row(w), {"w": None}),
}


class Scaled(nn.Module):
    def __init__(self, factor: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.factor = factor

    def forward(self, given: Any) -> Tensor:
        return self.layer(given.x) * self.factor(given)


@pytest.mark.parametrize("name", CASES)
def test_what_the_model_reads_of_an_object_must_be_as_in_the_example(name: str) -> None:
    case = CASES[name]
    model = Scaled(case.factor)
    gm = trace(model, (case.make(),))
    same, other = case.make(), case.make(**case.other)
    assert torch.equal(gm(copy.deepcopy(same)), model(same))
    assert not torch.equal(model(copy.deepcopy(other)), model.layer(other.x) * case.factor(same))
    with pytest.raises(AttributeError if name == "left out" else AssertionError):
        gm(other)


@pytest.mark.parametrize("make", [graphs, store])
def test_what_it_does_not_read_may_be_anything(make: Callable[..., Any]) -> None:
    model = Scaled(lambda given: given.w)
    gm = trace(model, (make(w=ONE, n=2, kind="a", other=[1, 2]),))
    other = make(w=3 * ONE, n=3, kind=None, other=[1])
    assert torch.equal(gm(other), model(other))
    said = " ".join(str(node.args[1]) for node in gm.graph.nodes if node.target is torch._assert)
    assert "type(given)=" in said
    assert not any(name in said for name in ("given.n", "given.kind", "given.other", "'n'"))


def test_what_is_no_such_object_or_holds_less_is_refused_before_it_is_read() -> None:
    gm = trace(Scaled(lambda given: given.parts[1]), (graphs(parts=[1, ONE]),))
    for other, said in ((None, r"type\(given\)=Graphs"), (graphs(parts=[1]), r"len\(given.parts\)=2")):
        with pytest.raises(AssertionError, match=said):
            gm(other)


def test_sizes_that_an_object_makes_of_its_tensors_are_followed() -> None:
    model = Scaled(lambda given: given.count)
    gm = trace(model, (graphs(starts=torch.arange(3)),))
    other = graphs(starts=torch.arange(6))
    assert torch.equal(gm(other), model(other))


class OfGiven(nn.Module):
    """A net whose images are given in an object."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, given: Any) -> Tensor:
        return self.net(given.x)


@pytest.mark.parametrize("make", [Graphs, Row, SimpleNamespace])
def test_channels_in_a_size_that_an_object_hides_stay(make: Callable[..., Any]) -> None:
    """On images of one size, the columns that are taken for channels are whole channels."""
    prepared = pdp_fx.prepare(
        OfGiven(ColumnFirst()), PruneSpec(Channels(0.5)), (make(x=torch.randn(2, 3, 6, 6)),)
    )
    assert [group.name for group in pdp_fx.explain(prepared).groups] == ["net.mid"]


def test_a_batch_that_is_held_is_that_of_the_tensors_which_are_read() -> None:
    model, x = OfGiven(RegionsOfTwoScales()), torch.randn(2, 3, 8, 8)
    gm = trace(model, (graphs(x=x, names=torch.ones(2)),))
    other = graphs(x=x, names=torch.ones(5))
    assert torch.equal(gm(other), model(other))
    with pytest.raises(AssertionError, match="holds for a batch of 2 only"):
        gm(graphs(x=x[:1], names=torch.ones(2)))


class Optional(nn.Module):
    """Asks whether there is a mask, but does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        y = self.layer(x) * double_if(mask is not None)
        return y - labels if self.training and labels is not None else y


class OptionalInEager(Optional):
    """Looks at its data, too, unless it is being compiled."""

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling() and x.sum() > 1e9:
            x = x / 2
        return super().forward(x, mask, labels)


def test_a_tensor_that_is_only_asked_for_must_be_there_if_the_graph_is_that_of_the_compiled_model() -> None:
    model, x = OptionalInEager().eval(), torch.randn(3, 4)
    gm = trace(model, {"x": x, "mask": ONE}).eval()
    assert torch.equal(gm(x, 2 * ONE), model(x, 2 * ONE))
    with pytest.raises(AssertionError, match="mask=a tensor"):
        gm(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_that_is_only_asked_for_must_be_there(training: bool) -> None:
    model, x = Optional().train(training), torch.randn(3, 4)
    gm = trace(model, {"x": x, "mask": ONE, "labels": ONE}).train(training)
    given = {"labels": ONE} if training else {}
    assert torch.equal(gm(x, 2 * ONE, **given), model(x, 2 * ONE, **given))
    for left_out in ({}, {"mask": None}):
        with pytest.raises(AssertionError, match="mask=a tensor"):
            gm(x, **left_out, **given)
