"""Finding plain numbers that Python makes unseen of those which a model reads from a tensor.

A live number tells what is computed with it as long as Python calls its methods. Code written in C need not:
an index of a list, ``0.5.__mul__`` or ``"%d"`` take the digits of an int or float as they are. So the model
is recorded again with live numbers of other digits. What goes by their methods is the same then; an index is
another one, or out of range.
"""

import logging

from torch import nn

from pdp_fx.tracing.align import kind_of_step
from pdp_fx.tracing.attempts import recorded_again
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.skipping import differences
from pdp_fx.tracing.steps import InexactError, Recording, is_read

_log = logging.getLogger(__name__)

DECOYS = (1009, -1013)
"""What is added to the digits: far out of the range of lists, on both sides."""


def check_read_numbers(model: nn.Module, example: ExampleCall, findings: Findings) -> None:
    """Check that no plain number of the recordings follows one that the model reads from a tensor.

    Args:
        model: the model; it is restored.
        example: what it was recorded on.
        findings: what is known of it, with a recording of each mode; left as they are.

    Raises:
        InexactError: one does.
    """
    for training in (False, True):
        known = findings.recording(training)
        read = [step for step in known.steps if is_read(step)] if known is not None else []
        if read and not _acts_alike(model, example, findings, training):
            where = read[0].source
            problem = f"takes a number that it reads from a tensor for a plain one ({where})"
            raise InexactError(type(model).__name__, f"it {problem}; compute with it, or decide by tensors")


def _acts_alike(model: nn.Module, example: ExampleCall, findings: Findings, training: bool) -> bool:
    kept = findings.aside()
    try:
        found = [recorded_again(model, example, training, kept, decoy=decoy) for decoy in DECOYS]
    except Exception as err:  # noqa: BLE001 an index is out of range, for one
        _log.info("fails with other digits of the numbers that it reads: %s", err)
        return False
    return _is_same(*found)


def _is_same(one: Recording, other: Recording) -> bool:
    if list(map(kind_of_step, one.steps)) != list(map(kind_of_step, other.steps)):
        return False
    pairs = dict(zip(other.steps, one.steps, strict=True))
    given = [((step.args, step.kwargs), (same.args, same.kwargs)) for same, step in pairs.items()]
    given.append((one.output, other.output))
    return all(next(differences(mine, theirs, pairs), None) is None for mine, theirs in given)
