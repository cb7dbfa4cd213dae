"""Trying a graph on other sizes than those of the example."""

import logging
from collections.abc import Iterable

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import tried

_log = logging.getLogger(__name__)


def sizes_to_hold(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> frozenset[int]:
    """The sizes of the example that the graph must insist on, because it is wrong with other ones.

    A size may have become a plain number unseen, as in ``0.5 * x.shape[1]``, where Python calls the method of
    the number on the left. Each size is replaced by the first other one that the model accepts: along all
    axes that have it, and along one or, where they do not go together, such as channels and pixels, along
    each. A graph that
    fails there by a check of its own is not wrong. Examples with whole numbers on a GPU are not tried.
    """
    if example.has_places_elsewhere:
        return frozenset()
    return frozenset(size for size in sorted(example.sizes()) if _is_wrong_beside(gm, model, example, size))


def _is_wrong_beside(gm: fx.GraphModule, model: nn.Module, example: ExampleCall, size: int) -> bool:
    """Whether the graph is wrong where all axes of a size have another, or one of them has.

    If all can have another, such as those of square images, one alone that the model takes is enough.
    """
    together = _first_verdict(gm, model, example.resized(size))
    if together:
        return True
    alone = (_first_verdict(gm, model, calls) for calls in example.resized_alone(size))
    if together is None:
        return any(alone)
    return next((verdict for verdict in alone if verdict is not None), False)


def _first_verdict(gm: fx.GraphModule, model: nn.Module, calls: Iterable[ExampleCall]) -> bool | None:
    """Whether the graph is wrong on the first of these calls that the model takes; None if it takes none."""
    for other in calls:
        wanted: dict[bool, Outcome] = {}
        for training in MODES:
            outcome = tried(model, other, training)
            if isinstance(outcome, Exception):
                break
            wanted[training] = outcome
        else:
            return any(_is_wrong(gm, model, other, training, outcome) for training, outcome in wanted.items())
    return None


def _is_wrong(
    gm: fx.GraphModule, model: nn.Module, other: ExampleCall, training: bool, wanted: Outcome
) -> bool:
    got = tried(gm, other, training, model)
    if isinstance(got, Exception) or wanted.is_near(got):
        return False
    _log.warning("the graph is held to its sizes; at another it %s", wanted.difference(got))
    return True
