"""Finding plain numbers that Python makes unseen of those which a model reads from tensors.

A live number tells what is computed with it as long as Python calls its methods. Code written in C need not:
``0.5 * size``, an index of a list or ``"%d"`` take the digits of an int or float as they are. So the model is
recorded again with live numbers of other digits. What goes by their methods is the same then; an index is
another one, or out of range. The graph then insists on what is read where that matters.
"""

import logging

from torch import nn

from pdp_fx.tracing.align import kind_of_step
from pdp_fx.tracing.attempts import recorded_again
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.flags import leaves_modes_to_torch
from pdp_fx.tracing.sizes import Decoy, Place, given_as
from pdp_fx.tracing.skipping import differences
from pdp_fx.tracing.source import raised_by_user
from pdp_fx.tracing.steps import CHECKS, InexactError, Recording, is_given, is_read
from pdp_fx.tracing.time_limit import TooLongError, time_limit

SIGNS = (-1, 1)
"""Of what is added to digits: on either side of limits, as in ``max(int(0.5 * size), 1)``."""

PATIENCE, MORE_SECONDS, MORE_STEPS = 10, 5.0, 1000
"""How many times as long as the model itself it may take with other digits, and how much more."""

_log = logging.getLogger(__name__)


def insist(model: nn.Module, example: ExampleCall, findings: Findings) -> bool:
    """Find the places where the model reads numbers of which Python makes plain ones unseen.

    Args:
        model: the model; it is restored.
        example: what it was recorded on.
        findings: what is known of it, with a recording of each mode; the places are added.

    Returns:
        Whether any is found, so that the model has to be recorded again.

    Raises:
        InexactError: one is a number in a tensor of data, on which no graph can insist.
    """
    for training in () if findings.insists_enough else (False, True):
        known = findings.recording(training)
        if known is None or not (findings.sizes.read or any(is_read(s) or is_given(s) for s in known.steps)):
            continue
        before = findings.recording(False)
        if training and before and leaves_modes_to_torch(model, before, known) and does_same(before, known):
            continue
        places = _Again(model, example, training, findings, known).places()
        read = next((place for place in places if place.call == "item"), None)
        if read is not None:
            problem = f"takes a number that it reads from a tensor for a plain one ({read.source})"
            raise InexactError(type(model).__name__, f"it {problem}; compute with it, or decide by tensors")
        if places:
            _log.warning("the graph insists on %s", ", ".join(map(_said, places)))
            findings.insisted |= set(places)
            return True
    findings.insists_enough = True
    return False


def _said(place: Place) -> str:
    return place.source if place == given_as(place.source) else f"what {place.source} reads"


class _Again:
    """The model recorded once more in one mode, to compare with what is known."""

    def __init__(
        self, model: nn.Module, example: ExampleCall, training: bool, findings: Findings, known: Recording
    ) -> None:
        self._again = lambda decoy: recorded_again(model, example, training, findings.aside(), decoy=decoy)
        # A branch that is recorded both ways is not taken in this recording.
        self._base = self._again(None) if known.draws else known
        self._limit = PATIENCE * known.seconds + MORE_SECONDS

    def places(self) -> list[Place]:
        """Where other digits of what is read make a difference."""
        for sign in SIGNS:
            decoy = self._decoy(sign)
            if self._is_base(decoy):
                continue
            self._base = self._again(None)
            found = self._among(list(decoy.met), sign)
            if found:
                return found
        return []

    def _among(self, places: list[Place], sign: int) -> list[Place]:
        """Those of these places where other digits make a difference; all if they do only together."""
        if not places or self._is_base(self._decoy(sign, frozenset(places))):
            return []
        if len(places) == 1:
            return places
        half = len(places) // 2
        return self._among(places[:half], sign) + self._among(places[half:], sign) or places

    def _decoy(self, sign: int, places: frozenset[Place] | None = None) -> Decoy:
        return Decoy(sign, PATIENCE * len(self._base.steps) + MORE_STEPS, places)

    def _is_base(self, decoy: Decoy) -> bool:
        """Whether the model does the same with other digits, or refuses them by a `raise` of its own."""
        try:
            with time_limit(self._limit):
                return does_same(self._base, self._again(decoy))
        except (Exception, TooLongError) as err:  # noqa: BLE001 an index is out of range, for one
            _log.info("fails with other digits of the numbers that it reads: %s", err)
            return raised_by_user(err)


def does_same(one: Recording, other: Recording) -> bool:
    """Whether two recordings do the same, apart from their checks."""
    mine, theirs = ([s for s in each.steps if s.target not in CHECKS] for each in (one, other))
    if list(map(kind_of_step, mine)) != list(map(kind_of_step, theirs)):
        return False
    pairs = dict(zip(theirs, mine, strict=True))
    given = [((same.args, same.kwargs), (step.args, step.kwargs)) for step, same in pairs.items()]
    given.append((one.output, other.output))
    return all(next(differences(ours, others, pairs), None) is None for ours, others in given)
