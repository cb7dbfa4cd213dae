"""Trying a graph on other sizes than those of the example."""

import logging
from collections.abc import Iterable

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import tried

_log = logging.getLogger(__name__)


def wrong_sizes(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> frozenset[int]:
    """The sizes of the example that a graph must insist on, because it is wrong with others.

    Each size is replaced by the first other one that the model accepts: along all axes that have it, and
    along one or, where they do not go together, such as channels and pixels, along each. A graph that fails
    there by a check of its own is not wrong. Examples with whole numbers on a GPU are not tried.
    """
    if example.has_places_elsewhere:
        return frozenset()
    held = set[int]()
    for size in sorted(example.sizes()):
        together = _first_verdict(gm, model, example.resized(size))
        if together or _is_wrong_along_one(gm, model, example, size, together is None):
            held.add(size)
    return frozenset(held)


def _is_wrong_along_one(
    gm: fx.GraphModule, model: nn.Module, example: ExampleCall, size: int, each: bool
) -> bool:
    """Whether the graph is wrong where one of the axes of a size has another.

    If all can have another, such as those of square images, one alone that the model takes is enough.
    """
    alone = (_first_verdict(gm, model, calls) for calls in example.resized_alone(size))
    return any(alone) if each else next((verdict for verdict in alone if verdict is not None), False)


def _first_verdict(gm: fx.GraphModule, model: nn.Module, calls: Iterable[ExampleCall]) -> bool | None:
    """Whether the graph is wrong on the first of these calls that the model takes; None if it takes none.

    One that it takes in both modes comes before those that it takes in one.
    """
    best: tuple[ExampleCall, dict[bool, Outcome]] | None = None
    for other in calls:
        outcomes = {training: tried(model, other, training) for training in MODES}
        wanted = {mode: each for mode, each in outcomes.items() if not isinstance(each, Exception)}
        if len(wanted) > (0 if best is None else len(best[1])):
            best = other, wanted
        if len(wanted) == len(MODES):
            break
    if best is None:
        return None
    return any(_is_wrong(gm, model, best[0], training, outcome) for training, outcome in best[1].items())


def _is_wrong(
    gm: fx.GraphModule, model: nn.Module, other: ExampleCall, training: bool, wanted: Outcome
) -> bool:
    got = tried(gm, other, training, model)
    if isinstance(got, Exception) or wanted.is_near(got):
        return False
    _log.warning("the graph is held to its sizes; at another it %s", wanted.difference(got))
    return True
