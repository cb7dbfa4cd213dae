"""The functions a user calls to prune a model: `prepare`, `step`, `penalty` and `convert`.

`prepare` traces the model (`trace`), runs the passes of `passes.PREPARE` and returns a graph module with a
child ``pdp`` (`pruner`). `convert` runs the passes of `passes.CONVERT` on a copy (`proving`).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.collecting import collecting_new
from pdp_fx.compiler import Context, OnPass, Pipeline
from pdp_fx.errors import PassError, SpecError, StateError, VerifyError
from pdp_fx.example_inputs import normalised
from pdp_fx.field_checks import described, refuse_uncallable
from pdp_fx.fingerprint import fingerprint, tables
from pdp_fx.granularity import NM, Channels, Unstructured, rule_text
from pdp_fx.held_hooks import NONE_HELD, Held, at_its_end, layers_to_hold
from pdp_fx.mac_model import mac_model
from pdp_fx.noted import Noted
from pdp_fx.ops.explicit import twin
from pdp_fx.ops.finite import all_finite
from pdp_fx.ops.kinds import named_modules
from pdp_fx.passes import CONVERT, PREPARE
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.find_sites import Sites
from pdp_fx.passes.label_channels import LabelWatch
from pdp_fx.planning import check_parameters, parameters_of
from pdp_fx.policy import may_add_penalty
from pdp_fx.policy_checks import check_hard, check_results
from pdp_fx.proving import check_unpruned, proved
from pdp_fx.pruner import CHILD, Pruner, find, find_one, units_pruned
from pdp_fx.sharding import gathered, refuse_divided, refuse_sharded, reshard
from pdp_fx.spec import PruneSpec
from pdp_fx.trace import trace, without_shape
from pdp_fx.tracing.copying import copied
from pdp_fx.tracing.examples import ExampleCall, ExampleInputs, Inputs
from pdp_fx.tracing.generators import own_generators
from pdp_fx.tracing.objects import join_methods
from pdp_fx.tracing.preserve import preserved, unwritten
from pdp_fx.tracing.relinking import relink
from pdp_fx.wrapping import refuse_more_than_wrapped, refuse_wrapped

logger = logging.getLogger(__name__)


@collecting_new()
@torch.inference_mode(False)
def prepare(
    model: nn.Module,
    spec: PruneSpec,
    example_inputs: ExampleInputs | None = None,
    on_pass: OnPass | None = None,
) -> fx.GraphModule:
    """Trace ``model`` and insert soft masks; train the result as you would train the model.

    Args:
        model: any module. It is not changed; the result shares its parameters and buffers, and has
            modules of its own around them, so that each can be in its own mode.
        spec: what to prune, how much, and when.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
            `Channels` needs them, and `convert` needs them to compare outputs.
        on_pass: called after every pass with the graph's text before it, the pass, and the module.

    Returns:
        a graph module with a child ``pdp`` that holds the masks and the schedule. Until the ramp
        starts, its outputs equal the model's bit for bit.

    Raises:
        SpecError: the spec does not fit the model, nothing in the model can be pruned by it, or an argument
            is of a wrong type.
        TraceError: the model cannot be traced, or does not run on the example inputs.
        StateError: the model is prepared already, is wrapped for several devices or compiled, or has
            parameters that are lazy, sharded, quantised or on the meta device.
        VerifyError: the masks would change the outputs before anything is pruned, which is a bug.

    Example:
        >>> from pdp_fx import Unstructured
        >>> prepared = prepare(nn.Linear(4, 4), PruneSpec(Unstructured(0.5)), torch.ones(1, 4))
    """
    refuse_uncallable("prepare: on_pass", on_pass)
    _refuse_unfit(model, spec)
    inputs = normalised(example_inputs)
    watch = LabelWatch(spec)
    with unwritten(model), own_generators(model), preserved(model):
        gm = trace(model, example_inputs, watch)
        if hasattr(gm, CHILD):
            raise StateError(
                f"the model has an attribute '{CHILD}', which is the name that prepare needs; rename it"
            )
        _unshare_modules(gm, model)
        ctx = Context(spec, inputs, dict(named_modules(model)))
        ctx.put(_layers_to_hold(gm, model, spec, inputs))
        ctx.put(watch)
        if watch.record is not None and watch.sites is not None:
            ctx.put(watch.sites)
        pruner = _masked(gm, ctx, on_pass)
        pruner.train(model.training)
        if inputs is not None and not pruner.has_other_policies:
            check_unpruned(gm, model, watch.outcome, ExampleCall(*inputs))
    pruner.check_reachable(gm)
    pruner.update_masks(gm)
    check_results(gm, pruner.mask_items())
    return gm


def _masked(gm: fx.GraphModule, ctx: Context, on_pass: OnPass | None) -> Pruner:
    """Insert the masks into a traced graph; return the state of its pruning, which it holds."""
    pruner = Pruner(ctx.spec, ctx.example_inputs)
    gm.add_submodule(CHILD, pruner)
    ctx.put(pruner)
    PREPARE.run(gm, ctx, on_pass)
    # Passes have put other layers in the place of some.
    join_methods(gm)
    _keep_findings(gm, pruner, ctx)
    pruner.set_seal()
    pruner.to(_device(gm))
    return pruner


def _layers_to_hold(gm: fx.GraphModule, model: nn.Module, spec: PruneSpec, inputs: Inputs | None) -> Held:
    """`layers_to_hold`, if there are inputs to try it on."""

    def goes(held: Held) -> None:
        tried = copied(gm, shares=True)
        ctx = Context(at_its_end(spec), inputs, dict(named_modules(model)))
        ctx.put(held)
        with preserved(gm):
            pruner = _masked(tried, ctx, None)
            pruner.update_masks(tried)
            pruner.step(tried)
            proved(tried, None, CONVERT)

    return NONE_HELD if inputs is None else layers_to_hold(gm, spec, goes)


def step(model: nn.Module) -> None:
    """Advance the pruning schedule: once after each epoch, or after each step of the optimizer.

    Args:
        model: a prepared model, also inside a wrapper such as DistributedDataParallel.

    Raises:
        StateError: the model was never prepared, holds several prepared models, or had a layer replaced,
            which is looked for once an epoch or, where steps of the optimizer count, once in a hundred.
        SpecError: the targets are due to be fixed, but weights are NaN or infinite.
    """
    gm, pruner = find_one(model, "step")
    pruner.check_numbers("step")
    reshard(model)
    pruner.step(gm)


def penalty(model: nn.Module) -> Tensor:
    """The term that the masks add to the loss, a 0-dim tensor; add it to your loss in every step.

    It is the sum of the spec's `pruned_decay` term and the penalties of your own policies. The paper's masks
    have none, so for them it is 0. If parameters are sharded over several processes, each of them must call
    this function.

    Args:
        model: a prepared model, also inside a wrapper such as DistributedDataParallel.

    Raises:
        StateError: the model was never prepared, or holds several prepared models.

    Example:
        >>> from pdp_fx import Unstructured
        >>> penalty(prepare(nn.Linear(4, 4), PruneSpec(Unstructured(0.5))))
        tensor(0.)
    """
    gm, pruner = find_one(model, "penalty")
    terms: list[Tensor] = []
    for _, mask in pruner.mask_items():
        if may_add_penalty(mask):
            with gathered(mask, with_gradients=True):
                term = mask.penalty(*parameters_of(gm, mask))
            terms += [] if term is None else [term]
        else:
            check_parameters(gm, mask)
    return torch.stack(terms).sum() if terms else torch.zeros((), device=_device(gm))


@collecting_new()
@torch.inference_mode(False)
def convert(model: nn.Module, on_pass: OnPass | None = None) -> fx.GraphModule:
    """Apply the hard masks, remove channels, fold BatchNorm, and check the outputs against the masked model.

    Args:
        model: a prepared model, also inside a wrapper such as DistributedDataParallel that adds no
            computation. It is not changed.
        on_pass: called after every pass with the graph's text before it, the pass, and the module; once more
            for all of them if rounding exceeds the tolerance, so that the conversion is done again.

    Returns:
        a plain `torch.fx.GraphModule` of plain torch modules, in eval mode. Its outputs equal those of the
        prepared model in eval mode: in float32 within 1e-5 of the output's scale or, if rounding alone
        exceeds that, in float64 within 1e-9; a model that cannot run in float64 within 1e-4. This is checked
        on the example inputs; where these are whole numbers or all equal, on other numbers; and where sizes
        say how channels are laid out, chosen or computed with, on inputs of other sizes. If the result fails
        on other inputs than the example, that is logged.

    Raises:
        SpecError: ``on_pass`` cannot be called.
        StateError: the model was never prepared, nothing is pruned yet, weights or running statistics are
            NaN, the schedule's whole numbers were averaged or cast, a table of indices is not the one that
            was prepared, a wrapper or a hook computes more, a masked layer was replaced, a policy keeps what
            it calls pruned or leaves too little of a group, or the model cannot be copied or no longer takes
            its example.
        VerifyError: the outputs differ; without hooks inside the model and policies that draw random numbers
            this would be a bug of this package.
        PassError: a pass failed.
    """
    return converted(model, on_pass, CONVERT)


def converted(model: nn.Module, on_pass: OnPass | None, pipeline: Pipeline) -> fx.GraphModule:
    """`convert` by a pipeline of your choice; arguments, result and errors are those."""
    refuse_uncallable("convert: on_pass", on_pass)
    gm, pruner = find_one(model, "convert")
    pruner.check_numbers("convert")
    reshard(model)
    refuse_sharded(gm)
    refuse_more_than_wrapped(model, gm, pruner.example_inputs)
    pruner.noted.check(gm, pruner.computed)
    pruner.check_unaveraged()
    _refuse_unpruned(gm, pruner)
    broken = _broken_weight(gm)
    if broken:
        raise StateError(
            f"{broken} holds NaN or infinite values: the training has diverged; convert needs numbers"
        )
    if pruner.share < 1 and any(mask.planned for _, mask in pruner.mask_items()):
        logger.warning("convert at %.0f %% of the target: the ramp has not finished", 100 * pruner.share)
    check_hard(gm, pruner.mask_items())
    try:
        return proved(gm, on_pass, pipeline)
    except (PassError, VerifyError) as err:
        changed = _changed_table(gm, pruner)
        if changed is None:
            raise
        raise StateError(
            f"{changed} holds other indices than when the model was prepared, and channels were grouped "
            "by them; load the checkpoint into the model before prepare"
        ) from err


def _changed_table(gm: fx.GraphModule, pruner: Pruner) -> str | None:
    """The name of an index buffer whose contents have changed since `prepare`, or None."""
    now = tables(gm)
    return next((name for name, digest in pruner.tables.items() if now.get(name) != digest), None)


def _keep_findings(gm: fx.GraphModule, pruner: Pruner, ctx: Context) -> None:
    """Store in ``pruner`` what explain, report, the schedule and convert need of the passes' results."""
    plan, found = ctx.get(Plan), ctx.find(ChannelMap)
    pruner.weights = tuple(site.parameter for site in ctx.get(Sites).weights)
    pruner.groups = plan.groups
    read = [name for _, mask in pruner.mask_items() for name in mask.parameters_read]
    pruned = (slot.tensor for group, _ in pruner.groups for slot in group.members)
    pruner.noted = Noted.of(gm, read, pruned)
    pruner.kept = plan.kept
    pruner.skipped = plan.skipped
    if found is not None:
        pruner.channels = found.abridged(gm)
        pruner.fingerprint = fingerprint(gm)
        pruner.tables = tables(gm)
        pruner.mac_model = mac_model(found, [group for group, _ in plan.groups])


