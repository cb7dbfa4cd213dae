"""Inputs that are one tensor: a model may ask whether they are, as by ``query is key``.

No function sees such a question, so the model is run with one tensor in several places, and with copies.
"""

from typing import Any

from torch import fx, nn

from pdp_fx.errors import TraceError
from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.given import TAKE_ONCE
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.structure import tensors
from pdp_fx.tracing.verify import called, tried


def goes_by_same_inputs(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> bool:
    """Whether the model does something else where inputs of one kind are one tensor, and its graph does not.

    Raises:
        TraceError: so it is, and some of the example are one tensor.
    """
    alike = example.alike()
    if alike is None or not any(_differs(gm, model, alike, training) for training in MODES):
        return False
    given = [id(tensor) for tensor in tensors((example.args, example.kwargs))]
    if len(set(given)) < len(given):
        raise TraceError(
            f"{type(model).__name__} does something else where two of its inputs are one tensor, as here, "
            f"and a graph does not; {TAKE_ONCE}, or trace it with a copy"
        )
    return True


def _differs(gm: fx.GraphModule, model: nn.Module, alike: ExampleCall, training: bool) -> bool:
    wanted = tried(model, alike, training, runner=_as_one)
    apart = tried(model, alike, training)
    if not isinstance(wanted, Outcome) or not isinstance(apart, Outcome) or wanted.is_near(apart):
        return False
    got = tried(gm, alike, training, model, runner=_as_one)
    return isinstance(got, Outcome) and not wanted.is_near(got)


def _as_one(model: Any, call: ExampleCall) -> Any:
    """Call a model with one tensor in the place of all of its kind."""
    return called(model, call.alike() or call)
