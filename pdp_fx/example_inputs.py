"""The example inputs of a model, and trial runs on them that change nothing.

A model may write to its inputs and buffers, draw random numbers, or depend on its mode. Every trial run
starts from the same state and the same random numbers, and all state is restored afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from pdp_fx.channels.running import evaluating, gradients_if_taken
from pdp_fx.ops.kinds import kind_of
from pdp_fx.tracing.examples import ExampleCall, ExampleInputs, Inputs, example_call
from pdp_fx.tracing.forgetting import checked_indices
from pdp_fx.tracing.functions import acts_in_place, written_by
from pdp_fx.tracing.generators import own_generators, seed
from pdp_fx.tracing.inputs import place_arguments
from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.tracing.preserve import preserved, unwritten
from pdp_fx.tracing.replacing import ALONE
from pdp_fx.tracing.structure import joint_copy, mapped
from pdp_fx.weights.sources import stored_nodes


def normalised(given: ExampleInputs | None) -> Inputs | None:
    """Example inputs as positional and keyword arguments, with copies of the tensors; None stays None.

    Raises:
        TraceError: they are neither a tensor, a tuple nor a mapping.
    """
    if given is None:
        return None
    call = example_call(given)
    return joint_copy((call.args, dict(call.kwargs)))


def fresh(inputs: Inputs) -> Inputs:
    """The same inputs with copies of all tensors."""
    call = ExampleCall(*inputs).fresh()
    return call.args, dict(call.kwargs)


def matching(inputs: Inputs, model: nn.Module) -> Inputs:
    """The inputs on the device of the model as it is now, and in its floating-point dtype.

    An input stays in its dtype if some parameter has that, too.
    """
    floating = [p for p in model.parameters() if p.is_floating_point()]
    if not floating:
        return inputs
    reference, dtypes = floating[0], {p.dtype for p in floating}

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        keeps = leaf.dtype in dtypes or not leaf.is_floating_point()
        return leaf.to(reference.device, leaf.dtype if keeps else reference.dtype)

    return mapped(cast, inputs)


class _Shapes(Interpreter):
    """Runs a graph and notes the shape of every tensor that a node returns."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.found[n.name] = tuple(result.shape)
        return result


@dataclass(frozen=True)
class Shapes:
    """The result of `shapes`, left in the context by a pass that has run the graph for another reason."""

    found: dict[str, tuple[int, ...]]


def shapes(gm: fx.GraphModule, inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a node of ``gm`` returns in eval mode, by the name of the node."""
    run = _Shapes(gm)
    with trial(gm):
        run.run(*place_arguments(gm, fresh(inputs)))
    return run.found


@contextlib.contextmanager
def trial(gm: fx.GraphModule) -> Generator[None]:
    """Run the block in eval mode with fixed random numbers, and restore the state of ``gm`` afterwards."""
    keeping = unwritten(gm) if _may_write(gm) else contextlib.nullcontext()
    with (
        ALONE,
        keeping,
        own_generators(gm),
        preserved(gm),
        evaluating(gm),
        checked_indices(),
        gradients_if_taken(gm),
    ):
        seed(0)
        yield


def _may_write(gm: fx.GraphModule) -> bool:
    """Whether a run may write to parameters: in place, or inside a module whose code is not known."""
    acting = [node for node in gm.graph.nodes if acts_in_place(node)]
    stored = stored_nodes(gm) if acting else set[fx.Node]()
    if not all(stored.isdisjoint(written_by(node)) for node in acting):
        return True
    called = (gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module")
    return any(kind_of(module) is None and next(module.parameters(), None) is not None for module in called)
