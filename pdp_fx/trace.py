"""`trace`: from a model to a graph module that shares its parameters.

Without example inputs the graph comes from `torch.fx` symbolic tracing, which sees no values; with them it
comes from recording what the model does in a run. Either way the model is traced in eval mode and in training
mode, and the two traces are merged into one graph that follows `.train()` and `.eval()`. With example inputs
the graph is then run in both modes, and its outputs must equal the model's bit for bit. The parts of the
tracer are in `pdp_fx.tracing`; this file decides what is tried, and in which order.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from pdp_fx.errors import TraceError
from pdp_fx.field_checks import described
from pdp_fx.tracing.align import align
from pdp_fx.tracing.attempts import Recordings, record_both, refusal
from pdp_fx.tracing.calls import path_of
from pdp_fx.tracing.compiling import compiling
from pdp_fx.tracing.decoys import insist
from pdp_fx.tracing.depth import deep_recursion
from pdp_fx.tracing.exact import (
    MODES,
    build,
    exact_graph,
    given_by,
    gives_when_watched,
    problem_of,
    reference,
)
from pdp_fx.tracing.examples import ExampleCall, ExampleInputs, example_call
from pdp_fx.tracing.expressions import reread
from pdp_fx.tracing.findings import Findings, Sizes
from pdp_fx.tracing.forgetting import in_mode
from pdp_fx.tracing.generators import own_generators
from pdp_fx.tracing.hooks import warn_of_hooks
from pdp_fx.tracing.idle import noticing_idle
from pdp_fx.tracing.inputs import with_default_numbers
from pdp_fx.tracing.key_order import goes_by_keywords, goes_by_order
from pdp_fx.tracing.leaves import COMPOSITES, has_backward_hooks
from pdp_fx.tracing.left_out import asked_for, not_needed_in_eval
from pdp_fx.tracing.module import taken_name
from pdp_fx.tracing.narrowing import Paths, culprits
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.preserve import all_is_written, noting_changes, preserved, unwritten
from pdp_fx.tracing.remembering import remembering
from pdp_fx.tracing.replacing import ALONE, replaced
from pdp_fx.tracing.resizing import OtherSizes
from pdp_fx.tracing.same_inputs import goes_by_same_inputs
from pdp_fx.tracing.source import line_of, source_of
from pdp_fx.tracing.steps import InexactError, Whole
from pdp_fx.tracing.structure import are_equal, arrays, equals_copies, hiding_tensors, opaque_parts, tensors
from pdp_fx.tracing.symbolic import symbolic_recording
from pdp_fx.tracing.unfused import unfused_attention
from pdp_fx.tracing.unmoved import unmoved_iterators
from pdp_fx.tracing.unscripting import unscripted
from pdp_fx.tracing.unseen import RETURNED
from pdp_fx.tracing.verify import Runner, run, tried
from pdp_fx.tracing.waiving import insists, waive
from pdp_fx.tracing.writer import DECIDES

_log = logging.getLogger(__name__)


def trace(
    model: nn.Module, example_inputs: ExampleInputs | None = None, watch: Runner | None = None
) -> fx.GraphModule:
    """Trace a model into a graph module that computes the same and shares its parameters and layers.

    Args:
        model: any module; it is not modified.
        example_inputs: one tensor, a tuple of positional arguments or a dict of keyword arguments. Without
            them, only models whose control flow does not depend on tensors can be traced.
        watch: replaces the run in eval mode by which the graph is checked; called with the graph module and
            the example call, it runs the graph, may observe the run, and returns the graph's output.

    Returns:
        A graph module with the parameters, buffers, layers, names and training flags of the model. Each
        node's `meta` has `source`, the line that made it, and `owner`, the path of the module it happened in;
        where a module, method or function was kept whole, `opaque` says why.

    Raises:
        TraceError: the model cannot be traced; the message says where and why.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TraceError(f"the model must be a torch.nn.Module, got {described(model)}")
    taken = taken_name(model)
    if taken is not None:
        raise TraceError(
            f"the model has a part {taken!r}, a name that every torch.fx.GraphModule has for itself; "
            "rename it, or put the model into another, as in nn.Sequential(model)"
        )
    if has_backward_hooks(model):
        raise TraceError(
            f"{type(model).__name__} has hooks of its own that are called with its gradients, which a graph "
            "does not do; register them with what is made of the model"
        )
    with ALONE:
        reread()
        _refuse_one_mode(model)
        if example_inputs is None:
            return _trace_symbolically(model)
        with deep_recursion():
            example = with_default_numbers(model, example_call(example_inputs))
            try:
                gm = _trace_on(model, example, watch)
            except InexactError as err:
                of_model = _written_by_mode(model) or _never_the_same(model, example)
                raise of_model or err from err.__cause__
    return gm


