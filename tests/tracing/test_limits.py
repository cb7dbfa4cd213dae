"""What `torch.finfo` says of the dtype of a tensor, which is another under autocast and after a cast."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, finfo, nn

from pdp_fx import Channels, PruneSpec, prepare
from tests.tracing.checks import exact, under


class Limited(nn.Module):
    """Computes with the limits of a tensor's numbers."""

    def __init__(self, limit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.limit = limit
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.limit(self.last(torch.relu(self.first(x))))


def masks(x: Tensor) -> Tensor:
    return x.masked_fill(x < x.mean(), torch.finfo(x.dtype).min).softmax(-1)


def divides(x: Tensor) -> Tensor:
    limits = finfo(x.dtype)
    return x / (x.norm() + limits.eps**0.5 + 2 * limits.tiny)


def least(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min / 2


def told(x: Tensor) -> Tensor:
    kind = x.dtype
    y = x.abs()
    limits = torch.finfo(type=kind)  # pyright: ignore[reportCallIssue] that is its name
    return y.clamp(min=least(kind) * 0 + limits.eps).log()


def filled(x: Tensor) -> Tensor:
    return torch.full((4,), least(x.dtype), dtype=x.dtype).maximum(x)


def filled_with(kind: torch.dtype, size: int) -> Tensor:
    return torch.full((size,), least(kind), dtype=kind)


def unpacked(x: Tensor) -> Tensor:
    size, kind = x.shape[1], x.dtype
    return filled_with(kind, size).maximum(x)


def chosen(x: Tensor) -> Tensor:
    kind = x.dtype if x.is_floating_point() else torch.float32
    return x + torch.ones((), dtype=kind) * torch.finfo(kind).eps


def of_torch(x: Tensor) -> Tensor:
    return torch.distributions.Bernoulli(probs=torch.sigmoid(40 * x)).log_prob(torch.ones((), dtype=x.dtype))


def sized(x: Tensor) -> Tensor:
    return x * x.element_size() + x.itemsize / x.nbytes


def fixed(x: Tensor) -> Tensor:
    return x.float() + torch.finfo(torch.float16).eps


LIMITS = (masks, divides, told, filled, unpacked, chosen, of_torch, sized, fixed)


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_follow_the_dtype(limit: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Limited(limit), torch.randn(3, 4)
    gm = exact(model, x, torch.randn(5, 4))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(under(dtype, gm, x), under(dtype, model, x))
    for dtype in (torch.float64, torch.bfloat16):
        expected = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert torch.equal(copy.deepcopy(gm).to(dtype)(x.to(dtype)), expected)


def test_attention_that_masks_by_limits_trains_under_autocast() -> None:
    model, x = Limited(masks), torch.randn(3, 4)
    prepared = prepare(model, PruneSpec(Channels(0.5)), x)
    under(torch.bfloat16, prepared, x).sum().backward()
    assert torch.equal(under(torch.bfloat16, prepared, x), under(torch.bfloat16, model, x))
    again = pickle.loads(pickle.dumps(prepared))
    assert torch.equal(under(torch.bfloat16, again, x), under(torch.bfloat16, model, x))
    compiled = torch.compile(prepared, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


class Positions(nn.Module):
    """Gives positions of a dtype, which it is told."""

    def forward(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.passed(size, dtype=dtype)

    def passed(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pass all on."""
        return torch.arange(*args, **kwargs) / torch.finfo(kwargs["dtype"]).bits


class ToldByModules(Limited):
    """Tells a module a dtype, which passes it on."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions(x.shape[1], dtype=x.dtype))


class OfItsOwn(Limited):
    """Has a dtype, which is that of its parameters."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)

    @property
    def dtype(self) -> torch.dtype:
        """That of the first parameter."""
        return next(parameter.dtype for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        kind = self.dtype
        mask = torch.arange(x.shape[1]) % 2
        return super().forward(x + (mask + 1).to(kind))


def test_a_dtype_is_followed_from_a_property() -> None:
    model, x = OfItsOwn(), torch.randn(3, 4)
    gm = exact(model, x)
    for dtype in (torch.float64, torch.bfloat16):
        expected = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert torch.equal(copy.deepcopy(gm).to(dtype)(x.to(dtype)), expected)


def test_a_dtype_is_followed_through_calls_of_modules() -> None:
    model, x = ToldByModules(), torch.randn(3, 4)
    gm = exact(model, x)
    for dtype in (torch.float64, torch.bfloat16):
        expected = copy.deepcopy(model).to(dtype)(x.to(dtype))
        found = copy.deepcopy(gm).to(dtype)(x.to(dtype))
        assert found.dtype == dtype
        if dtype is torch.float64:
            torch.testing.assert_close(found, expected)


class Weighs(nn.Module):
    """Weighs by numbers that are no buffers, in float32 whatever the model is cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places, self.others = nn.Linear(4, 4), torch.arange(4.0) + 1000.5, np.ones(4) / 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.places + torch.from_numpy(self.others.astype("float32"))


def test_tensors_that_are_no_buffers_are_not_cast() -> None:
    torch.manual_seed(0)
    model, x = Weighs(), torch.randn(3, 4)
    gm = exact(model, x, torch.randn(5, 4))
    for dtype in (torch.bfloat16, torch.float64):
        found, expected = (copy.deepcopy(net).to(dtype)(x.to(dtype)) for net in (gm, model))
        assert torch.equal(found, expected)
