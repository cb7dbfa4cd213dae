"""Functions and methods of plain objects that decide by their data: one step each, the rest is traced."""

import copy
import pickle
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import exact, opaque, targets


def chosen(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return chosen(x)


def rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Calls another function that decides."""
    found = x[x[:, 0] > 0]
    if found.shape[0] < 1:
        return chosen(x), None
    return chosen(found.mean(0, keepdim=True).expand_as(x)), found


def doubled(x: Tensor) -> Tensor:
    """Changes what it is given."""
    return x.mul_(2) if x.sum() > 0 else x.mul_(3)


class Coder:
    """An object that is no module."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def encode(self, x: Tensor) -> Tensor:
        return x * self.factor if x.sum() > 0 else x


class Calls(nn.Module):
    """Calls something between two layers."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.before, self.after, self.call = nn.Linear(4, 4), nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        found = self.call(self.before(x) + 0)
        return self.after(found[0] if isinstance(found, tuple) else found)


class CallsChosen(Calls):
    def __init__(self) -> None:
        super().__init__(None)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(chosen(self.before(x)))


class Encodes(Calls):
    def __init__(self) -> None:
        super().__init__(None)
        self.coders = Coder(3.0), Coder(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for coder in self.coders:
            x = coder.encode(self.before(x))
        return self.after(x)


BOTH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", [chosen, decorated, rows, doubled])
def test_a_function_that_decides_stays_whole_alone(function: Any) -> None:
    gm = exact(Calls(function), BOTH, BOTH + 1, -BOTH)
    assert targets(gm).count(function.__name__) == 1
    assert {"before", "after"} <= set(targets(gm))
    assert len(opaque(gm)) == 1


def test_a_function_that_a_submodule_calls() -> None:
    gm = exact(nn.Sequential(CallsChosen(), CallsChosen()), BOTH, BOTH + 1)
    calls = [target for target in targets(gm) if target in ("0.before", "0.after", "1.before", "chosen")]
    assert calls == ["0.before", "chosen", "0.after", "1.before", "chosen"]


def test_methods_of_objects_keep_their_objects_apart() -> None:
    gm = exact(Encodes(), BOTH, BOTH + 1, -BOTH)
    assert targets(gm).count("encode") == 2


def test_a_function_that_uses_weights_keeps_its_module_whole() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return uses(x, self)

    gm = exact(nn.Sequential(nn.Linear(4, 4), Inner()), BOTH, BOTH + 1)
    assert list(opaque(gm)) == ["1"]
    with pytest.raises(TraceError, match="the forward of Inner itself"):
        trace(Inner(), BOTH)


def uses(x: Tensor, owner: Any) -> Tensor:
    return owner.linear(x) if x.sum() > 0 else x


def test_a_number_that_depends_on_data_is_read_at_each_call() -> None:
    gm = exact(nn.Sequential(nn.Linear(4, 4), Counts()), BOTH, BOTH + 1)
    assert targets(gm).count("how_many") == 1


def pairs(x: Tensor) -> dict[str, Any]:
    """Tells by a text whether it has found any."""
    found = torch.where(x[:, 0] > 0)[0]
    return {"found": {"kind": "pairs" if len(found) > 1 else "none", "rows": x.abs()}}


def weighed(x: Tensor) -> dict[str, Any]:
    """Tells by a number how many it has found."""
    found = torch.where(x[:, 0] > 0)[0]
    return {"found": {"kind": 2 if len(found) > 1 else 3, "rows": x.abs()}}


class Told(nn.Module):
    """Goes by what a function tells."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call, self.after = call, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.call(x)["found"]
        return self.after(found["rows"] * 2 if found["kind"] in ("pairs", 2) else found["rows"])


def test_a_number_that_depends_on_how_many_were_found_keeps_the_module_whole() -> None:
    gm = exact(nn.Sequential(Told(weighed)), torch.ones(3, 4), -torch.ones(3, 4))
    assert set(opaque(gm)) == {"0"}


def test_a_text_that_depends_on_how_many_were_found_is_checked() -> None:
    model, x = nn.Sequential(Told(pairs)), torch.ones(3, 4)
    gm = exact(model, x)
    with pytest.raises(AssertionError, match="pairs returned something else than when it was traced"):
        gm(-x)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * how_many(x)


def how_many(x: Tensor) -> int:
    number: Any = (x > 0).sum().tolist()
    return number


class Held:
    """An object that holds what the model has computed."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def pick(self, y: Tensor) -> Tensor:
        return self.x if y.square().sum() < 0 else y


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Held(self.linear(x)).pick(x)


REMEMBERED: dict[str, Tensor] = {}


def recalled(x: Tensor) -> Tensor:
    return REMEMBERED["x"] * (2 if x.sum() > 0 else 3)


class Remembers(Holds):
    def forward(self, x: Tensor) -> Tensor:
        REMEMBERED["x"] = self.linear(x)
        return recalled(x)


@pytest.mark.parametrize("kind", [Holds, Remembers])
def test_a_function_that_gets_tensors_behind_the_back_of_the_graph_keeps_its_module_whole(kind: Any) -> None:
    """As one step it would always give what it gave while it was traced."""
    gm = exact(nn.Sequential(nn.Linear(4, 4), kind()), BOTH, BOTH + 1, -BOTH)
    assert list(opaque(gm)) == ["1"]
    with pytest.raises(TraceError, match=f"the forward of {kind.__name__} itself"):
        trace(kind(), BOTH)


def test_functions_are_what_they_were_after_tracing() -> None:
    before = chosen, Coder.encode
    trace(CallsChosen(), BOTH)
    trace(Encodes(), BOTH)
    assert before == (chosen, Coder.encode)
    assert "call" not in vars(Coder)


@pytest.mark.parametrize("make", [CallsChosen, Encodes])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_prepared_and_converted_models_can_be_copied(make: Any, copied: Any) -> None:
    prepared = pdp_fx.prepare(make(), PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), BOTH)
    pdp_fx.step(prepared)
    prepared.eval()
    twin = copied(prepared)
    small = pdp_fx.convert(twin)
    for model in (twin, small, copied(small)):
        for x in (BOTH, BOTH + 1, -BOTH):
            assert torch.equal(model(x), prepared(x))
    assert b"pdp_fx" not in pickle.dumps(small)


def wrapping(function: Any) -> Any:
    @wraps(function)
    def call(x: Tensor) -> Tensor:
        return function(x)

    return call


def test_a_function_that_nobody_can_find_by_its_name_is_refused() -> None:
    def local(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match="the forward of Calls itself: it branches"):
        trace(Calls(wrapping(local)), BOTH)
