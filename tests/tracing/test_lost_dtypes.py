"""Dtypes that Python passes on unseen are found by casting the graph and the model."""

import contextlib
import copy
import functools
import operator
import threading
from collections.abc import Callable, Generator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdp_fx.trace import trace
from tests.tracing.checks import exact


class Computes(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def dtype_of(x: Tensor) -> torch.dtype:
    return x.dtype


@functools.lru_cache
def third(dtype: torch.dtype) -> Tensor:
    return torch.full((4,), 1 / 3, dtype=dtype)


@contextlib.contextmanager
def doubled(x: Tensor) -> Generator[tuple[Tensor, torch.dtype]]:
    yield x.double(), x.dtype


def in_a_block(x: Tensor) -> Tensor:
    with doubled(x) as (wide, dtype):
        return (wide / 3).to(dtype)


LOST: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: (x.double() / 3).to(dtype_of(x)),
    lambda x: x + torch.full((4,), 1 / 3, dtype=dtype_of(x)),
    lambda x: functools.partial(torch.Tensor.to, dtype=x.dtype)(x.double() / 3),
    lambda x: (x.double() / 3).to(operator.attrgetter("dtype")(x)),
    lambda x: x + third(x.dtype),
    lambda x: x + torch.as_tensor(np.full(4, 1 / 3), dtype=x.dtype),
    lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(0), dtype=x.dtype),
    lambda x: x * len({x.dtype} & {torch.float32}),
    in_a_block,
)


@pytest.mark.parametrize("compute", LOST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dtype_that_gets_lost_holds_the_graph_to_it(
    compute: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Computes(compute)), torch.randn(2, 4)
    gm = exact(model, x)
    with pytest.raises(AssertionError, match="test_lost_dtypes.py:.*a dtype that it reads"):
        gm.to(dtype)(x.to(dtype))


def test_a_dtype_that_makes_no_difference_is_not_held() -> None:
    counts = Computes(lambda x: x * len({dtype_of(x)}))
    model, x = nn.Sequential(nn.Linear(4, 4), counts), torch.randn(2, 4)
    gm = copy.deepcopy(exact(model, x)).bfloat16()
    wanted = copy.deepcopy(model).bfloat16()(x.bfloat16())
    torch.testing.assert_close(gm(x.bfloat16()), wanted, rtol=0, atol=0)


class Locked(Computes):
    """Holds what cannot be copied."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__(compute)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_held_to_the_dtypes_that_it_reads() -> None:
    locked = Locked(lambda x: (x.double() / 3).to(dtype_of(x)))
    model, x = nn.Sequential(nn.Linear(4, 4), locked), torch.randn(2, 4)
    gm = trace(model, x)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    with pytest.raises(AssertionError, match="a dtype that it reads"):
        gm.double()(x.double())
