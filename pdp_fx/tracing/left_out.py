"""Inputs that a graph does not use, while the model does something else without them.

A model may ask of a tensor whether it is None, and no more. No function sees that, so the model is run
without each of the tensors that its graph does not use.
"""

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.inputs import maybe_unused
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.structure import fresh_copy
from pdp_fx.tracing.verify import tried


def asked_for(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, findings: Findings
) -> frozenset[tuple[bool, int]]:
    """The modes and places of the tensors without which the model does something else than its graph.

    Args:
        gm: the graph.
        model: the model.
        example: its arguments.
        findings: those that the graph was made with.
    """
    found: set[tuple[bool, int]] = set()
    example = ExampleCall(*fresh_copy((example.args, dict(example.kwargs))))  # no two tensors are one
    for training in MODES:
        for place, tensor in maybe_unused(findings.recording(training), model, example).items():
            call = example.without(tensor)
            wanted, got = (tried(each, call, training, model, gm) for each in (model, gm))
            if isinstance(wanted, Outcome) and isinstance(got, Outcome) and not wanted.is_near(got):
                found.add((training, place))
    return frozenset(found)
