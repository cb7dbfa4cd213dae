"""Building the graph of two recordings, and checking that it gives exactly what the model gives."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import fx, nn

from pdp_fx.errors import StateError, TraceError
from pdp_fx.tracing.attempts import Recordings
from pdp_fx.tracing.blocks import gather_blocks
from pdp_fx.tracing.copying import copied
from pdp_fx.tracing.emit import without_dead_code, write_graph
from pdp_fx.tracing.examples import TRIALS, ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.flags import ONE_MODE, MixedModesError, is_blind, turn
from pdp_fx.tracing.functions import is_custom
from pdp_fx.tracing.half import WidenedHalf
from pdp_fx.tracing.inputs import with_needed
from pdp_fx.tracing.module import TracedModule, always_eval, mirror
from pdp_fx.tracing.objects import find_own_layers
from pdp_fx.tracing.outcome import Outcome, near
from pdp_fx.tracing.preserve import anything_may_be_written, preserved
from pdp_fx.tracing.repeats import share_repeats
from pdp_fx.tracing.selecting import does_more
from pdp_fx.tracing.settings import CASTING, HELD, OF_TENSORS, Question, SettingError
from pdp_fx.tracing.source import source_of
from pdp_fx.tracing.steps import InexactError, LostDtypeError, Step, UnprovenError, is_given, is_ragged
from pdp_fx.tracing.structure import tensors
from pdp_fx.tracing.verify import Runner, called, difference, emptying, flat, run, seeded, tried

_log = logging.getLogger(__name__)

MODES = {False: "eval", True: "training"}
"""The two modes, by the training flag, and their names in messages."""

MOST_MIXED = 8
"""Of so many modules whose flags are read in one place, each is tried in the other mode than the model."""


def exact_graph(
    model: nn.Module,
    example: ExampleCall,
    recordings: Recordings,
    plain: Outcome,
    watch: Runner | None,
    findings: Findings,
) -> fx.GraphModule:
    """The graph of two recordings, whose results equal the model's in each mode, bit for bit.

    Args:
        model: the model.
        example: the call that was recorded.
        recordings: its recordings in both modes.
        plain: the outcome of the model in eval mode in a run that was not recorded.
        watch: as in `pdp_fx.trace.trace`.
        findings: what is known of the model.

    Raises:
        InexactError: the results differ, or the graph fails.
    """
    wanted, problem = _expected(model, example, plain, recordings), ""
    for gate_all in (False, True):
        gm = build(model, recordings, gate_all)
        if not gate_all and not _runs_flat(gm, model, example):
            continue
        problem = problem_of(gm, model, example, wanted, watch)
        if not problem:
            _check_empty_selections(gm, model, example, recordings)
            # What only more checks mend comes before what takes many runs.
            _check_casts(gm, model, example, recordings, findings)
            _check_other_settings(gm, model, example, findings)
            _check_mixed_modes(gm, model, example, recordings)
            _check_other_numbers(gm, model, example, recordings, findings)
            _check_other_draws(gm, model, example, recordings)
            _check_other_given(gm, model, example, recordings)
            return gm
    raise InexactError(type(model).__name__, f"it {problem}")


def _runs_flat(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> bool:
    """Whether what the code of a graph leaves out in one mode can run there, for who follows all nodes."""
    if not gather_blocks(gm.graph):
        return True
    outcomes = [tried(gm, example, training, model, runner=flat) for training in MODES]
    return not any(isinstance(outcome, Exception) for outcome in outcomes)


def _check_other_numbers(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, recordings: Recordings, findings: Findings
) -> None:
    """Check that no number which the model reads from its data has become a constant of the graph.

    A part that is kept whole, a custom operator or another thread may leave a number somewhere, as in a
    global variable, where the model reads it; or Python may make a plain number of a size that depends on
    data; and what another thread computes is a tensor that no step has made. Runs on other numbers than the
    example's show such constants.

    Raises:
        InexactError: the graph and the model differ on other numbers.
    """
    for training, recording in recordings.by_mode.items():
        reading = {step.called for step in recording.steps if _may_read_numbers(step)}
        checked = any(step.decides and is_ragged(step.args[0]) for step in recording.steps)
        hides = bool(reading) or recordings.computes_unseen
        for other in _with_other_numbers(model, example, training, findings) if hides else ():
            # By a decision that depends on the numbers of the example it may not refuse others.
            problem = difference(gm, model, other, training, lambda _, checked=checked: not checked)
            if problem:
                raise InexactError(
                    type(model).__name__,
                    f"with other numbers than the example's it {problem} in {MODES[training]} mode. "
                    f"{_suspected(sorted(reading))}",
                )


def _with_other_numbers(
    model: nn.Module, example: ExampleCall, training: bool, findings: Findings
) -> Iterator[ExampleCall]:
    """Calls with other numbers; of what eval mode is not given the model may refuse others, as of boxes."""
    call = example if training else with_needed(model, example, findings.left_out)
    return call.with_other_numbers(int(training))


def _check_other_draws(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, recordings: Recordings
) -> None:
    """Check that the graph skips what the model skips, for several seeds of the random numbers.

    Raises:
        InexactError: the graph and the model differ.
    """
    for training, recording in recordings.by_mode.items():
        skips = any(step.skipped for step in recording.steps)
        for seed in range(TRIALS) if skips else ():
            problem = difference(gm, model, example, training, lambda _: False, seeded(seed))
            if problem:
                raise InexactError(type(model).__name__, f"it {problem} in {MODES[training]} mode")


def _check_other_given(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, recordings: Recordings
) -> None:
    """Check that the graph does what the model does with other numbers among its inputs, or refuses them.

    Raises:
        InexactError: the graph and the model differ.
    """
    for training, recording in recordings.by_mode.items():
        for other in example.with_other_floats() if any(map(is_given, recording.steps)) else ():
            problem = difference(gm, model, other, training)
            if problem:
                raise InexactError(
                    type(model).__name__,
                    f"with other numbers among the inputs it {problem} in {MODES[training]} mode",
                )


def _check_casts(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, recordings: Recordings, findings: Findings
) -> None:
    """Check that the graph follows the model when both are cast, if it is not known what becomes of a dtype.

    A function may give back the dtype that it reads, or a partial function keep it, and Python passes it on.

    Raises:
        LostDtypeError: the graph and the model differ; or they cannot be copied to cast them, and the graph
            does not insist on these dtypes yet.
    """
    lines = sorted({line for recording in recordings.by_mode.values() for line in recording.unfollowed})
    if not lines:
        return
    try:
        # The copies share their weights, as these two do.
        pair = copied(nn.ModuleList([gm, model]))
    except StateError as err:
        if findings.holds_dtypes:
            return
        raise LostDtypeError(type(model).__name__, f"it cannot be copied: {err}") from err
    mine, theirs = cast(fx.GraphModule, pair[0]), pair[1]
    for dtype in CASTS:
        mine.to(dtype)
        theirs.to(dtype)
        for training, mode in MODES.items():
            problem = difference(mine, theirs, example.cast(dtype), training, runner=_widened)
            if problem:
                raise LostDtypeError(
                    type(model).__name__,
                    f"once it is cast to {dtype}, it {problem} in {mode} mode; a dtype that {lines[0]} reads "
                    "gets past the graph",
                )


def _widened(model: Any, call: ExampleCall) -> Any:
    with WidenedHalf():
        return called(model, call)


CASTS = torch.float64, torch.bfloat16
"""What models are cast to, to see whether a graph follows."""


def _check_other_settings(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, findings: Findings
) -> None:
    """Check that the graph does what the model does in the settings that the model asks about.

    Raises:
        SettingError: they differ.
    """
    for question, line in findings.asks.items():
        returned: list[int] = []
        gradients: list[list[torch.Tensor]] = []

        def within(
            one: Any,
            call: ExampleCall,
            question: Question = question,
            returned: list[int] = returned,
            gradients: list[list[torch.Tensor]] = gradients,
        ) -> Any:
            with question.answered(model, call):
                result = called(one, call)
                # Whether there are gradients is compared, too, and what they are.
                needs = [tensor.requires_grad for tensor in tensors(result)]
                returned.append(len(needs))
                if question.setting in OF_TENSORS:
                    leaves = (*model.parameters(), *tensors((call.args, call.kwargs)))
                    gradients.append(_gradients(list(tensors(result)), leaves))
                return result, torch.tensor(needs)

        for training, mode in MODES.items():
            problem = None
            # Numbers of the example may be round ones, which another dtype does not change.
            others = _with_other_numbers(model, example, training, findings)
            for call in (*islice(others, question.setting in CASTING), example):
                refuses = (lambda said: HELD in said) if call is example else (lambda _: True)
                gradients.clear()
                with anything_may_be_written():
                    problem = difference(gm, model, call, training, refuses, within)
                if problem is not None:
                    break
            if problem == "" and len(gradients) == 2 and not all(map(near, *gradients)):
                problem = "gives other gradients than the model"
            if problem:
                if problem.endswith(f"at position {returned[-1]}"):
                    problem = (
                        "returns a tensor that needs gradients where the model's does not, or the reverse,"
                    )
                raise SettingError(
                    type(model).__name__,
                    f"{question.setting.value} it {problem} in {mode} mode; {line} {question.setting.blame}",
                    question.setting,
                    training,
                )


def _gradients(results: Sequence[torch.Tensor], leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of those leaves that need some, 0 where they get none, for a weighted sum of results."""
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    ends = [result for result in results if result.requires_grad and result.layout is torch.strided]
    if not trained or not ends:
        return [torch.zeros_like(leaf) for leaf in trained]
    weights = [torch.linspace(0.5, 1.5, end.numel()).to(end).view(end.shape) for end in ends]
    # Of leaves that the results do not depend on there is None.
    found = cast(Sequence[Any], torch.autograd.grad(ends, trained, weights, allow_unused=True))
    return [
        torch.zeros_like(leaf) if gradient is None else gradient.to_dense()
        for leaf, gradient in zip(trained, found, strict=True)
    ]


