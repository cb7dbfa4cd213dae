"""prepare, step, convert: the three verbs a user calls, and what runs behind each."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from pdp_fx.channels.analysis import ChannelMap
from pdp_fx.compiler import Context, OnPass
from pdp_fx.errors import SpecError, StateError, VerifyError
from pdp_fx.mac_model import mac_model
from pdp_fx.passes import CONVERT, PREPARE
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.find_sites import Sites
from pdp_fx.passes.verify_equivalence import Reference, eval_outputs
from pdp_fx.pruner import CHILD, Pruner, find
from pdp_fx.spec import PruneSpec
from pdp_fx.trace import ExampleInputs, trace

logger = logging.getLogger(__name__)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def prepare(
    model: nn.Module, spec: PruneSpec, example_inputs: ExampleInputs = None, on_pass: OnPass | None = None
) -> fx.GraphModule:
    """Trace ``model`` and insert soft masks; train the result as you would train the model.

    Args:
        model: any module. It is not changed; the result shares its parameters and buffers.
        spec: what to prune, how much, and when.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
            `Channels` needs them; with them `convert` also proves itself by numbers.
        on_pass: called after every pass with the graph's text before it, the pass, and the module.

    Returns:
        a graph module with a child ``pdp`` that holds the masks and the schedule. Until the ramp
        starts it computes bit for bit what the model computes.

    Raises:
        SpecError: the spec does not fit the model.
        TraceError: the model cannot be traced.
        StateError: the model is prepared already.

    Example:
        >>> prepared = prepare(nn.Linear(4, 4), PruneSpec(Unstructured(0.5)), torch.ones(1, 4))
    """
    if find(model) is not None:
        raise StateError("the model is prepared already; call convert(model), or prepare the original model")
    modules = dict(model.named_modules())
    spec.check_matches(modules)
    _refuse_broken_weights(model)
    gm = trace(model, example_inputs)
    if hasattr(gm, CHILD):
        raise StateError(f"the model has an attribute '{CHILD}', which is the name that prepare needs; rename it")
    inputs = normalised(example_inputs)
    pruner = Pruner(spec, inputs)
    gm.add_submodule(CHILD, pruner)
    ctx = Context(spec, inputs, modules)
    ctx.put(pruner)
    PREPARE.run(gm, ctx, on_pass)
    _keep_findings(pruner, ctx)
    pruner.to(_device(model))
    pruner.train(model.training)
    pruner.check_reachable(gm)
    return gm


def step(model: nn.Module) -> None:
    """Advance the pruning schedule: once after each epoch, or after each step of the optimizer.

    Args:
        model: a prepared model, also inside a wrapper such as DistributedDataParallel.

    Raises:
        StateError: the model was never prepared.
        SpecError: the targets are due to be fixed, but weights are NaN or infinite.
    """
    gm, pruner = _prepared(model, "step")
    pruner.step(gm)


def convert(model: nn.Module, on_pass: OnPass | None = None) -> fx.GraphModule:
    """Apply the hard masks, remove channels, fold BatchNorm, and check the result by numbers.

    Args:
        model: a prepared model. It is not changed.
        on_pass: called after every pass with the graph's text before it, the pass, and the module.

    Returns:
        a plain `torch.fx.GraphModule` of plain torch modules, in eval mode, whose outputs are those
        of the prepared model in eval mode (float32: within 1e-5 of the output's scale).

    Raises:
        StateError: the model was never prepared, or nothing is pruned yet.
        VerifyError: the outputs differ; this would be a bug of this package.
    """
    gm, pruner = _prepared(model, "convert")
    _refuse_unpruned(pruner)
    if pruner.share < 1:
        logger.warning("convert at %.0f %% of the target: the ramp has not finished", 100 * pruner.share)
    dtype = next((p.dtype for p in gm.parameters() if p.is_floating_point()), torch.float32)
    if dtype in TOLERANCE:
        try:
            return _converted(copy.deepcopy(gm), TOLERANCE[dtype], on_pass)
        except VerifyError:
            if dtype == torch.float64:
                raise
    # Rounding alone can exceed the tolerance; in float64 it cannot, so there the difference is a proof.
    _converted(copy.deepcopy(gm).double(), TOLERANCE[torch.float64], None)
    return _converted(copy.deepcopy(gm), float("inf"), on_pass)


def _converted(gm: fx.GraphModule, tolerance: float, on_pass: OnPass | None) -> fx.GraphModule:
    """Convert ``gm``, which is ours to change."""
    pruner = gm.get_submodule(CHILD)
    if not isinstance(pruner, Pruner):
        raise StateError("the model's 'pdp' child is not what prepare has put there")
    inputs = _cast(pruner.example_inputs, gm)
    ctx = Context(pruner.spec, inputs)
    ctx.put(pruner)
    gm.eval()
    if inputs is not None:
        ctx.put(Reference(eval_outputs(gm, inputs), tolerance))
    CONVERT.run(gm, ctx, on_pass)
    return _plain(gm)


def _plain(gm: fx.GraphModule) -> fx.GraphModule:
    """A bare graph module: no type of ours, no module that the graph does not use."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    plain = fx.GraphModule(gm, graph, type(gm).__name__)
    plain.graph.lint()
    return plain.eval()


def _keep_findings(pruner: Pruner, ctx: Context) -> None:
    """Keep what explain, report and the schedule need after the passes have run."""
    plan, found = ctx.get(Plan), ctx.find(ChannelMap)
    pruner.weights = tuple(site.parameter for site in ctx.get(Sites).weights)
    pruner.groups = plan.groups
    pruner.kept = plan.kept
    pruner.skipped = plan.skipped
    if found is not None:
        pruner.channels = replace(found, nodes={})
        pruner.mac_model = mac_model(found, [group for group, _ in plan.groups])


def _prepared(model: nn.Module, verb: str) -> tuple[fx.GraphModule, Pruner]:
    found = find(model)
    if found is None:
        raise StateError(f"{verb}(model) needs a model that came from pdp_fx.prepare; this one did not")
    return found


def _refuse_unpruned(pruner: Pruner) -> None:
    if any(int(mask.count) for _, mask in pruner.mask_items()):
        return
    counter, start = int(pruner.counter), pruner.spec.schedule.start
    if counter == 0:
        raise StateError("nothing is pruned: the schedule was never advanced; call pdp_fx.step(model) as you train")
    raise StateError(
        f"nothing is pruned yet: step was called {counter} times and the ramp starts after {start}; train on, "
        "or give the spec a shorter Schedule"
    )


def _refuse_broken_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise SpecError(f"{name} holds NaN or infinite values, so its weights cannot be ranked; check the model")


def normalised(example_inputs: ExampleInputs) -> Inputs | None:
    """Example inputs as positional and keyword arguments."""
    if example_inputs is None:
        return None
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    return tuple(example_inputs), {}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _cast(inputs: Inputs | None, gm: fx.GraphModule) -> Inputs | None:
    """The example inputs on the device and in the dtype of the model as it is now."""
    reference = next((p for p in gm.parameters() if p.is_floating_point()), None)
    if inputs is None or reference is None:
        return inputs

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(reference.device, reference.dtype if leaf.is_floating_point() else leaf.dtype)

    return tree_map(cast, inputs)


