"""What parts that are kept whole find out of their data and give back in other ways than by tensors."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import PruneSpec, Schedule, TraceError, Unstructured
from pdp_fx.trace import trace
from pdp_fx.tracing.structure import place_of_number
from tests.tracing.checks import Around, exact, opaque

FOUND: dict[str, int] = {}


@dataclass
class Count:
    """A record of a number, and of a tensor."""

    number: int = 0
    tensor: Tensor = field(default_factory=lambda: torch.zeros(()))


class Plain:
    """An object that is no record."""

    number = 0
    inner: object = None


class Layer(nn.Module):
    """A layer, and something after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def positive(x: Tensor) -> int:
    number: Any = (x > 0).sum().tolist()
    return number


class InDict(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x, given = self.layer(x), dict[str, int]()
        put(given, x)
        return x * given["number"]


def put(given: dict[str, int], x: Tensor) -> None:
    given["number"] = positive(x)


class InList(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x, given = self.layer(x), list[int]()
        append(given, x)
        return x * given[0]


def append(given: list[int], x: Tensor) -> None:
    given.append(positive(x))


class InRecord(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x, given = self.layer(x), Count()
        change(given, x)
        return x * given.number


def change(given: Count, x: Tensor) -> None:
    given.number = positive(x)


class ByRecord(Layer):
    def forward(self, x: Tensor) -> Tensor:
        count = counted(self.layer(x))
        return count.tensor * count.number


def counted(x: Tensor) -> Count:
    return Count(positive(x), x)


class ByNumber(Layer):
    def forward(self, x: Tensor) -> Tensor:
        part, number = first(self.layer(x))
        return part * number


def first(x: Tensor) -> tuple[Tensor, float]:
    return (x, x.tolist()[0][0]) if x.sum() > 0 else (x, 0.0)


class ByArray(Layer):
    def forward(self, x: Tensor) -> Tensor:
        part, number = summed(self.layer(x))
        return part * number


def summed(x: Tensor) -> tuple[Tensor, float]:
    return x, float(x.detach().numpy().sum())


class InGlobal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        note(x)
        return x * FOUND["number"]


def note(x: Tensor) -> None:
    FOUND["number"] = positive(x)


class ReturnedFromGlobal(Layer):
    """Returns a number of its data beside the tensor, which the tensor does not depend on."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.layer(x)
        note(x)
        return x, FOUND["number"]


class ByObject(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * as_object(x).number


def as_object(x: Tensor) -> Plain:
    made = Plain()
    made.number = positive(x)
    return made


SEEN = (InDict, InList, InRecord)


@pytest.mark.parametrize("kind", [*SEEN, InGlobal, ReturnedFromGlobal])
def test_a_number_that_gets_past_the_graph_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"no tensor|gets a number from|past the graph"):
        trace(kind(), torch.randn(3, 4))


@pytest.mark.parametrize("kind", [ByRecord, ByNumber, ByArray, ByObject])
def test_a_number_that_comes_back_is_read_at_each_call(kind: type[nn.Module]) -> None:
    gm = exact(kind(), *torch.randn(6, 3, 4))
    assert len(opaque(gm)) == 1


def test_a_number_that_is_the_default_of_its_record_is_read_at_each_call_too() -> None:
    model = ByRecord()
    nn.init.constant_(model.layer.bias, -2.0)
    gm = exact(model, -torch.rand(3, 4), *(5 * torch.randn(3, 3, 4)))
    assert len(opaque(gm)) == 1


@dataclass
class Both:
    """A record that holds a number and says whether there is one."""

    tensor: Tensor
    number: int
    found: bool


class ByBoth(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = in_both(self.layer(x))
        return found.tensor * found.number if found.found else found.tensor


def in_both(x: Tensor) -> Both:
    return Both(x, positive(x), positive(x) > 5)


def test_a_truth_value_that_comes_back_is_refused() -> None:
    with pytest.raises(TraceError, match=r"gets a number from in_both \(in its result at \."):
        trace(ByBoth(), torch.randn(3, 4))


def test_the_place_of_a_number_is_named_as_code_would_reach_it() -> None:
    x, plain = torch.zeros(1), Plain()
    endless: list[Any] = [x]
    endless.append(endless)
    plain.inner = {"a": [x, Count(3)]}
    assert place_of_number([endless, plain]) == "[1].inner['a'][1].number"
    assert place_of_number(4) == ""
    assert place_of_number([endless, "text", Plain()]) is None


@pytest.mark.parametrize("kind", SEEN)
def test_the_module_around_it_is_kept_whole(kind: type[nn.Module]) -> None:
    model = Around(kind())
    gm = exact(model, torch.randn(3, 4))
    assert list(opaque(gm)) == ["inner"]
    for _ in range(5):
        x = torch.randn(3, 4)
        assert torch.equal(gm(x), model(x))


class Leaves(nn.Module):
    """A layer that leaves a number in an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.number = positive(x) if x.sum() > 0 else -positive(x)
        return self.layer(x)


class Looks(nn.Module):
    """Looks for what its part has left."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Leaves()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.part.number


@pytest.mark.parametrize("example", [torch.randn(3, 4), torch.zeros(3, 4), torch.ones(1, 4)])
def test_a_number_in_an_attribute_of_a_part_is_refused(example: Tensor) -> None:
    with pytest.raises(TraceError, match="found in data in part must get past the graph"):
        trace(Looks(), example)


class LooksInTraining(Looks):
    """Looks for it in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.part.layer(x)


def test_a_number_that_gets_past_the_graph_in_training_is_refused() -> None:
    with pytest.raises(TraceError, match="in training mode. What is found in data in part must"):
        trace(LooksInTraining(), torch.randn(3, 4))


def test_whole_numbers_are_tried_too() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.looks = nn.Embedding(9, 4), Looks()

        def forward(self, ids: Tensor) -> Tensor:
            return self.looks(self.table(ids))

    for ids in (torch.arange(8).reshape(2, 4), torch.zeros(2, 4, dtype=torch.long)):
        kept = opaque(exact(Embeds(), ids, ids + 1))
        assert "found in data in looks.part must get past the graph" in kept["looks"]


@dataclass
class Settings:
    """Settings that compute more than their fields, and hold more."""

    limit: float = 1.0
    names: dict[str, list[int]] = field(default_factory=lambda: {"a": [1]})

    def __post_init__(self) -> None:
        self.scale = 2 * self.limit


def scaled(x: Tensor, settings: Any) -> Tensor:
    return x * settings.limit if x.sum() > 0 else x * settings.scale


class Configured(nn.Module):
    """Gives its settings, or some that it makes, to a function that decides by its data."""

    def __init__(self, settings: Any, made: bool = False) -> None:
        super().__init__()
        self.layer, self.settings, self.made = nn.Linear(4, 4), settings, made

    def forward(self, x: Tensor) -> Tensor:
        if self.made:
            settings = Settings(3.0)
            settings.scale = 5.0
            return scaled(self.layer(x), settings)
        return scaled(self.layer(x), self.settings)


class Namespace:
    """Settings that are no record."""

    limit, scale = 1.0, -3.0


@pytest.mark.parametrize("kind", [Settings, Namespace])
@pytest.mark.parametrize("made", [False, True])
def test_settings_stay_what_they_are(kind: type, made: bool) -> None:
    settings = kind()
    settings.scale, settings.private = 7.0, {1, 2}
    model = Configured(settings, made)
    gm = exact(model, torch.randn(3, 4))
    assert len(opaque(gm)) == 1
    spec = PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(model, spec, torch.randn(3, 4))
    pdp_fx.step(prepared)
    prepared.eval()
    converted = pdp_fx.convert(prepared)
    for sign in (1, -1):
        x = sign * torch.rand(3, 4)
        assert torch.equal(gm(x), model(x))
        assert torch.equal(converted(x), prepared(x))
