"""What a model keeps from one call to its next outside its buffers."""

import copy
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import Around, exact, opaque


class Anneals(nn.Module):
    """Divides by a temperature that falls as it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature *= 0.9
        return x / self.temperature


class Recalls(nn.Module):
    """Adds what it was given the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x.detach().mean(0)
        return x if last is None else x + last


class Resets(nn.Module):
    """Adds what it was given the last time, unless that were more or fewer rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x.detach().clone()
        return x if last is None or last.shape[0] != x.shape[0] else x + last


class Starts(nn.Module):
    """Centres what it is given first."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.started = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            self.shift.data.copy_(-x.detach().mean(0))
            self.started = True
        return x + self.shift


class Measures(nn.Module):
    """Learns in eval mode how many rows there may be, and drops the others in training."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__()
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.capacity = x.shape[0]
        return x * (torch.arange(x.shape[0]) < self.capacity)[:, None]


class Normalises(nn.Module):
    """Divides by the norm that its weight had in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            self.norm = self.layer.weight.detach().norm()
        return self.layer(x) / self.norm


class NormalisesByNumber(Normalises):
    """Keeps the number instead of the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            self.norm = self.layer.weight.detach().norm().item()
        return self.layer(x) / self.norm


class DropsInTraining(nn.Module):
    """Keeps a table of its weights for evaluation, until it is trained again (LeViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.kept = nn.Parameter(torch.randn(4)), {}

    def train(self, mode: bool = True) -> "DropsInTraining":
        if mode:
            self.kept = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + self.biases[[1, 0, 3, 2]]
        if "biases" not in self.kept:
            self.kept["biases"] = self.biases[[1, 0, 3, 2]]
        return x + self.kept["biases"]


class Rotates(nn.Module):
    """Makes a table of a buffer that nothing changes in its first call."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(4))
        self.table = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.frequencies.cos()
        return x * self.table


class Counts(nn.Module):
    """Makes a table in its first call, and has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.table = nn.Linear(4, 4), torch.linspace(1, 2, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return self.layer(x) * self.scale + self.table


class Slots:
    """An object without a dict."""

    __slots__ = ("last", "mean")

    def __init__(self) -> None:
        self.mean: Tensor | None = None


class Caches(nn.Module):
    """Computes something of what it is given first, and keeps it in something else than an attribute.

    Args:
        held: what it is kept in.
        get: what is kept in that; None at first.
        put: keeps it there.
    """

    def __init__(self, held: Any, get: Callable[[Any], Any], put: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.held, self.get, self.put = held, get, put

    def forward(self, x: Tensor) -> Tensor:
        if self.get(self.held) is None:
            self.put(self.held, x.detach().mean())
        return x * self.get(self.held)


def in_object(held: Any) -> Caches:
    return Caches(held, lambda held: held.mean, lambda held, mean: setattr(held, "mean", mean))


def in_dict() -> Caches:
    held = {"stages": ([{}],)}
    return Caches(
        held,
        lambda held: held["stages"][0][0].get("mean"),
        lambda held, mean: held["stages"][0][0].update(mean=mean),
    )


def in_array() -> Caches:
    def put(held: Any, mean: Tensor) -> None:
        held[0] = mean.item()

    return Caches(np.zeros(1), lambda held: float(held[0]) or None, put)


def in_tensor() -> Caches:
    def put(held: Tensor, mean: Tensor) -> None:
        held.copy_(mean)

    return Caches(torch.zeros(1), lambda held: held if held.item() else None, put)


WITHIN = {
    "object": lambda: in_object(SimpleNamespace(mean=None)),
    "slots": lambda: in_object(Slots()),
    "dict": in_dict,
    "array": in_array,
    "tensor": in_tensor,
}


class Notes(nn.Module):
    """Keeps things for others to look at, and never looks at them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.loss = 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        self.loss = x.square().mean()
        return x * 2


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        (Anneals(), "temperature"),
        (Recalls(), "last"),
        (Resets(), "last"),
        (Starts(), "started"),
        (Measures(), "capacity"),
        (Normalises(), "norm"),
        (NormalisesByNumber(), "norm"),
    ],
)
def test_a_module_that_acts_by_what_it_has_kept_stays_whole(inner: nn.Module, names: str) -> None:
    model, first, second = Around(inner), torch.randn(3, 4), torch.randn(5, 4)
    gm = exact(model, first, second)
    assert opaque(gm) == {"inner": f"keeps {names} for its next call, outside its buffers"}


@pytest.mark.parametrize("kind", [Counts, DropsInTraining, Rotates])
def test_a_table_that_training_does_not_change_or_drops_may_be_kept(kind: type[nn.Module]) -> None:
    gm = exact(nn.Sequential(kind(), nn.BatchNorm1d(4)), torch.randn(3, 4), torch.randn(5, 4))
    assert not opaque(gm)


def test_what_a_small_call_keeps_may_limit_a_larger_one() -> None:
    gm = exact(Around(Measures(9)), torch.randn(2, 4), torch.randn(5, 4))
    assert list(opaque(gm)) == ["inner"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Anneals(), "temperature"),
        (Recalls(), "last"),
        (Resets(), "last"),
        (Starts(), "started"),
        (Measures(), "capacity"),
        (Normalises(), "norm"),
        (NormalisesByNumber(), "norm"),
    ],
)
def test_a_forward_that_acts_by_what_it_has_kept_is_refused(model: nn.Module, names: str) -> None:
    with pytest.raises(TraceError, match=f"it keeps {names} for its next call, outside its buffers"):
        trace(model, torch.randn(3, 4))


@pytest.mark.parametrize("within", WITHIN)
def test_what_is_kept_in_something_that_a_module_holds_is_seen_and_put_back(within: str) -> None:
    inner = WITHIN[within]()
    with torch.no_grad():
        gm = exact(Around(inner), torch.randn(3, 4), torch.randn(5, 4))
    assert list(opaque(gm)) == ["inner"]
    assert inner.get(inner.held) is None


@pytest.mark.parametrize("within", ["object", "slots", "dict"])
def test_a_forward_that_acts_by_what_it_keeps_so_is_refused(within: str) -> None:
    with pytest.raises(TraceError, match="it keeps held for its next call, outside its buffers"):
        trace(WITHIN[within](), torch.randn(3, 4))


class Distribution:
    """Holds what a policy has last given."""

    mean: Tensor | None = None
    history: tuple[list[Tensor], ...] = ()


class Policy(nn.Module):
    """Keeps its last result in an object, for others to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), Distribution()
        self.of.history = ([],)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.layer(x)
        self.of.mean = mean
        self.of.history[0].append(mean)
        return self.of.mean.tanh()


def test_no_tensor_with_a_history_stays_in_what_a_module_holds() -> None:
    model = Policy()
    assert not opaque(exact(model, torch.randn(3, 4), torch.randn(5, 4)))
    model = Policy()
    trace(model, torch.randn(3, 4))
    assert copy.deepcopy(model).of.history == ([],)
    assert "mean" not in vars(model.of)


class Journal:
    """Works beside the model, under a lock of its own."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def note(self) -> None:
        with self.lock:
            self.calls += 1


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.journal = nn.Linear(4, 4), Journal()

    def forward(self, x: Tensor) -> Tensor:
        self.journal.note()
        return self.layer(x)


def test_what_works_beside_a_model_is_left_alone() -> None:
    model = Noted()
    trace(model, torch.randn(3, 4))
    assert model.journal.calls > 1


def test_what_is_kept_for_others_changes_nothing() -> None:
    assert not opaque(exact(Around(Notes()), torch.randn(3, 4), torch.randn(5, 4)))


class Grows(nn.Module):
    """A table in a buffer that is made when it is first needed, and again for longer inputs."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.length = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            table = torch.arange(self.length).to(x).cos()[:, None]
            self.register_buffer("table", table, persistent=False)
        return self.layer(x) * self.table[: x.shape[1]]


def test_a_module_that_adds_a_buffer_is_kept_whole() -> None:
    model = Around(Grows())
    gm = exact(model, torch.randn(2, 3, 4))
    assert "adds a buffer table in its forward" in opaque(gm)["inner"]
    for length in (3, 5, 2):
        x = torch.randn(2, length, 4)
        assert torch.equal(gm(x), model(x))
    with pytest.raises(TraceError, match=r"adds a buffer table .* added \(test_remembering.py:\d+\)"):
        trace(Grows(), torch.randn(2, 3, 4))
    warm = Grows()
    warm(torch.randn(2, 3, 4))
    assert not opaque(exact(warm, torch.randn(2, 3, 4)))


class Cycles(nn.Module):
    """Keeps an iterator, and one that it never uses."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.layer, self.moves = nn.Linear(4, 4), moves
        self.steps, self.spare = itertools.cycle([1.0, 1.0, 2.0]), iter([1, 2])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * next(self.steps) if self.moves else x


def test_a_model_that_moves_an_iterator_on_is_refused_and_the_iterator_stays() -> None:
    cycles = Cycles(moves=True)
    model = nn.Sequential(cycles)
    with pytest.raises(TraceError, match=r"moves on the iterator 0.steps at each call \(test_remembering.py"):
        trace(model, torch.randn(2, 4))
    assert [next(cycles.steps) for _ in range(3)] == [1.0, 1.0, 2.0]


def test_an_iterator_that_stays_where_it_is_changes_nothing() -> None:
    model = Cycles(moves=False)
    exact(model, torch.randn(2, 4))
    assert list(model.spare) == [1, 2]


class Doubles(nn.Module):
    """Doubles from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = min(self.calls + 1, 2)
        return x * self.calls


class Gated(nn.Module):
    """Lets through what its part gives where its input is positive."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x)) * x.relu() + x


def test_what_the_example_multiplies_by_zero_is_seen_on_other_numbers() -> None:
    model = Gated(Doubles())
    gm = trace(model, -torch.ones(2, 4))
    assert list(opaque(gm)) == ["part"]
    model.part.calls = 2  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    x = torch.randn(2, 4)
    assert torch.equal(gm.eval()(x), model.eval()(x))


class KeepsSizes(nn.Module):
    """Keeps a size from one call to the next, which other batches do not change.

    Args:
        which: the first size, or the largest.
    """

    def __init__(self, which: str) -> None:
        super().__init__()
        self.layer, self.which, self.kept = nn.Linear(4, 4), which, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "largest":
            self.kept = max(self.kept, x.shape[1])
        elif not self.kept:
            self.kept = x.shape[1]
        return self.layer(x) * (x.shape[1] / self.kept)


@pytest.mark.parametrize("which", ["first", "largest"])
def test_sizes_that_are_kept_are_seen_by_calls_of_other_sizes(which: str) -> None:
    with pytest.raises(TraceError, match="keeps kept for its next call"):
        trace(KeepsSizes(which), torch.randn(2, 6, 4))
    gm = trace(Around(KeepsSizes(which)), torch.randn(2, 6, 4))
    assert "keeps kept" in opaque(gm)["inner"]


class Adds(nn.Module):
    """Adds a layer in every call and uses all but the first of those that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        self.layers.append(nn.Identity())
        return x * len(self.layers)


class Swaps(nn.Module):
    """Uses its two layers the other way round in the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return self.one(x)


class Renews(nn.Module):
    """Has another bias after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.layer.bias = nn.Parameter(self.layer.bias.detach() + 1)
        return x


class Drops(Renews):
    """Has no bias after the first call."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.layer.register_parameter("bias", None)
        return x


REBUILT = {
    "Adds": (Adds, "adds a part 0 in its forward"),
    "Swaps": (Swaps, "takes out or replaces its parameter or layer one"),
    "Renews": (Renews, "takes out or replaces its parameter or layer bias"),
    "Drops": (Drops, "takes out or replaces its parameter or layer bias"),
}


@pytest.mark.parametrize(("kind", "why"), REBUILT.values(), ids=REBUILT)
def test_a_part_that_rebuilds_itself_is_kept_whole(kind: type[nn.Module], why: str) -> None:
    model, x = Around(kind()), torch.randn(2, 4)
    names = [name for name, _ in model.named_parameters()]
    gm = trace(model, (x,))
    assert opaque(gm)["inner"].startswith(why)
    assert [name for name, _ in model.named_parameters()] == names
    twin = copy.deepcopy(model)
    for _ in range(3):
        torch.testing.assert_close(gm(x), twin(x), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "why"), REBUILT.values(), ids=REBUILT)
def test_a_model_that_rebuilds_itself_is_refused(kind: type[nn.Module], why: str) -> None:
    with pytest.raises(TraceError, match=rf"{kind.__name__} itself: it {why}.* \(test_remembering.py:\d+\)"):
        trace(kind(), (torch.randn(2, 4),))
