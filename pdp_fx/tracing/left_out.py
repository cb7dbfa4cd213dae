"""Inputs without which the model does something else while its graph does not, and the other way round.

A model may ask of a tensor whether it is None, and no more. No function sees that, so the model is run
without each of the tensors that its graph does not use. Eval mode may hand to parts that are kept whole what
only training needs, such as the boxes that a detector is to find, and is then called without.
"""

from typing import Any

import torch
from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.inputs import maybe_unused, optional, with_argument
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.steps import Expr, Recording, Step
from pdp_fx.tracing.structure import fresh_copy, tensors
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
        left_out = frozenset[str]() if training else findings.left_out
        for place, tensor in maybe_unused(findings.recording(training), model, example, left_out).items():
            call = example.without(tensor)
            wanted, got = (tried(each, call, training, model, gm) for each in (model, gm))
            if isinstance(wanted, Outcome) and isinstance(got, Outcome) and not wanted.is_near(got):
                found.add((training, place))
    return frozenset(found)


def not_needed_in_eval(model: nn.Module, example: ExampleCall, findings: Findings) -> frozenset[str]:
    """The arguments that eval mode hands to parts kept whole alone, and without which it does the same.

    Args:
        model: the model.
        example: its arguments.
        findings: what is known of the model, with its recordings.
    """
    given, recording = optional(model, example), findings.recording(False)
    if not given or recording is None:
        return frozenset()
    read = _read(recording)
    unread = {name: value for name, value in given.items() if name not in read | findings.left_out}
    return frozenset(name for name, value in unread.items() if _does_same(model, example, name, value))


def _does_same(model: nn.Module, example: ExampleCall, name: str, value: Any) -> bool:
    """Whether a model gives the same in eval mode without an argument, and with other numbers in it.

    Numbers that it refuses, such as corners of boxes in no order, say nothing; smaller ones are in order.
    """
    wanted = tried(model, example, training=False)
    if not isinstance(wanted, Outcome) or not _is_same(
        model, with_argument(model, example, name, None), wanted
    ):
        return False
    alone = ExampleCall((value,), {})
    others = [call.args[0] for call in (*alone.with_other_numbers(), alone.smaller())]
    verdicts = [
        _is_same(model, with_argument(model, example, name, other), wanted)
        for other in others
        if not all(map(torch.equal, tensors(other), tensors(value)))
    ]
    return True in verdicts and False not in verdicts


def _is_same(model: nn.Module, call: ExampleCall, wanted: Outcome) -> bool | None:
    """Whether the outcome of a call in eval mode is this one; None if the model refuses it."""
    got = tried(model, call, training=False)
    return None if isinstance(got, Exception) else not wanted.difference(got)


def _read(recording: Recording) -> set[str]:
    """The inputs that steps read which are not kept whole, and on which a result or a change depends."""
    todo: list[Any] = [recording.output, *(step for step in recording.steps if step.changes)]
    found, seen = set[str](), set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, slice):
            todo += (value.start, value.stop, value.step)
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, Step | Expr) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Step) and value.op == "placeholder":
                found.add(str(value.target))
            elif isinstance(value, Expr) or not value.reason:
                todo += (*value.args, *value.kwargs.values())
    return found
