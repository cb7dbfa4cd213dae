"""Running a model or its graph on the example inputs, leaving no trace."""

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.forgetting import forgetting, in_mode
from pdp_fx.tracing.outcome import Outcome, outcome

Runner = Callable[[Any, ExampleCall], Any]
"""What calls a model."""


def run(
    model: nn.Module, example: ExampleCall, training: bool, runner: Runner | None = None, *others: nn.Module
) -> Outcome:
    """Run a model in one mode and put everything back.

    Args:
        model: a model or its graph module.
        example: the arguments.
        training: the mode.
        runner: calls the model; None calls it as it is.
        others: modules to be put back, too.
    """
    return forgetting(lambda: _run(model, example.fresh(), training, runner or _call), model, *others)


def tried(model: nn.Module, example: ExampleCall, training: bool, *others: nn.Module) -> Outcome | Exception:
    """What a model gives in one mode on an example that it may not take, or why it does not take it."""
    try:
        work = lambda: _run(model, example.fresh(), training, _call)  # noqa: E731
        return forgetting(work, model, *others, expected=(Exception,))
    except Exception as err:  # noqa: BLE001 the example is ours, not the user's
        return err


def twice(first: ExampleCall) -> Runner:
    """Call a model on ``first``, and then on what it is given: what it keeps for its next call shows then."""

    def call(model: Any, second: ExampleCall) -> Any:
        _call(model, first.fresh())
        return _call(model, second)

    return call


def _run(model: nn.Module, call: ExampleCall, training: bool, runner: Runner) -> Outcome:
    return outcome(model, runner(in_mode(model, training), call))


def _call(model: nn.Module, call: ExampleCall) -> Any:
    """Call a model; a graph module, called as such, would print its code after an error."""
    if isinstance(model, fx.GraphModule):
        return nn.Module.__call__(model, *call.args, **call.kwargs)
    return model(*call.args, **call.kwargs)
