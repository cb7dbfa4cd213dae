import logging
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from pdp_fx import Unstructured, VerifyError
from pdp_fx.compiler import Context, Pipeline
from pdp_fx.example_inputs import normalised
from pdp_fx.passes.verify_equivalence import (
    InOrder,
    Reference,
    Verified,
    VerifyEquivalence,
    eval_outputs,
    relative_difference,
)
from pdp_fx.trace import trace
from tests.nets import at_once, listing, net

VERIFY = Pipeline((VerifyEquivalence(),))
INF, NAN = float("inf"), float("nan")


def test_equal_outputs_pass_and_the_graph_is_left_alone() -> None:
    model, x = net("small")
    gm = trace(model, x).eval()
    ctx = Context(at_once(Unstructured(0.5)), normalised(x))
    assert ctx.example_inputs is not None
    ctx.put(Reference(eval_outputs(gm, ctx.example_inputs), 0.0))
    before = listing(gm)
    VERIFY.run(gm, ctx)
    assert ctx.get(Verified) == Verified(0.0, {})
    assert listing(gm) == before


def test_a_difference_above_the_tolerance_is_refused_and_one_below_is_not() -> None:
    model, x = net("small")
    gm = trace(model, x).eval()
    ctx = Context(at_once(Unstructured(0.5)), normalised(x))
    assert ctx.example_inputs is not None
    outputs = eval_outputs(gm, ctx.example_inputs)
    scale = float(outputs[0].abs().max())
    ctx.put(Reference((outputs[0] + 1e-3 * scale,), 2e-3))
    VERIFY.run(gm, ctx)
    ctx.put(Reference((outputs[0] + 1e-3 * scale,), 5e-4))
    with pytest.raises(VerifyError, match=r"by (9\.9\d|1\.00)e-0[34] of the output's scale; at most 5e-04"):
        VERIFY.run(gm, ctx)


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


def test_without_example_inputs_nothing_is_checked_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net("small")
    ctx = Context(at_once(Unstructured(0.5)))
    with caplog.at_level(logging.INFO):
        VERIFY.run(trace(model, x), ctx)
    assert "convert was not checked by numbers" in caplog.text
    assert ctx.find(Verified) is None


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
