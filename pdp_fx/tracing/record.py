"""One recorded run of a model on its example inputs."""

from collections.abc import Mapping

from torch import nn

from pdp_fx.tracing.inputs import ExampleCall, bind
from pdp_fx.tracing.intercept import listening
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.steps import Recording


def record(model: nn.Module, example: ExampleCall, opaque: Mapping[str, str]) -> Recording:
    """Run the model, in the mode it is in, and record what it does.

    Args:
        model: the model; the caller puts its state back.
        example: the arguments; tensors in them may change.
        opaque: paths of submodules to keep whole, each with the reason.

    Raises:
        UnrecordableError: a module does something that a graph cannot hold; the error names it.
    """
    recorder = Recorder(model, opaque)
    try:
        call = bind(recorder, model, example)
        with listening(recorder):
            result = model(*call.args, **call.kwargs)
        if recorder.failure is not None:
            raise recorder.failure
        return Recording(tuple(recorder.steps), recorder.output(result), frozenset(recorder.scopes))
    finally:
        recorder.session.open = False