def _trace_on(model: nn.Module, example: ExampleCall, watch: Runner | None) -> fx.GraphModule:
    lazy = without_shape(model)
    if lazy is not None:
        raise TraceError(f"{lazy} has no shape yet; run the model once before tracing it")
    _refuse_unfit(model, example)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        replaced(functional, "_verify_batch_size", _accept),
        unfused_attention(),
        unwritten(model),
        own_generators(model),
        unmoved_iterators(model),
    ):
        with unscripted() as scripts:
            gm = _trace_until_nothing_lasts(model, example, watch)
            outcome = run(gm, example, False, None, model) if scripts else None
        if outcome is not None and not outcome.is_near(reference(model, example, training=False)):
            raise TraceError(f"TorchScript does not compute what the Python of {min(scripts)} does")
        warn_of_hooks(gm, model, example)
        return gm


def _trace_until_nothing_lasts(
    model: nn.Module, example: ExampleCall, watch: Runner | None
) -> fx.GraphModule:
    """Trace again until every module that keeps state for its next call outside its buffers is kept whole."""
    findings = Findings()
    while True:
        with noting_changes() as changes:
            try:
                gm, findings = _traced(model, example, findings, watch)
            except InexactError as err:
                findings = findings.keeping(_culprits(model, example, findings.lasting, err))
                continue
            except (TraceError, RecursionError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as err:  # noqa: BLE001 a model may raise anything
                findings = findings.keeping(_failing(model, findings.lasting, err))
                continue
        if findings.sizes.read:
            sizes = OtherSizes(gm, model)
            held = sizes.wrong(example, larger=findings.sizes.hidden)
            unlike = held or any(RETURNED in said for said in sizes.refused)
            if unlike and findings.returns_numbers and findings.can_begin_to_follow:
                findings = findings.once_more(follows_returned=True, insists_enough=False)
                continue
            if held:
                _log.warning("the graph is held to its sizes")
                held_to = findings.once_more(sizes=replace(findings.sizes, held=held))
                gm, findings = _traced(model, example, held_to, watch)
            gm = _for_other_batches(gm, model, example, findings, watch)
            if findings.sizes.hidden and OtherSizes(gm, model).is_wrong_beyond(example):
                gm = _held_to_batch(model, example, findings, watch)
        kept = remembering(gm, model, example, changes, findings)
        if kept:
            findings = findings.keeping(kept)
            continue
        missed = asked_for(gm, model, example, findings) - findings.asked_for
        alike = not findings.apart and goes_by_same_inputs(gm, model, example)
        ordered = goes_by_order(gm, model, example)
        if ordered and findings.ordered:
            raise TraceError(
                f"{type(model).__name__} goes by the order of keys of a dict among its inputs that a graph "
                "cannot hold; use texts or numbers as keys"
            )
        if not alike and not ordered and not missed:
            if goes_by_keywords(gm, model, example):
                raise TraceError(
                    f"{type(model).__name__} goes by the order of the keyword arguments that it takes as "
                    f"**kwargs ({line_of(model.forward)}), which a graph does not see; name them, or "
                    "take them as a dict"
                )
            return gm
        findings = findings.once_more(
            apart=findings.apart or alike,
            ordered=findings.ordered or ordered,
            asked_for=findings.asked_for | missed,
        )


def _failing(model: nn.Module, lasting: Mapping[Whole, str], err: Exception) -> dict[Whole, str]:
    """The module to keep whole because its code fails while it is recorded, and only then, with the reason.

    Raises:
        TraceError: it is the model's own ``forward``, or the module was kept whole before.
    """
    path, said = path_of(err), next(iter(str(err).splitlines()), "")
    why = f"fails while it is recorded: {type(err).__name__}: {said} ({source_of(err)})"
    if path is None:
        raise err
    if not path or Whole(path) in lasting:
        raise refusal(model, path, why) from err
    return {Whole(path): why}


def _culprits(
    model: nn.Module, example: ExampleCall, lasting: Mapping[Whole, str], err: InexactError
) -> dict[Whole, str]:
    """The modules to keep whole because the graph of the model is not exact, with the reason.

    Raises:
        InexactError: the model's own ``forward`` is to blame, or a part that sets its mode in its own way.
    """

    def kept(paths: Iterable[str]) -> dict[Whole, str]:
        forwards = {path: type(model.get_submodule(path)).forward for path in paths}
        return {
            Whole(path): f"is not exact as a graph: {err.problem} ({line_of(forward)})"
            for path, forward in forwards.items()
        }

    def exact_without(paths: Paths) -> bool:
        try:
            _traced(model, example, Findings(lasting={**lasting, **kept(paths)}), None)
        except Exception as other:  # noqa: BLE001 whatever it is, others have to be kept whole
            _log.info("not exact with %s whole: %s", sorted(paths), other)
            return False
        return True

    found = culprits(model, exact_without)
    parts = [part for path in found for part in model.get_submodule(path).modules()]
    # What a part does to itself when its mode is set, such as merging weights, no run undoes.
    if not found or any(type(part).train is not nn.Module.train for part in parts):
        raise err
    return kept(found)


def _traced(
    model: nn.Module, example: ExampleCall, findings: Findings, watch: Runner | None
) -> tuple[fx.GraphModule, Findings]:
    """Trace; if that fails, trace again with less of the model followed, or with more checks.

    A number that remembers how it was computed, for example, fails where code asks whether a type is exactly
    int, or where Python needs a plain number.

    Returns:
        The graph, and the findings that it was made with.
    """
    try:
        return _trace_by_recording(model, example, findings, watch), findings
    except Exception as err:
        plainer = findings.plainer(err)
        if plainer is None:
            raise
        first = err
    try:
        return _traced(model, example, plainer, watch)
    except TraceError as last:
        # The first says what the model does; how a graph fails that follows less of it does not.
        says_more = isinstance(first, TraceError) and isinstance(last, InexactError)
        if says_more or (isinstance(first, InexactError) and not findings.put_in_eval):
            raise first from None
        raise


def _for_other_batches(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, findings: Findings, watch: Runner | None
) -> fx.GraphModule:
    """A graph that is right for other batch sizes, if there is one; else one that refuses them.

    A graph may be wrong for another batch size because a size has become a plain number unseen, or because in
    a batch of one two sizes are equal by chance and the model compares them. The given graph is tried first,
    then one that is traced on another batch size.
    """
    if not findings.sizes.compared and _acts_alike(gm, model, example, findings):
        if any(DECIDES in node.meta for node in gm.graph.nodes):
            _waive_on_one(gm, model, example)
        return gm
    given = ((other, given_by(model, other)) for other in example.others())
    taken = next(((other, wanted) for other, wanted in given if wanted is not None), None)
    if taken is None:
        return gm
    other, wanted = taken
    problem = problem_of(gm, model, other, wanted, None)
    if not problem or waive(gm, model, other, wanted):
        _waive_on_one(gm, model, example)
        return gm
    if not insists(gm, model, other):
        general = _from_other_batch(model, example, other, findings, watch)
        if general is not None:
            return general
    _log.warning("with a batch of %d the graph %s", other.batch, problem)
    return _held_to_batch(model, example, findings, watch)


def _held_to_batch(
    model: nn.Module, example: ExampleCall, findings: Findings, watch: Runner | None
) -> fx.GraphModule:
    """A graph that accepts the batch size of the example only."""
    _log.warning("the graph is held to a batch of %d", example.batch)
    sizes = Sizes(batch=example.batch, held=findings.sizes.held)
    gm, _ = _traced(model, example, findings.once_more(sizes=sizes), watch)
    return gm


def _from_other_batch(
    model: nn.Module, example: ExampleCall, other: ExampleCall, findings: Findings, watch: Runner | None
) -> fx.GraphModule | None:
    """The graph of the model traced on ``other``, if it is right for ``example``, too; else None."""
    try:
        gm, _ = _traced(model, other, findings.anew(Sizes(held=findings.sizes.held)), None)
        wanted = {training: reference(model, example, training) for training in MODES}
        if problem_of(gm, model, example, wanted, None) and not waive(gm, model, example, wanted):
            return None
        _waive_on_one(gm, model, example)
        if watch is not None:
            gives_when_watched(gm, model, example, wanted[False], watch)
        return gm
    except TraceError as err:
        _log.info("not traced on another batch: %s", err)
        return None


def _waive_on_one(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> None:
    """Let a graph that was traced on several examples accept a single one, if it is right for that."""
    first = example.first()
    wanted = None if first is None else given_by(model, first)
    if first is not None and wanted is not None:
        waive(gm, model, first, wanted)


def _acts_alike(gm: fx.GraphModule, model: nn.Module, example: ExampleCall, findings: Findings) -> bool:
    """Whether the graph gives the same for the first examples of another batch, and what the model gives.

    A number that Python makes of the batch size unseen acts alike in every batch, but not as in the model.
    """
    recording, other = findings.recording(False), next(example.others(), None)
    if other is None:
        return True
    if recording is None or recording.outcome is None:
        return False
    try:
        got = run(gm, other, False, None, model)
    except Exception as err:  # noqa: BLE001 the example is ours, not the user's
        _log.info("the graph takes no other batch: %s", err)
        return False
    if not recording.outcome.is_begun_by(got, example.batch, other.batch):
        return False
    given = given_by(model, other)
    return given is None or not (
        given[False].difference(got) or _differs_in_training(gm, model, other, given)
    )


def _differs_in_training(
    gm: fx.GraphModule, model: nn.Module, other: ExampleCall, given: Mapping[bool, Outcome]
) -> bool:
    got = tried(gm, other, True, model)
    return isinstance(got, Exception) or bool(given[True].difference(got))


def without_shape(model: nn.Module) -> str | None:
    """The name of a parameter or buffer of a lazy module that has not run yet, or None."""
    return next((name for name, tensor in _state(model) if is_lazy(tensor)), None)


def _state(model: nn.Module) -> tuple[tuple[str, Tensor], ...]:
    """The parameters and buffers of a model, by name."""
    return (*model.named_parameters(), *model.named_buffers())


def _refuse_one_mode(model: nn.Module) -> None:
    """Refuse a model that cannot be trained and evaluated, as what `torch.export` makes of one."""
    own = any(type(module).train is not nn.Module.train for module in model.modules())
    try:
        # A `train` of their own may write to weights, as where adapters are merged.
        with unwritten(model) if own else contextlib.nullcontext(), preserved(model):
            in_mode(model, training=False)
    except Exception as err:
        raise TraceError(
            f"{type(model).__name__} cannot change between training and evaluation: {type(err).__name__}: "
            f"{err}; of an exported model, prepare the Python model and export the converted one"
        ) from err


def _written_by_mode(model: nn.Module) -> TraceError | None:
    """An error that says which tensor the model changes when its mode is set; None if it changes none."""
    with preserved(model), unwritten(model):
        before = {name: tensor.detach().clone() for name, tensor in _state(in_mode(model, True))}
        for name, tensor in _state(in_mode(model, False)):
            if name in before and not are_equal(tensor, before[name]):
                return TraceError(
                    f"{type(model).__name__} changes {name} when it is put into eval mode, as adapters do "
                    "that are merged into weights then, and a graph does not; turn that off, as by "
                    "merge_weights=False, or keep both and let forward pick one by self.training"
                )
    return None


def _never_the_same(model: nn.Module, example: ExampleCall) -> TraceError | None:
    """An error that says how two calls of the model differ on the same inputs; None if they do not."""
    with unwritten(model), own_generators(model), unmoved_iterators(model):
        for training, mode in MODES.items():
            once, again = (tried(model, example, training) for _ in range(2))
            if isinstance(once, Outcome) and isinstance(again, Outcome) and once.difference(again):
                return TraceError(
                    f"{type(model).__name__} goes by something that is none of its inputs, parameters and "
                    f"buffers: at a second call alike it {once.difference(again)} in {mode} mode; keep in "
                    "buffers what it counts or remembers, not in a global variable, a class or a default "
                    "argument"
                )
    return None


def _refuse_unfit(model: nn.Module, example: ExampleCall) -> None:
    """Refuse what a recording cannot handle, such as NumPy arrays, nested tensors, and sparse parameters.

    A recording identifies tensors by their memory, and a graph by their names. The numbers in a NumPy array
    would become constants. Empty examples show nothing.
    """
    for name, holder in model.named_modules():
        hidden = next(
            (key for key in (*holder._parameters.keys(), *holder._buffers.keys()) if "." in key), None
        )
        if hidden is not None:
            raise TraceError(
                f"{name or 'the model'}, a {type(holder).__name__}, calls one of its parameters {hidden!r}, "
                "which is the name of no attribute, and so none of a graph; name it without a dot"
            )
    if next(arrays((example.args, example.kwargs)), None) is not None:
        raise TraceError("there is a NumPy array in the example inputs; give it as a tensor")
    hiding = next(hiding_tensors((example.args, example.kwargs)), None)
    if hiding is not None:
        raise TraceError(
            f"there is a {type(hiding).__name__} in the example inputs, whose tensors a recording cannot "
            "see; give them in a list, a dict or an object with attributes"
        )
    for part in opaque_parts((example.args, example.kwargs)):
        if not equals_copies(part):
            raise TraceError(
                f"there is a {type(part).__name__} in the example inputs, and a graph knows no other; let "
                "the model hold it"
            )
    given = list(tensors((example.args, example.kwargs)))
    named = [*model.named_parameters(), *(("an example input", tensor) for tensor in given)]
    for name, tensor in [*named, *model.named_buffers()]:
        if tensor.is_nested:
            raise TraceError(f"{name} is a nested tensor, which cannot be traced; give it padded")
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise TraceError(f"{name} is stored as {kind}, which cannot be traced; give it as to_dense()")
    if given and not any(tensor.numel() for tensor in given):
        raise TraceError("the example inputs are empty tensors; give at least one example")


def _trace_symbolically(model: nn.Module) -> fx.GraphModule:
    if model._forward_hooks or model._forward_pre_hooks:
        raise TraceError(
            f"{type(model).__name__} has hooks of its own, which only a run shows; pass example_inputs"
        )
    with preserved(model):
        recordings = [symbolic_recording(in_mode(model, training)) for training in MODES]
    in_eval, in_train = recordings
    composite = [path for path, module in model.named_modules() if isinstance(module, COMPOSITES)]
    whole = {Whole(path): "only a run can look inside" for path in composite}
    return build(model, Recordings(align(in_eval, in_train), whole), gate_all=False)


def _trace_by_recording(
    model: nn.Module, example: ExampleCall, findings: Findings, watch: Runner | None
) -> fx.GraphModule:
    with noticing_idle(model, findings):
        plain = reference(model, example, training=False)
    try:
        direct = _recorded(model, example, findings)
    except TraceError as err:
        if not findings.asked:
            raise
        try:
            return _trace_as_compiled(model, example, findings, plain, None, watch)
        except TraceError as compiled:
            _log.info("not traced as a compiled model: %s", compiled)
            raise err from None
    if findings.asked and direct.opacity(model) > (0, 0):
        try:
            return _trace_as_compiled(model, example, findings, plain, direct, watch)
        except TraceError as err:
            _log.info("traced as an uncompiled model: %s", err)
    return exact_graph(model, example, direct, plain, watch, findings)


def _recorded(model: nn.Module, example: ExampleCall, findings: Findings) -> Recordings:
    """Record both modes; if the model itself fails in training mode, raise that error instead."""
    try:
        recordings = record_both(model, example, findings)
        all_is_written()
        left_out = not_needed_in_eval(model, example, findings)
        if left_out:
            findings.leave_out(left_out)
            recordings = record_both(model, example, findings)
        while insist(model, example, findings):
            recordings = record_both(model, example, findings)
        if recordings.computes_unseen:
            findings.sizes.read = findings.sizes.hidden = True
        return recordings
    except Exception:
        reference(model, example, training=True)
        raise


def _trace_as_compiled(
    model: nn.Module,
    example: ExampleCall,
    findings: Findings,
    plain: Outcome,
    direct: Recordings | None,
    watch: Runner | None,
) -> fx.GraphModule:
    """Trace a model that asks `torch.compiler.is_compiling()` and does not look at values if that is True.

    The graph is exact for the model under `is_compiling()`, and equals the model otherwise up to rounding.
    """
    with compiling(True):
        compiled = reference(model, example, training=False)
        if not plain.is_near(compiled):
            raise TraceError("the model computes something else when it is being compiled")
        recordings = _recorded(model, example, findings.anew())
        if direct is not None and recordings.opacity(model) >= direct.opacity(model):
            raise TraceError("the model decides by its data even when it is being compiled")
        return exact_graph(model, example, recordings, compiled, watch, findings)


def _accept(size: list[int]) -> None:
    """Accept any size, in the place of the check by which BatchNorm refuses a single value per channel.

    A single example is enough to record training mode.
    """