def _check_mixed_modes(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, recordings: Recordings
) -> None:
    """Check that the graph does what the model does where a module reads the flags of several that differ.

    Raises:
        MixedModesError: the graph and the model differ.
    """
    for together in sorted(recordings.alignment.asked_together()):
        for part in filter(None, together[: MOST_MIXED + 1]):

            def mixed(one: Any, call: ExampleCall, part: str = part) -> Any:
                turn(one, part)
                return called(one, call)

            for training, mode in MODES.items():
                problem = difference(gm, model, example, training, lambda said: ONE_MODE in said, mixed)
                if problem:
                    raise MixedModesError(
                        type(model).__name__,
                        f"with {part} alone in the other mode it {problem} in {mode} mode",
                        together,
                    )


def _check_empty_selections(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, recordings: Recordings
) -> None:
    """Check that the graph gives for empty selections what the model gives, which branches on that.

    Raises:
        UnprovenError: the graph and the model may differ.
    """
    for training, recording in recordings.by_mode.items():
        for told in recording.emptied:
            gone = set[fx.Node]()
            got = tried(gm, example, training, model, runner=emptying(told.numbers, gone))
            problem = str(got) if isinstance(got, Exception) else told.outcome.difference(got)
            more = None if problem else does_more(gm.graph, told.numbers, gone)
            problem = problem if more is None else f"%{more.name} may do something"
            if problem:
                raise UnprovenError(
                    type(model).__name__,
                    f"where nothing is selected it differs in {MODES[training]} mode ({told.source}): "
                    f"{problem}",
                    told.source,
                )


