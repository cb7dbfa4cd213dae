import logging

import pytest

from pdp_fx import Unstructured, VerifyError
from pdp_fx.compiler import Context, Pipeline
from pdp_fx.example_inputs import normalised
from pdp_fx.measuring import eval_outputs
from pdp_fx.passes.verify_equivalence import Reference, Verified, VerifyEquivalence
from pdp_fx.trace import trace
from tests.nets import at_once, listing, net

VERIFY = Pipeline((VerifyEquivalence(),))


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


def test_without_example_inputs_nothing_is_checked_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net("small")
    ctx = Context(at_once(Unstructured(0.5)))
    with caplog.at_level(logging.INFO):
        VERIFY.run(trace(model, x), ctx)
    assert "convert was not checked by numbers" in caplog.text
    assert ctx.find(Verified) is None
