"""From a model to a graph that shares its parameters.

Without example inputs the graph comes from `torch.fx` symbolic tracing, which sees no values; with them it
comes from recording what the model really does. Both look at the model in eval mode and in training mode, and
write one graph that follows `.train()` and `.eval()`. With example inputs the graph is then run in both
modes, and has to give what the model gives, bit for bit.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from pdp_fx.errors import TraceError
from pdp_fx.tracing.align import Alignment, align
from pdp_fx.tracing.compiling import compiling
from pdp_fx.tracing.emit import without_dead_code, write_graph
from pdp_fx.tracing.inputs import ExampleCall, ExampleInputs, example_call
from pdp_fx.tracing.leaves import COMPOSITES
from pdp_fx.tracing.module import TracedModule, always_eval, mirror
from pdp_fx.tracing.preserve import preserved
from pdp_fx.tracing.record import record
from pdp_fx.tracing.replacing import replaced
from pdp_fx.tracing.source import source_of
from pdp_fx.tracing.steps import DIFFERS_BY_MODE, Recording, UnrecordableError, Whole
from pdp_fx.tracing.symbolic import symbolic_recording
from pdp_fx.tracing.verify import Outcome, run

_log = logging.getLogger(__name__)
_MODES = {False: "eval", True: "training"}


@dataclass(frozen=True)
class Recordings:
    """A model in both modes, and what stays whole in both, each with the reason."""

    alignment: Alignment
    opaque: Mapping[Whole, str]


def trace(model: nn.Module, example_inputs: ExampleInputs | None = None) -> fx.GraphModule:
    """Trace a model into a graph module that computes the same and shares its parameters and layers.

    Args:
        model: any module; it is not modified.
        example_inputs: one tensor, a tuple of positional arguments or a dict of keyword arguments. Without
            them, only models whose control flow does not depend on tensors can be traced.

    Returns:
        A graph module with the parameters, buffers, layers, names and training flags of the model. Each
        node's `meta` has `source`, the line that made it, and `owner`, the path of the module it happened in;
        where a module was kept whole, `opaque` says why.

    Raises:
        TraceError: the model cannot be traced; the message says where and why.
    """
    if example_inputs is None:
        return _trace_symbolically(model)
    example = example_call(example_inputs)
    lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
    if lazy:
        raise TraceError(f"the parameter {lazy[0]!r} has no shape yet; run the model once before tracing it")
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        replaced(functional, "_verify_batch_size", _accept),
    ):
        return _trace_by_recording(model, example)


def _trace_symbolically(model: nn.Module) -> fx.GraphModule:
    with preserved(model):
        recordings = [symbolic_recording(model.train(training)) for training in _MODES]
    in_eval, in_train = recordings
    composite = [path for path, module in model.named_modules() if isinstance(module, COMPOSITES)]
    whole = {Whole(path): "only a run can look inside" for path in composite}
    return _build(model, Recordings(align(in_eval, in_train), whole), gate_all=False)


def _trace_by_recording(model: nn.Module, example: ExampleCall) -> fx.GraphModule:
    expected = {training: _reference(model, example, training) for training in _MODES}
    try:
        direct = _record_both(model, example)
    except TraceError:
        return _trace_as_compiled(model, example, expected[False])
    if _opacity(model, direct) > (0, 0):
        try:
            return _trace_as_compiled(model, example, expected[False], direct)
        except TraceError as err:
            _log.info("traced as an uncompiled model: %s", err)
    return _exact(model, example, direct, expected)


def _opacity(model: nn.Module, recordings: Recordings) -> tuple[int, int]:
    """How many weights are inside modules that decide by their data, and how many such modules there are."""
    deciding = [whole for whole, reason in recordings.opaque.items() if reason != DIFFERS_BY_MODE]
    paths = {whole.path for whole in deciding if not whole.method}
    weights = {parameter for path in paths for parameter in model.get_submodule(path).parameters()}
    return sum(parameter.numel() for parameter in weights), len(deciding)


def _trace_as_compiled(
    model: nn.Module, example: ExampleCall, plain: Outcome, direct: Recordings | None = None
) -> fx.GraphModule:
    """Trace a model that looks at values unless it is being compiled.

    The graph is exactly what the model does under `torch.compiler.is_compiling()`, and gives what it does
    otherwise up to rounding.
    """
    with compiling(True):
        expected = {training: _reference(model, example, training) for training in _MODES}
        if not plain.is_near(expected[False]):
            raise TraceError("the model computes something else when it is being compiled")
        recordings = _record_both(model, example)
        if direct is not None and _opacity(model, recordings) >= _opacity(model, direct):
            raise TraceError("the model decides by its data even when it is being compiled")
        return _exact(model, example, recordings, expected)


def _exact(
    model: nn.Module, example: ExampleCall, recordings: Recordings, expected: Mapping[bool, Outcome]
) -> fx.GraphModule:
    problem = ""
    for gate_all in (False, True):
        gm = _build(model, recordings, gate_all)
        problem = _problem(gm, model, example, expected)
        if not problem:
            return gm
    raise TraceError(f"the graph of {type(model).__name__} is not exact and was discarded: it {problem}")


def _reference(model: nn.Module, example: ExampleCall, training: bool) -> Outcome:
    try:
        return run(model, example, training)
    except Exception as err:
        raise TraceError(
            f"the model itself fails on the example inputs in {_MODES[training]} mode: "
            f"{type(err).__name__}: {err} ({source_of(err)})"
        ) from err


def _record_both(model: nn.Module, example: ExampleCall) -> Recordings:
    """Record until both modes go through; each failure makes one more module opaque."""
    opaque: dict[Whole, str] = {}
    tried: set[Whole] = set()
    while True:
        try:
            in_eval, in_train = (_record(model, example, training, opaque, tried) for training in _MODES)
        except UnrecordableError as err:
            _keep_whole(model, err, opaque, tried)
            continue
        alignment = align(in_eval, in_train)
        differing = {Whole(alignment.owner(pair)) for pair in alignment.pairs if pair.only}
        weightless = {whole for whole in differing if whole.path and not _has_weights(model, whole)}
        if not weightless:
            return Recordings(alignment, opaque)
        opaque |= dict.fromkeys(sorted(weightless, key=str), DIFFERS_BY_MODE)


def _record(
    model: nn.Module, example: ExampleCall, training: bool, opaque: dict[Whole, str], tried: set[Whole]
) -> Recording:
    with preserved(model):
        return record(model.train(training), example.fresh(), opaque, tried)


def _keep_whole(
    model: nn.Module, err: UnrecordableError, opaque: dict[Whole, str], tried: set[Whole]
) -> None:
    """Add to `opaque` what a failed recording asks for."""
    whole = err.whole or Whole("")
    if err.instead_of is not None:
        del opaque[err.instead_of]
    if whole == Whole("") or whole in tried:
        name = f"module {whole.path!r}" if whole.path else f"the forward of {type(model).__name__} itself"
        raise TraceError(
            f"cannot trace {name}: it {err.reason} ({source_of(err)}); "
            "move that part into a submodule of its own, which then stays opaque"
        ) from err
    tried.add(whole)
    opaque[whole] = err.reason if err.instead_of is not None else f"{err.reason} ({source_of(err)})"


def _has_weights(model: nn.Module, whole: Whole) -> bool:
    """Whether a module has parameters or buffers; methods are kept whole only if they use none."""
    module = model.get_submodule(whole.path)
    return not whole.method and (
        any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    )


def _build(model: nn.Module, recordings: Recordings, gate_all: bool) -> TracedModule:
    tree = mirror(model, frozenset(whole.path for whole in recordings.opaque))
    graph, protected = write_graph(tree, model, recordings.alignment, gate_all)
    gm = TracedModule(tree, graph, type(model).__name__)
    with preserved(model):
        gm.always_eval = always_eval(model)
    without_dead_code(graph, protected)
    gm.recompile()
    return gm


def _problem(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, expected: Mapping[bool, Outcome]
) -> str:
    for training, wanted in expected.items():
        with preserved(model):
            try:
                got = run(gm, example, training)
            except Exception as err:  # noqa: BLE001 a graph that fails is a graph that is not exact
                return f"fails in {_MODES[training]} mode: {type(err).__name__}: {err}"
        difference = wanted.difference(got)
        if difference:
            return f"{difference} in {_MODES[training]} mode"
    return ""


def _accept(size: list[int]) -> None:
    """Take any size; in the place of the check by which BatchNorm refuses a single value per channel.

    One example is enough to see what a model does in training mode.
    """
