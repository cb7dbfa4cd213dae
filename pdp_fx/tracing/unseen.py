"""Finding numbers that follow a size unseen, by recording a model on another size, too.

In ``0.5 * x.shape[1]`` Python calls the method of the number on the left, so the result is a plain number and
becomes a constant of the graph. Outputs need not show it: the capacity of an expert, say, may be reached on
few inputs. Two recordings show it, for all that is seen is the same in both.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.align import kind_of_step
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.forgetting import forgetting, in_mode
from pdp_fx.tracing.record import record
from pdp_fx.tracing.steps import Expr, Recording, Step

_log = logging.getLogger(__name__)


def hides_a_size(model: nn.Module, other: ExampleCall, findings: Findings, training: bool) -> bool:
    """Whether a plain number in a recording of the model is another one on a call of other sizes.

    Args:
        model: the model; it is restored.
        other: the call; a graph of the recordings in ``findings`` accepts it.
        findings: what is known of the model, with a recording of each mode; left as it is.
        training: the mode.
    """
    known = findings.recording(training)
    if known is None:
        return False
    kept = replace(
        findings,
        opaque=dict(findings.opaque),
        tried=set(findings.tried),
        sizes=replace(findings.sizes),
        casts=None if findings.casts is None else dict(findings.casts),
    )
    answers = (lambda _: False) if findings.follows_draws else None
    try:
        found = forgetting(lambda: record(in_mode(model, training), other.fresh(), kept, answers), model)
    except Exception as err:  # noqa: BLE001 the example is ours, not the user's
        _log.info("not recorded on other sizes: %s", err)
        return False
    step = next(_differing(known, found), None)
    if step is not None:
        _log.warning("%s gets a number that follows a size unseen (%s)", step.target, step.source)
    return step is not None


def _differing(one: Recording, other: Recording) -> Iterator[Step]:
    """The steps that are given other plain numbers, if both recordings have the same steps.

    Checks are left out: one that has another number fails on the other sizes.
    """
    mine, theirs = ([s for s in each.steps if s.target is not torch._assert] for each in (one, other))
    if list(map(kind_of_step, mine)) != list(map(kind_of_step, theirs)):
        return
    for step, counterpart in zip(mine, theirs, strict=True):
        numbers = (_numbers((each.args, each.kwargs)) for each in (step, counterpart))
        if any(left != right and left == left for left, right in zip(*numbers, strict=False)):
            yield step


def _numbers(tree: Any) -> Iterator[int | float]:
    """The plain numbers among arguments, in order, also those that expressions compute with."""
    if isinstance(tree, int | float):
        yield tree
    elif isinstance(tree, Expr):
        yield from _numbers((tree.args, tree.kwargs))
    elif isinstance(tree, slice):
        yield from _numbers((tree.start, tree.stop, tree.step))
    elif isinstance(tree, dict):
        yield from _numbers(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _numbers(part)
