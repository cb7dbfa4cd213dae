"""Operations that fail in the example, where the model goes on with something else."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.trace import trace
from tests.tracing.checks import Around, Computes, opaque


def factored(x: Tensor) -> Tensor:
    spread = x.mT @ x
    try:
        return x @ torch.linalg.cholesky(spread)
    except RuntimeError:
        return x * spread.diagonal().sqrt()


def inverted(x: Tensor) -> Tensor:
    found = x
    with contextlib.suppress(RuntimeError):
        found = x @ torch.linalg.inv(x.mT @ x)
    return found


def chosen(x: Tensor) -> Tensor:
    places = (x.abs() * 2).long()
    try:
        return x.gather(1, places)
    except RuntimeError:
        return -x


def in_a_call(x: Tensor) -> Tensor:
    try:
        return drawn(x)
    except RuntimeError:
        return x * 3


def drawn(x: Tensor) -> Tensor:
    return x * torch.multinomial(x.sum(1), 1)


@pytest.mark.parametrize("act", [factored, inverted, chosen, in_a_call])
def test_a_part_that_goes_on_where_numbers_make_an_operation_fail_is_kept_whole(
    act: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Around(Computes(act)).double().eval()
    nn.init.constant_(model.before.weight, 0.0)
    nn.init.constant_(model.before.bias, -3.0)
    gm = trace(model, torch.randn(8, 4, dtype=torch.float64))
    (reason,) = opaque(gm).values()
    assert reason.startswith("goes on where the numbers in a tensor raise a")
    nn.init.normal_(model.before.weight, std=0.1)
    nn.init.constant_(model.before.bias, 0.1)
    x = torch.randn(8, 4, dtype=torch.float64)
    torch.manual_seed(1)
    wanted = model(x)
    torch.manual_seed(1)
    assert torch.equal(gm.eval()(x), wanted)


def viewed(x: Tensor) -> Tensor:
    try:
        return x.view(-1, 3)
    except RuntimeError:
        return x * 2


def moved(x: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError, AssertionError):
        return x.to("mps")
    return x


@pytest.mark.parametrize("act", [viewed, moved])
def test_what_sizes_and_devices_make_fail_is_followed(act: Callable[[Tensor], Tensor]) -> None:
    assert not opaque(trace(Around(Computes(act)), torch.randn(2, 4)))
