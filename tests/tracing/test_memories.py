import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tracing.checks import exact


@functools.lru_cache(maxsize=8)
def split_heads(shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
    return *shape[:-1], heads, shape[-1] // heads


@functools.lru_cache
def causal(steps: int) -> Tensor:
    return torch.ones(steps, steps).tril()


@functools.cache
def halves() -> float:
    return 0.5


def remembers_unless_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as transformers has one, which holds the function that remembers."""
    remembering = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) if torch.compiler.is_compiling() else remembering(*args)

    return call


@remembers_unless_compiled
def table(height: int, width: int) -> Tensor:
    return torch.arange(height * width).view(height, width) / height


class Heads(nn.Module):
    """Plans its reshapes as einops does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow = self.wide(x), self.narrow(x)
        wide = wide.reshape(split_heads(wide.shape, 2)).mean(-2)
        return causal(x.shape[1]) @ (wide + narrow.reshape(split_heads(narrow.shape, 1)).sum(-2)) * halves()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rows = functools.cache(self.count_rows)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as users write it
    def positions(self, steps: int) -> Tensor:
        return torch.arange(steps) / steps

    def count_rows(self, batch: int, steps: int) -> int:
        return batch * steps

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        rows = self.linear(x).reshape(self.rows(batch, steps), width)
        return rows.reshape(x.shape) + self.positions(steps)[:, None]


def test_sizes_stay_alive_past_functions_that_remember() -> None:
    model, traced = Heads(), torch.randn(2, 5, 4)
    # What is remembered of a run before, and of another tensor of the same size, is no answer.
    model(traced)
    split_heads((2, 5, 8), 2)
    exact(model, traced, torch.randn(3, 7, 4), torch.randn(1, 2, 4))


def test_and_past_methods() -> None:
    model, traced = Remembers(), torch.randn(2, 5, 4)
    model(traced)
    exact(model, traced, torch.randn(3, 7, 4), torch.randn(1, 2, 4))


class RemembersByDecorator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @remembers_unless_compiled
    def rows(self, batch: int, steps: int) -> int:
        return batch * steps

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        rows = self.linear(x).reshape(self.rows(batch, steps), width)
        return rows.reshape(x.shape) + table(steps, width)


def test_and_past_decorators_that_remember() -> None:
    model, traced = RemembersByDecorator(), torch.randn(2, 5, 4)
    model(traced)
    held = table.__closure__
    assert held is not None
    before = [cell.cell_contents for cell in held]
    exact(model, traced, torch.randn(3, 7, 4), torch.randn(1, 2, 4))
    assert [cell.cell_contents for cell in held] == before


class RemembersWithoutSelf(nn.Module):
    """Static methods and class methods, as the position embeddings of detection transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def places(shape: tuple[int, ...]) -> Tensor:
        return torch.arange(shape[1])[:, None] / shape[1]

    @staticmethod
    @remembers_unless_compiled
    def rows(batch: int, steps: int) -> int:
        return batch * steps

    @classmethod
    @functools.cache
    def scale(cls, steps: int) -> float:
        return len(cls.__name__) / steps

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).reshape(self.rows(x.shape[0], x.shape[1]), -1)
        return rows.reshape(x.shape) * self.scale(x.shape[1]) + self.places(x.shape)


def test_and_past_methods_without_self() -> None:
    model, traced = RemembersWithoutSelf(), torch.randn(2, 5, 4)
    before = dict(vars(RemembersWithoutSelf))
    model(traced)
    exact(model, traced, torch.randn(3, 7, 4), torch.randn(1, 2, 4))
    assert dict(vars(RemembersWithoutSelf)) == before


def test_two_tensors_of_one_size_keep_their_own_sizes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x, y = self.linear(x), self.linear(y)
            return x.reshape(split_heads(x.shape, 2)), y.reshape(split_heads(y.shape, 2))

    same = (torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    exact(Two(), same, (torch.randn(3, 5, 4), torch.randn(1, 7, 4)))


def test_what_is_remembered_is_left_alone() -> None:
    before = split_heads, causal, Remembers.positions, halves.cache_info()
    model = Heads()
    exact(model, torch.randn(2, 3, 4))
    assert before[:3] == (split_heads, causal, Remembers.positions)
    assert split_heads.cache_info().maxsize == 8
    assert all(type(size) is int for size in split_heads((2, 3, 8), 2))


def test_a_module_that_is_barred_from_being_imported_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "barred_from_import", None)
    exact(Heads(), torch.randn(2, 3, 4))
