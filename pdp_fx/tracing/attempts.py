"""Recording a model in both modes, repeatedly, until all that a graph cannot express is kept whole."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import nn

from pdp_fx.errors import TraceError
from pdp_fx.tracing.align import Alignment, align
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.forgetting import forgetting, in_mode
from pdp_fx.tracing.leaves import stores_tensors
from pdp_fx.tracing.masking import is_as_without
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.record import record
from pdp_fx.tracing.selecting import note_idle, selects_alike
from pdp_fx.tracing.sizes import Decoy
from pdp_fx.tracing.skipping import Answers, act_outside, chooses_alike, with_choices
from pdp_fx.tracing.source import source_of
from pdp_fx.tracing.steps import DIFFERS_BY_MODE, Emptied, Recording, Step, UnrecordableError, Whole
from pdp_fx.tracing.verify import called

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recordings:
    """The aligned recordings of both modes.

    Attributes:
        alignment: the recordings.
        opaque: the parts that are kept whole in both, with the reasons.
        put_in_eval: the modules that the model puts into eval mode as it runs; they were so from the start.
    """

    alignment: Alignment
    opaque: Mapping[Whole, str]
    put_in_eval: frozenset[str] = frozenset()

    @property
    def by_mode(self) -> dict[bool, Recording]:
        """The recordings by the training flag."""
        return {False: self.alignment.in_eval, True: self.alignment.in_train}

    @property
    def computes_unseen(self) -> bool:
        """Whether there is work of other threads, or a tensor of unknown origin that each run has anew."""
        one, other = self.by_mode.values()
        met = Counter(id(tensor) for each in (one, other) for tensor in {*each.unseen})
        return one.uses_threads or other.uses_threads or 1 in met.values()

    def opacity(self, model: nn.Module) -> tuple[int, int]:
        """How many weights are inside modules kept whole for their data, and how many parts are kept so."""
        deciding = [whole for whole, reason in self.opaque.items() if reason != DIFFERS_BY_MODE]
        paths = {whole.path for whole in deciding if not whole.method}
        weights = {weight for path in paths for weight in model.get_submodule(path).parameters()}
        return sum(weight.numel() for weight in weights), len(deciding)


def record_both(model: nn.Module, example: ExampleCall, findings: Findings) -> Recordings:
    """Record until both modes succeed; each failure makes more modules, methods or functions opaque.

    Args:
        model: the model; it is not modified.
        example: the arguments of the call to record.
        findings: what is learned about the model on the way.

    Raises:
        TraceError: the model itself does something that a graph cannot hold.
    """
    while True:
        in_eval = _settled(model, example, False, findings)
        in_train = _settled(model, example, True, findings)
        if findings.is_new():
            continue
        alignment = align(in_eval, in_train, findings.alike)
        if not chooses_alike(alignment):
            findings.follows_draws = False
            findings.forget()
            continue
        if in_eval.asked and in_train.asked and not selects_alike(alignment):
            findings.unproven |= {asked.source for asked in (*in_eval.asked, *in_train.asked)}
            findings.forget()
            continue
        differing = {Whole(alignment.owner(pair)) for pair in alignment.pairs if pair.only}
        weightless = {
            whole for whole in differing if whole.path and not stores_tensors(model.get_submodule(whole.path))
        }
        if not weightless:
            return Recordings(alignment, dict(findings.opaque), findings.put_in_eval)
        for whole in sorted(weightless, key=str):
            findings.keep_whole(whole, DIFFERS_BY_MODE)


def _settled(model: nn.Module, example: ExampleCall, training: bool, findings: Findings) -> Recording:
    """Record one mode until it succeeds."""
    while True:
        known = findings.recording(training)
        if known is not None:
            return known
        knowledge, unproven = findings.knowledge, findings.unproven
        try:
            recording = _recorded(model, example, training, findings)
            if recording is None:
                findings.follows_draws = False
                continue
            if recording.asked:
                recording = _told_of_empty(model, example, training, findings, recording)
            if recording is None:
                findings.forget()
                continue
            findings.note(training, recording, knowledge)
        except UnrecordableError as err:
            # A cast that is replaced from now on may have been all that was wrong.
            if findings.knowledge == knowledge:
                _learn(model, err, findings)
        except Exception as err:
            if findings.unproven == unproven:
                raise
            _log.info("fails where branches are followed as if something were selected: %s", err)


def _recorded(model: nn.Module, example: ExampleCall, training: bool, findings: Findings) -> Recording | None:
    """One mode recorded; None if a branch that is recorded both ways does more than its kind may."""

    def again(answers: Answers | None) -> Recording:
        return forgetting(
            lambda: record(
                in_mode(model, training, findings.put_in_eval), example.fresh(), findings, answers
            ),
            model,
            expected=(UnrecordableError,),
        )

    if not findings.follows_draws:
        return again(None)
    unproven = findings.unproven
    try:
        recording = again(lambda _: False)
    except UnrecordableError:
        raise
    except Exception as err:  # the model need not bear to be told what it has drawn
        if findings.unproven != unproven:
            raise
        _log.info("fails where branches are not taken: %s", err)
        return None
    if not recording.draws:
        return recording
    found = with_choices(recording, again, findings.recording(False) if training else None)
    if found is not None and not training and _choose_among_acts(found):
        # A converted model computes both ways, and picks one.
        _log.info("what eval mode leaves out at random has effects of its own")
        return None
    return found


def _choose_among_acts(recording: Recording) -> bool:
    """Whether a random number decides if something is done that more than makes values."""
    ways: dict[int, list[Step]] = {}
    for step in recording.steps:
        ways.setdefault(step.skipped, []).append(step)
    return any(number and act_outside(steps) for number, steps in ways.items())


def recorded_again(
    model: nn.Module,
    example: ExampleCall,
    training: bool,
    findings: Findings,
    empty: Mapping[int, int] = MappingProxyType({}),
    decoy: Decoy | None = None,
    first: ExampleCall | None = None,
) -> Recording:
    """Another recording of a model that was recorded, to compare; no branch on random numbers is taken.

    Args:
        model: the model; it is restored.
        example: the arguments.
        training: the mode.
        findings: what is known of the model; what is learned is added.
        empty: as for `record`.
        decoy: as for `record`.
        first: a call to make before the one that is recorded; None if there is none.
    """
    answers: Answers | None = (lambda _: False) if findings.follows_draws else None

    def work() -> Recording:
        placed = in_mode(model, training, findings.put_in_eval)
        if first is not None:
            called(placed, first.fresh())
            placed = in_mode(model, training, findings.put_in_eval)
        return record(placed, example.fresh(), findings, answers, empty, decoy)

    return forgetting(work, model)


def _told_of_empty(
    model: nn.Module, example: ExampleCall, training: bool, findings: Findings, recording: Recording
) -> Recording | None:
    """The recording with what the model gives if selections are empty, every second that a line asks about.

    Returns:
        None if there is a line of which it cannot be told; it is noted in the findings.
    """
    by_line: dict[str, dict[int, None]] = {}
    for asked in recording.asked:
        by_line.setdefault(asked.source, {})[asked.number] = None
    emptied: list[Emptied] = []

    def told(numbers: frozenset[int]) -> Outcome | None:
        if recording.draws:
            return None
        try:
            steps = enumerate(step for step in recording.steps if step not in recording.added)
            empty = {place: step.selects for place, step in steps if abs(step.selects) in numbers}
            other = recorded_again(model, example, training, findings, empty)
        except Exception as err:  # noqa: BLE001 the model need not bear to be told that nothing is selected
            _log.info("fails where nothing is selected: %s", err)
            return None
        alone = next(iter(numbers)) if len(numbers) == 1 else None
        shown = alone is not None and is_as_without(recording, other, alone)
        return other.outcome if shown or note_idle(recording, other, numbers) else None

    unproven = set[str]()
    for line, numbers in by_line.items():
        for turn in (frozenset(list(numbers)[start::2]) for start in (0, 1)):
            outcome = told(turn) if turn else None
            if outcome is not None:
                emptied.append(Emptied(turn, line, outcome))
            elif turn:
                unproven.add(line)
    findings.unproven |= unproven
    return None if unproven else replace(recording, emptied=tuple(emptied))


def _learn(model: nn.Module, err: UnrecordableError, findings: Findings) -> None:
    """Keep whole what an error of a recording, and the further errors in it, ask for."""
    _keep_whole(model, err, findings)
    for other in err.more:
        if other.whole not in (None, Whole(""), *findings.tried):
            _keep_whole(model, other, findings)


def refusal(model: nn.Module, path: str, why: str) -> TraceError:
    """The error of a module at a path, or of the model itself, that is neither traced nor kept whole."""
    name = f"module {path!r}" if path else f"the forward of {type(model).__name__} itself"
    return TraceError(
        f"cannot trace {name}: it {why}; "
        "move that part into a function or a submodule of its own, which then stays opaque; "
        "as a part of another module, such as nn.Sequential(model), it can be pruned by single weights"
    )


def _keep_whole(model: nn.Module, err: UnrecordableError, findings: Findings) -> None:
    """Keep whole the part that an error names.

    Raises:
        TraceError: it is the model itself, or the part was kept whole before.
    """
    whole = err.whole or Whole("")
    source = err.source or source_of(err, type(model.get_submodule(whole.path)).forward)
    if whole == Whole("") or whole in findings.tried:
        raise refusal(model, whole.path, f"{err.reason} ({source})") from err
    if err.instead_of is None:
        findings.keep_whole(whole, f"{err.reason} ({source})")
    else:
        findings.opaque.pop(err.instead_of, None)
        findings.keep_whole(whole, err.reason)
