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

from pdp_fx import Channels, PruneSpec, Schedule, convert, prepare, step
from pdp_fx.trace import trace
from tests.tracing.checks import Computes, exact, opaque


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


class CastsALayer(nn.Module):
    """Sees to it that one of its layers computes in a dtype, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        return self.head(torch.relu(self.router(x)))


def test_a_layer_that_has_the_dtype_to_which_it_is_cast_is_followed() -> None:
    model, x = CastsALayer(), torch.randn(3, 4)
    gm = trace(model, (x,))
    assert not opaque(gm)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    with pytest.raises(AssertionError, match=r"test_lost_dtypes.py:\d+ casts a layer to torch.float32"):
        gm.double()(x.double())


def test_such_a_layer_is_pruned() -> None:
    spec = PruneSpec(Channels(0.5), schedule=Schedule(start=0, epsilon=1.0))
    x = torch.randn(3, 4)
    masked = prepare(CastsALayer(), spec, (x,))
    step(masked)
    converted = convert(masked)
    assert converted.get_parameter("router.weight").shape == (4, 4)
    torch.testing.assert_close(converted(x), masked.eval()(x))
