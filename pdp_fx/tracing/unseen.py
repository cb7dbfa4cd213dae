"""Finding numbers that follow a size unseen, by recording a model on another size, too.

In ``ratios[0] * x.shape[1]`` Python calls the method of the float on the left, which need not be one that
yields (`pdp_fx.tracing.yielding`), so the result is a plain number and becomes a constant of the graph.
Outputs need not show it: the capacity of an expert, say, may be reached on few inputs. Two recordings do, for
all that is seen is the same in both.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import reduce
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pdp_fx.tracing.align import kind_of_step
from pdp_fx.tracing.attempts import recorded_again
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.skipping import differences
from pdp_fx.tracing.steps import Recording, Step
from pdp_fx.tracing.verify import tried

_log = logging.getLogger(__name__)


class Unseen(NamedTuple):
    """Which sizes of the example a number of the graph follows unseen.

    Attributes:
        batch: whether one follows the number of examples.
        sizes: the other sizes that one follows.
    """

    batch: bool
    sizes: frozenset[int]


def followed_unseen(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, findings: Findings, free: AbstractSet[int]
) -> Unseen:
    """Which sizes the graph must insist on, because a constant in it follows them in the model.

    All sizes that may be others are changed at once first, and one by one only if that shows such a number,
    or if the model does not take that. Examples with whole numbers on a GPU are not tried.

    Args:
        gm: the graph of the model.
        model: the model; it is restored.
        example: what it was traced on.
        findings: what is known of the model, with a recording of each mode; left as they are.
        free: the sizes of the example that may be others.
    """
    made = {training: findings.recording(training) for training in (True, False)}
    known = {training: recording for training, recording in made.items() if recording is not None}
    if example.has_places_elsewhere:
        return Unseen(False, frozenset())

    def hides(calls: Iterable[ExampleCall]) -> bool | None:
        return _first_verdict(gm, model, calls, findings, known)

    if hides(_all_changed(example, sorted(free))) is False:
        return Unseen(False, frozenset())
    sizes = frozenset(size for size in sorted(free) if hides(example.resized(size)))
    return Unseen(bool(hides(example.others())), sizes)


def _all_changed(example: ExampleCall, sizes: list[int]) -> Iterator[ExampleCall]:
    """Calls in which the batch and all these sizes are others."""
    other = next(example.others(), None)
    if other is None:
        return
    for call in other.resized(sizes[0]) if sizes else [other]:
        yield reduce(lambda changed, size: next(changed.resized(size)), sizes[1:], call)


def _first_verdict(
    gm: fx.GraphModule,
    model: nn.Module,
    calls: Iterable[ExampleCall],
    findings: Findings,
    known: Mapping[bool, Recording],
) -> bool | None:
    """Whether a number is another one on the first call that the graph takes; None if it takes none."""
    for other in calls:
        outcomes = {training: tried(gm, other, training, model) for training in known}
        taken = [training for training, outcome in outcomes.items() if not isinstance(outcome, Exception)]
        if taken:
            return any(_is_another(model, other, findings, training, known[training]) for training in taken)
    return None


def _is_another(
    model: nn.Module, other: ExampleCall, findings: Findings, training: bool, known: Recording
) -> bool:
    """Whether a plain number in a recording of the model is another one on this call."""
    try:
        found = recorded_again(model, other, training, findings.aside())
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
    pairs = dict(zip(theirs, mine, strict=True))
    for counterpart, step in pairs.items():
        given = differences((step.args, step.kwargs), (counterpart.args, counterpart.kwargs), pairs)
        if any(starmap(_are_numbers, given)):
            yield step


def _are_numbers(one: Any, other: Any) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float) and one == one
