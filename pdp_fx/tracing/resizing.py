"""Trying a graph on other sizes than those of the example."""

import logging
from collections.abc import Callable, Iterable

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.unseen import hides_a_size
from pdp_fx.tracing.verify import tried

_log = logging.getLogger(__name__)


def sizes_to_hold(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, findings: Findings
) -> frozenset[int]:
    """The sizes of the example that the graph must insist on, because it is wrong with other ones.

    A size may have become a plain number unseen (`pdp_fx.tracing.unseen`). Each size is replaced by the first
    other one that the model accepts: along all axes that have it, and along one or, where they do not go
    together, such as channels and pixels, along each. A graph that fails there by a check of its own is not
    wrong. Examples with whole numbers on a GPU are not tried.
    """
    if example.has_places_elsewhere:
        return frozenset()

    def wrong_on(calls: Iterable[ExampleCall]) -> bool | None:
        return _first_verdict(gm, model, calls, findings)

    return frozenset(size for size in sorted(example.sizes()) if _is_wrong_beside(example, size, wrong_on))


def _is_wrong_beside(
    example: ExampleCall, size: int, wrong_on: Callable[[Iterable[ExampleCall]], bool | None]
) -> bool:
    """Whether the graph is wrong where all axes of a size have another, or one of them has.

    If all can have another, such as those of square images, one alone that the model takes is enough.
    """
    together = wrong_on(example.resized(size))
    if together:
        return True
    alone = map(wrong_on, example.resized_alone(size))
    if together is None:
        return any(alone)
    return next((verdict for verdict in alone if verdict is not None), False)


def _first_verdict(
    gm: fx.GraphModule, model: nn.Module, calls: Iterable[ExampleCall], findings: Findings
) -> bool | None:
    """Whether the graph is wrong on the first of these calls that the model takes; None if it takes none."""
    for other in calls:
        wanted = {training: tried(model, other, training) for training in MODES}
        if any(isinstance(outcome, Exception) for outcome in wanted.values()):
            continue
        got = {training: tried(gm, other, training, model) for training in MODES}
        accepted = [training for training in MODES if not isinstance(got[training], Exception)]
        if any(_differs(wanted[training], got[training]) for training in accepted):
            return True
        return any(hides_a_size(model, other, findings, training) for training in accepted)
    return None


def _differs(wanted: Outcome | Exception, got: Outcome | Exception) -> bool:
    if isinstance(got, Exception) or isinstance(wanted, Exception) or wanted.is_near(got):
        return False
    _log.warning("the graph is held to its sizes; at another it %s", wanted.difference(got))
    return True
