"""Code that a recording runs without looking into it, as in parts kept whole, hooks and autograd functions.

What it returns besides tensors becomes a constant of the graph, which therefore checks it. What it may leave
elsewhere, such as a size in an attribute, only other inputs show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdp_fx.tracing.arguments import leaves
from pdp_fx.tracing.returned import has_numbers
from pdp_fx.tracing.shapes import Facts, by_depth, check_step, structure_of
from pdp_fx.tracing.sizes import Live
from pdp_fx.tracing.steps import DIFFERS_BY_MODE, Step, UnrecordableError
from pdp_fx.tracing.structure import is_record, place_of_number, plain_leaves

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder


RETURNED = "returned something else than when it was traced"
"""What is said of a step whose result is another."""


def refuse_numbers(recorder: Recorder, step: Step, result: Any) -> None:
    """Refuse numbers, texts and arrays in the result of a step that reads numbers, which would be constants.

    Numbers that are no truth values are followed from now on instead, if they may be.
    """
    # A record's number may be its default by chance.
    found = plain_leaves(result) if is_record(result) else leaves(result)
    numbers = has_numbers(result, recorder.origins.is_kept)
    if numbers and recorder.findings.can_begin_to_follow:
        recorder.findings.follows_returned = True
        return
    if numbers or any(isinstance(leaf, bool | int | float) and not isinstance(leaf, Live) for leaf in found):
        place = place_of_number(result)
        where = f" (in its result at {place})" if place else ""
        raise UnrecordableError(
            f"gets a number from {step.called}{where} that may depend on numbers in a tensor"
        )
    if any(isinstance(leaf, np.ndarray) for leaf in found):
        raise UnrecordableError(
            f"gets an array from {step.called} whose numbers may depend on those in a tensor"
        )
    if isinstance(result, str):
        raise UnrecordableError(f"gets a text from {step.called} that may depend on numbers in a tensor")


def heed(recorder: Recorder, step: Step, result: Any, sizes: Facts) -> None:
    """Add checks that such code returns the same as in this run, but for its tensors.

    Args:
        recorder: the recorder, which has the step.
        step: the call of the code. One that is kept whole since it acts differently in training has been
            looked into before.
        result: what it has returned.
        sizes: what else is to be checked.
    """
    if step.reason != DIFFERS_BY_MODE:
        recorder.findings.sizes.read = recorder.findings.sizes.hidden = True
    recorder.findings.returns_numbers |= has_numbers(result, recorder.origins.is_kept)
    if isinstance(result, torch.Tensor) and step.reason in ("", DIFFERS_BY_MODE):
        return
    message = f"{step.called} {RETURNED}"
    for facts in by_depth(structure_of(step, result, not step.reads_numbers) + sizes):
        recorder.steps.append(check_step(facts, message, step.scope, step.source))
