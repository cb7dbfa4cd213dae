from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.measuring import InOrder, eval_outputs, relative_difference
from pdp_fx.trace import trace

INF, NAN = float("inf"), float("nan")


class Draws(nn.Module):
    """Draws random numbers in eval mode, too, in the memory format of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) + torch.empty_like(x).uniform_() + torch.rand(2, 1, 1, 1)


def test_random_numbers_do_not_depend_on_how_memory_is_laid_out() -> None:
    x = torch.randn(2, 3, 4, 4)
    other = x.to(memory_format=torch.channels_last)
    for mode, same in ((InOrder(), True), (nullcontext(), False)):
        found: list[Tensor] = []
        for image in (x, other):
            torch.manual_seed(0)
            with mode:
                found.append(Draws()(image))
        assert torch.equal(*found) is same
    (a,), (b,) = (eval_outputs(trace(Draws(), x), ((image,), {})) for image in (x, other))
    assert torch.equal(a, b)


def numbers(*values: float) -> tuple[Tensor, ...]:
    return (torch.tensor(values),)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (numbers(1.0, 2.0), numbers(1.0, 2.0), 0.0),
        (numbers(1.0, 2.5), numbers(1.0, 2.0), 0.25),
        (numbers(1.0, -INF), numbers(1.0, -INF), 0.0),
        (numbers(1.5, -INF), numbers(1.0, -INF), 0.5),
        (numbers(1.0, INF), numbers(1.0, -INF), INF),
        (numbers(1.0, NAN), numbers(1.0, NAN), 0.0),
        (numbers(1.0, NAN), numbers(1.0, 1.0), INF),
        (numbers(1.0, 1.0), numbers(1.0, NAN), INF),
        (numbers(1.0, INF), numbers(1.0, 1.0), INF),
        (numbers(1.0), numbers(1.0, 1.0), INF),
        (numbers(), numbers(), 0.0),
        ((), numbers(1.0), INF),
        (numbers(0.0), numbers(0.0), 0.0),
        ((torch.tensor([1, 7]),), (torch.tensor([1, 7]),), 0.0),
        ((torch.tensor([1, 7]),), (torch.tensor([2, 7]),), INF),
        ((torch.tensor(1.0), torch.tensor(3.0)), (torch.tensor(1.0), torch.tensor(2.0)), 0.5),
    ],
)
def test_the_difference_is_relative_to_each_outputs_own_scale(
    mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...], expected: float
) -> None:
    assert relative_difference(mine, theirs) == expected
