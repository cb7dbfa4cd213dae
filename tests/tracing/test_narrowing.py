"""Models of which a part does what shows only in what the graph gives: this part is kept whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdp_fx import Channels, PruneSpec, Schedule, TraceError, Unstructured, convert, prepare, step
from pdp_fx.trace import trace
from tests.tracing.checks import Around, Computes, exact, opaque


class Odd(nn.Module):
    """Does something between two layers."""

    mean: Tensor

    def __init__(self, does: "Callable[[Odd, Tensor], Tensor]") -> None:
        super().__init__()
        self.does, self.norm, self.drop = does, nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, torch.relu(x))


def sets_momentum(odd: Odd, x: Tensor) -> Tensor:
    odd.norm.momentum = 0.5
    return odd.norm(x)


def sets_rate(odd: Odd, x: Tensor) -> Tensor:
    odd.drop.p = 0.25
    return odd.drop(x)


def forks_generator(odd: Odd, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return x + torch.randn(4)


def hooks_for_now(odd: Odd, x: Tensor) -> Tensor:
    handle = odd.norm.register_forward_hook(lambda module, args, output: output.neg())
    x = odd.norm(x)
    handle.remove()
    return x


ODD: tuple[Callable[[Odd, Tensor], Tensor], ...] = (
    sets_momentum,
    sets_rate,
    forks_generator,
    hooks_for_now,
)


@pytest.mark.parametrize("does", ODD)
def test_the_part_that_is_not_exact_is_kept_whole(does: Callable[[Odd, Tensor], Tensor]) -> None:
    kept = opaque(exact(Around(Odd(does)), torch.randn(3, 4), torch.randn(5, 4)))
    assert list(kept) == ["inner"]
    assert kept["inner"].startswith("is not exact as a graph: it ")
    assert "(test_narrowing.py:" in kept["inner"]


@pytest.mark.parametrize("does", ODD)
def test_a_model_that_does_so_itself_is_refused(does: Callable[[Odd, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="the graph of Odd is not exact and was discarded: it "):
        trace(Odd(does), torch.randn(3, 4))


def updates_by_lists(odd: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_lerp_([odd.mean], [x.mean(0)], 0.1)  # pyright: ignore[reportPrivateImportUsage]
    return x - odd.mean


def updates_at_the_end(odd: Odd, x: Tensor) -> Tensor:
    result = x - odd.mean
    with torch.no_grad():
        torch._foreach_add_([odd.mean], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    return result


def limits_what_is_larger(_odd: Odd, x: Tensor) -> Tensor:
    x = x + 1
    torch._foreach_clamp_max_([x[:, :2]], 30.0)  # pyright: ignore[reportPrivateImportUsage]
    return x


@pytest.mark.parametrize("does", [updates_by_lists, updates_at_the_end, limits_what_is_larger])
def test_changes_of_several_tensors_at_once_are_followed(does: Callable[[Odd, Tensor], Tensor]) -> None:
    gm = exact(Around(Odd(does)), torch.randn(3, 4), 100 * torch.randn(5, 4))
    assert not opaque(gm)


class Plain(nn.Module):
    """A block that a graph can hold."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.linear, self.parts = nn.Linear(4, 4), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.linear(x))
        for part in self.parts:
            x = part(x)
        return x


def test_as_few_and_as_small_parts_as_possible_are_kept_whole() -> None:
    odd = [Odd(sets_momentum) for _ in range(3)]
    model = nn.Sequential(Plain(), Plain(Plain(odd[0]), Plain()), Plain(odd[1], Plain(odd[2])), Plain())
    kept = opaque(exact(model, torch.randn(3, 4)))
    assert set(kept) == {"1.parts.0.parts.0", "2.parts.0", "2.parts.1.parts.0"}


def test_a_part_with_an_odd_part_that_is_used_in_two_places() -> None:
    odd = Odd(sets_momentum)
    assert set(opaque(exact(nn.Sequential(Plain(odd), Plain(odd)), torch.randn(3, 4)))) == {"0.parts.0"}


@pytest.mark.parametrize("rule", [Channels(0.5), Unstructured(0.5)])
def test_what_is_around_the_part_is_pruned(rule: Channels | Unstructured) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4), Odd(sets_momentum), nn.Linear(4, 2))
    x = torch.randn(6, 4)
    prepared = prepare(model, PruneSpec(rule, schedule=Schedule(0, 1.0, length=2)), x)
    step(prepared)
    prepared(x).sum().backward()
    masked = prepared.eval()(x)
    small = convert(prepared)
    torch.testing.assert_close(small(x), masked)
    if isinstance(rule, Channels):
        assert small.get_parameter("0.weight").shape == (8, 4)


class Merges(nn.Linear):
    """Adds its low ranks to its weight as it goes into eval mode, and takes them off again."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.left, self.right = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(1, 4))
        self.merged = False

    def train(self, mode: bool = True) -> "Merges":
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.left @ self.right)
            self.merged = not mode
        return self

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight if self.merged else self.weight + self.left @ self.right
        return F.linear(input, weight, self.bias)


def test_a_part_that_changes_as_its_mode_is_set_is_refused() -> None:
    model = Around(Merges())
    before = model.get_parameter("inner.weight").detach().clone()
    with pytest.raises(
        TraceError, match=r"Around changes inner.weight when .* eval mode.*merge_weights=False"
    ):
        trace(model, torch.randn(3, 4))
    assert torch.equal(model.get_parameter("inner.weight"), before)


class PicksByMode(nn.Module):
    """Puts another value into its buffer as its mode is set."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(4))

    def train(self, mode: bool = True) -> "PicksByMode":
        super().train(mode)
        self.value = torch.full((4,), 2.0 if mode else 1.0)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x


def test_a_buffer_that_is_another_in_each_mode_is_named() -> None:
    with pytest.raises(TraceError, match=r"Around changes inner.value when .*let forward pick one"):
        trace(Around(PicksByMode()), torch.randn(3, 4))


class Counts(Computes):
    """Counts its calls in its class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        return super().forward(x) * Counts.calls


def remembers(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 that is what is tested
    seen.append(1)
    return x * len(seen)


@pytest.mark.parametrize("model", [Counts(nn.Linear(4, 4)), Computes(remembers)], ids=["class", "default"])
def test_a_model_that_gives_something_else_at_every_call_is_told_so(model: nn.Module) -> None:
    told = "is none of its inputs, parameters and buffers: at a second call alike it returns another tensor"
    with pytest.raises(TraceError, match=told):
        trace(model, torch.randn(3, 4))