def _may_read_numbers(step: Step) -> bool:
    """Whether a step may read numbers that the graph does not see: no one looks into a custom operator."""
    return step.reads_numbers or step.sized or is_custom(step.target)


def _suspected(reading: Sequence[str]) -> str:
    """What may have become a constant, as a sentence."""
    if reading:
        where = ", ".join(reading)
        return f"What is found in data in {where} must get past the graph as a number; keep it in tensors"
    return (
        "What no torch function of this thread has made must depend on data; compute everything in "
        "the thread that calls the model"
    )


def reference(model: nn.Module, example: ExampleCall, training: bool) -> Outcome:
    """The outcome of the model in one mode.

    Raises:
        TraceError: the model fails.
    """
    try:
        return run(model, example, training)
    except TraceError:
        raise
    except Exception as err:
        raise TraceError(
            f"the model itself fails on the example inputs in {MODES[training]} mode: "
            f"{type(err).__name__}: {err} ({source_of(err)})"
        ) from err


def given_by(model: nn.Module, example: ExampleCall) -> dict[bool, Outcome] | None:
    """The outcomes of the model in both modes, by the training flag; None if it fails on the example."""
    try:
        return {training: run(model, example, training) for training in MODES}
    except Exception as err:  # noqa: BLE001 the example is ours, not the user's
        _log.info("the model takes no other batch: %s", err)
        return None