def _unshare_modules(gm: fx.GraphModule, model: nn.Module) -> None:
    """Replace every module that ``gm`` shares with ``model`` by a copy around the same parameters."""
    shared, copies = set(model.modules()), dict[nn.Module, nn.Module]()
    for name, module in named_modules(gm):
        if module in shared:
            gm.set_submodule(name, copies.setdefault(module, twin(module)))
    relink(copies.values(), copies)
    join_methods(gm)


def _refuse_unfit(model: nn.Module, spec: PruneSpec) -> None:
    """Check all that can be checked before the model is traced."""
    _refuse_wrong_types(model, spec)
    if find(model) is not None:
        raise StateError("the model is prepared already; call convert(model), or prepare the original model")
    refuse_wrapped(model)
    spec.check_matches(dict(named_modules(model)))
    _refuse_without_numbers(model)


def _refuse_wrong_types(model: nn.Module, spec: PruneSpec) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"prepare needs a torch.nn.Module, got {described(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise SpecError(
            "the model is compiled by TorchScript; prepare the Python model and script the converted one"
        )
    if not isinstance(spec, PruneSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = rule_text(spec) if isinstance(spec, Unstructured | NM | Channels) else "Unstructured(0.9)"
        raise SpecError(f"prepare needs a PruneSpec, got {described(spec)}; write PruneSpec({rule})")


def _refuse_without_numbers(model: nn.Module) -> None:
    """Refuse parameters without a shape, in parts, without storage, or with values that are not finite."""
    lazy = without_shape(model)
    if lazy is not None:
        raise StateError(f"{lazy} has no shape yet; run the model once, so that its lazy modules are made")
    refuse_divided(model)
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise StateError(
            f"{empty} is on the meta device and holds no numbers; call model.to_empty(device=...) and load "
            "or initialise the weights before prepare"
        )
    broken = _broken_weight(model)
    if broken:
        raise SpecError(
            f"{broken} holds NaN or infinite values, so its weights cannot be ranked; check the model"
        )


def _broken_weight(model: nn.Module) -> str:
    """The name of a parameter or BatchNorm statistic with NaN or infinite values, or the empty string.

    A frozen parameter may be infinite: so are masks that attention adds.
    """
    norms = [name for name, module in named_modules(model) if isinstance(module, _NormBase)]
    statistics = {
        f"{name}.{which}".lstrip(".") for name in norms for which in ("running_mean", "running_var")
    }
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in statistics]
    for name, tensor in [*model.named_parameters(), *buffers]:
        ranked = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta
        if not ranked or all_finite(tensor):
            continue
        if tensor.requires_grad or name in statistics or tensor.isnan().any():
            return name
    return ""


def _refuse_unpruned(gm: fx.GraphModule, pruner: Pruner) -> None:
    """Refuse to convert a model in which no mask prunes anything."""
    if any(units_pruned(gm, mask) for _, mask in pruner.mask_items()):
        return
    counter, schedule = int(pruner.counter), pruner.spec.schedule
    if counter == 0:
        raise StateError(
            "nothing is pruned: the schedule was never advanced; call pdp_fx.step(model) as you train, or "
            "give an average the state of its model, average.pdp.load_state_dict(model.pdp.state_dict())"
        )
    raise StateError(
        f"nothing is pruned yet: step was called {counter} times, and the ramp runs from {schedule.start} to "
        f"{schedule.ramp_end}; train on, or give the spec a shorter Schedule"
    )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
