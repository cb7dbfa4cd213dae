"""Graphs at other sizes than those of the example."""

import logging

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import tried

_log = logging.getLogger(__name__)


def sizes_to_hold(gm: fx.GraphModule, model: nn.Module, example: ExampleCall) -> frozenset[int]:
    """The sizes of the example in the place of which others make the graph give something else.

    A size may have gone through code that makes a plain number of it unseen, as ``0.5 * x.shape[1]`` does:
    Python asks the number on the left first. Each size is tried at the first other that the model takes; a
    graph that fails there says so itself. Whole numbers on a GPU are not tried.
    """
    if example.has_places_elsewhere:
        return frozenset()
    return frozenset(size for size in sorted(example.sizes()) if _is_wrong_beside(gm, model, example, size))


def _is_wrong_beside(gm: fx.GraphModule, model: nn.Module, example: ExampleCall, size: int) -> bool:
    for other in example.resized(size):
        wanted = {training: tried(model, other, training) for training in MODES}
        if any(isinstance(outcome, Exception) for outcome in wanted.values()):
            continue
        return any(_is_wrong(gm, model, other, training, outcome) for training, outcome in wanted.items())
    return False


def _is_wrong(
    gm: fx.GraphModule, model: nn.Module, other: ExampleCall, training: bool, wanted: Outcome | Exception
) -> bool:
    got = tried(gm, other, training, model)
    if isinstance(got, Exception) or isinstance(wanted, Exception) or wanted.is_near(got):
        return False
    _log.warning("the graph is held to its sizes; at another it %s", wanted.difference(got))
    return True
