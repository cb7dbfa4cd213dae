"""Running a model or its graph on example inputs and undoing all that the run has changed."""

import random
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.forgetting import forgetting, in_mode
from pdp_fx.tracing.generators import seed
from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.tracing.outcome import Given, Outcome, outcome
from pdp_fx.tracing.selecting import SELECTS
from pdp_fx.tracing.structure import tensors

Runner = Callable[[Any, ExampleCall], Any]
"""Calls a model with the arguments of an example call and returns its output."""


def run(
    model: nn.Module, example: ExampleCall, training: bool, runner: Runner | None = None, *others: nn.Module
) -> Outcome:
    """Run a model in one mode, and restore all state afterwards.

    Args:
        model: a model or its graph module.
        example: the arguments.
        training: the mode.
        runner: calls the model; None calls it as it is.
        others: further modules whose state is restored.
    """
    return forgetting(lambda: _run(model, example.fresh(), training, runner or called), model, *others)


def tried(
    model: nn.Module,
    example: ExampleCall,
    training: bool,
    *others: nn.Module,
    runner: Runner | None = None,
) -> Outcome | Exception:
    """The outcome of a model in one mode on an example that it may refuse, or the error that it raises."""
    try:
        work = lambda: _run(model, example.fresh(), training, runner or called)  # noqa: E731
        return forgetting(work, model, *others, expected=(Exception,))
    except Exception as err:  # noqa: BLE001 the example is ours, not the user's
        return err


def difference(
    gm: nn.Module,
    model: nn.Module,
    example: ExampleCall,
    training: bool,
    refuses: Callable[[str], bool] = lambda _: True,
    runner: Runner | None = None,
) -> str | None:
    """How a graph differs from its model in one run, as a predicate; empty if it does not.

    Args:
        gm: the graph. It is run first: it refuses what it does not take before it computes.
        model: the model, which shares its parameters.
        example: the call, which the model need not accept.
        training: the mode.
        refuses: whether what an error of the graph says is that it does not take this call.
        runner: as for `run`.

    Returns:
        None if one of them refuses the call.
    """
    got = tried(gm, example, training, model, runner=runner)
    if isinstance(got, Exception) and refuses(str(got)):
        return None
    wanted = tried(model, example, training, runner=runner)
    if isinstance(wanted, Exception):
        return None
    return f"fails: {got}" if isinstance(got, Exception) else wanted.difference(got)


def again(first: ExampleCall, trains: bool) -> Runner:
    """A runner that calls a model on ``first`` and twice on the example, which shows state between calls.

    The second of these calls shows a state that the model forgets when it is given something else.

    Args:
        first: what it is called on before.
        trains: the mode of that call, which need not be that of the others.
    """

    def call(model: Any, second: ExampleCall) -> Any:
        training, third = model.training, second.fresh()
        called(in_mode(model, trains), first.fresh())
        model.train(training)
        return [called(model, each) for each in (second, third)]

    return call


def seeded(number: int) -> Runner:
    """A runner that seeds the random numbers of torch, Python and NumPy before it calls a model."""

    def call(model: Any, example: ExampleCall) -> Any:
        seed(number)
        random.seed(number)
        np.random.seed(number)
        return called(model, example)

    return call


def emptying(selections: Container[int], gone: set[fx.Node]) -> Runner:
    """A runner of a graph in which some selections select nothing.

    Args:
        selections: their numbers, from 1.
        gone: the nodes whose results have no elements then; added.
    """

    def call(gm: Any, example: ExampleCall) -> Any:
        return _Emptying(gm, selections, gone).run_on(example)

    return call


def flat(gm: Any, example: ExampleCall) -> Any:
    """A runner of a graph that runs all nodes, those too that the generated code leaves out in one mode."""
    return Interpreter(gm).run_on(example)


class _Emptying(Interpreter):
    def __init__(self, gm: fx.GraphModule, selections: Container[int], gone: set[fx.Node]) -> None:
        super().__init__(gm)
        self.selections, self.gone = selections, gone

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        found = list(tensors(result))
        if found and not any(tensor.numel() for tensor in found):
            self.gone.add(n)
        selects = n.meta.get(SELECTS, 0)
        if abs(selects) not in self.selections or not isinstance(result, torch.Tensor):
            return result
        return torch.full_like(result, selects < 0)


def _run(model: nn.Module, call: ExampleCall, training: bool, runner: Runner) -> Outcome:
    given = Given((call.args, call.kwargs))
    return outcome(model, runner(in_mode(model, training), call), given)


def called(model: nn.Module, call: ExampleCall) -> Any:
    """Call a model; `nn.Module.__call__` avoids that a graph module prints its code after an error."""
    if isinstance(model, fx.GraphModule):
        return nn.Module.__call__(model, *call.args, **call.kwargs)
    return model(*call.args, **call.kwargs)
