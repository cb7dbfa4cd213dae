"""One recorded run of a model on its example inputs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.flags import noting_flags
from pdp_fx.tracing.inputs import bind, held_to_given
from pdp_fx.tracing.intercept import listening
from pdp_fx.tracing.outcome import Given, outcome
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.sizes import Decoy
from pdp_fx.tracing.source import runs_model
from pdp_fx.tracing.steps import Recording, UnrecordableError
from pdp_fx.tracing.yielding import yielding_floats


@runs_model
def record(
    model: nn.Module,
    example: ExampleCall,
    findings: Findings,
    answers: Callable[[int], bool] | None = None,
    empty: Mapping[int, int] = MappingProxyType({}),
    decoy: Decoy | None = None,
) -> Recording:
    """Run the model, in the mode that it is in, and record what it does.

    Args:
        model: the model; the caller restores its state.
        example: the arguments; tensors in them may change.
        findings: what is known of the model, such as the parts to keep whole; what is learned is added.
        answers: which way to go at each branch that is recorded both ways, by number; None to refuse such.
        empty: the selections that are made empty and count as such where the model branches on that, as in
            `Step.selects`, by the places of the steps that make them.
        decoy: as in `sizes.Session`.

    Raises:
        UnrecordableError: the model does something that a graph cannot hold; the error names the module or
            method.
    """
    recorder = Recorder(model, findings, answers, empty)
    recorder.session.decoy = decoy
    try:
        started = time.perf_counter()
        call = bind(recorder, model, example)
        place = len(recorder.steps)
        # The model may take out of its inputs what the checks of these are about.
        given, at_first = example.fresh(), Given((call.args, call.kwargs))
        with yielding_floats(model), noting_flags(recorder), listening(recorder), recorder.reads.noting():
            result = model(*call.args, **call.kwargs)
        recording = held_to_given(recorder.finish(result), model, given, place, recorder.reads, findings)
        seconds = time.perf_counter() - started
        return replace(recording, outcome=outcome(model, result, at_first), seconds=seconds)
    except Exception as err:
        recorder.failures.check(err)
        if not empty and decoy is None and not isinstance(err, UnrecordableError):
            # The model need not bear to be told that something is selected.
            findings.unproven |= {asked.source for asked in recorder.branches.asked}
        raise
    finally:
        recorder.session.open = False
        recorder.frames.forget()
        findings.note_casts(recorder.session.cast_in)
        findings.sizes.compared |= recorder.session.compared