def build(model: nn.Module, recordings: Recordings, gate_all: bool) -> TracedModule:
    """The graph module of the recordings; with ``gate_all`` no step runs in a mode it was not recorded in."""
    tree = mirror(model, frozenset(whole.path for whole in recordings.opaque if not whole.method))
    graph, protected = write_graph(tree, model, recordings.alignment, gate_all)
    gm = TracedModule(tree, fx.Graph(), type(model).__name__)
    graph.owning_module = gm
    without_dead_code(graph, protected)
    share_repeats(gm, graph, protected)
    find_own_layers(gm, graph)
    gm.graph = graph
    with preserved(model):
        gm.always_eval = tuple(sorted({*always_eval(model), *recordings.put_in_eval}))
    return gm


def problem_of(
    gm: fx.GraphModule,
    model: nn.Module,
    example: ExampleCall,
    expected: Mapping[bool, Outcome],
    watch: Runner | None,
) -> str:
    """How the graph differs from the model, as the end of a sentence; empty if it does not."""
    for training, wanted in expected.items():
        if not training and watch is not None and gives_when_watched(gm, model, example, wanted, watch):
            continue
        try:
            got = run(gm, example, training, None, model)
        except Exception as err:  # noqa: BLE001 a graph that fails is a graph that is not exact
            return f"fails in {MODES[training]} mode: {type(err).__name__}: {err}"
        differing = wanted.difference(got)
        if differing:
            return f"{differing} in {MODES[training]} mode"
    return ""


def gives_when_watched(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, wanted: Outcome, watch: Runner
) -> bool:
    """Whether the run by ``watch`` gives the wanted outcome; observing a run may also disturb it."""
    try:
        return not wanted.difference(run(gm, example, False, watch, model))
    except Exception as err:  # noqa: BLE001 the graph is run once more, without anybody watching
        _log.info("failed while being watched: %s", err)
        return False


def _expected(
    model: nn.Module, example: ExampleCall, plain: Outcome, recordings: Recordings
) -> dict[bool, Outcome]:
    """The outcomes that the graph must give, by the training flag.

    In eval mode it is the outcome of a run that was not recorded. If the recorded run gave the same,
    recording changes nothing, and the outcome of the recorded run in training mode is used, if the same code
    runs then; otherwise the model is run once more in training mode; so is one that was recorded with parts
    in eval mode.
    """
    recorded = recordings.by_mode.values()
    in_eval, in_train = (each.outcome for each in recorded)
    same_code = is_blind(model, *recorded) and not recordings.put_in_eval
    if in_eval is None or in_train is None or not same_code or plain.difference(in_eval):
        in_train = reference(model, example, training=True)
    return {False: plain, True: in_train}
