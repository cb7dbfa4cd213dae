"""Trying a graph on other sizes than those of the example."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import tried

_log = logging.getLogger(__name__)


@dataclass
class OtherSizes:
    """A graph beside the model that it was made of, where both are given other sizes.

    Attributes:
        gm: the graph.
        model: the model.
        refused: why the graph has refused calls that the model takes.
    """

    gm: fx.GraphModule
    model: nn.Module
    refused: list[str] = field(default_factory=list[str])

    def wrong(self, example: ExampleCall) -> frozenset[int]:
        """The sizes of the example that the graph must insist on, because it is wrong with others.

        Each size is replaced by the first other one that the model accepts: along all axes that have it, and
        along one or, where they do not go together, such as channels and pixels, along each. A graph that
        fails there by a check of its own is not wrong. Examples with whole numbers on a GPU are not tried.
        """
        if example.has_places_elsewhere:
            return frozenset()
        held = set[int]()
        for size in sorted(example.sizes()):
            together = self._first_verdict(example.resized(size))
            if together or self._is_wrong_along_one(example, size, together is None):
                held.add(size)
        return frozenset(held)

    def _is_wrong_along_one(self, example: ExampleCall, size: int, each: bool) -> bool:
        """Whether the graph is wrong where one of the axes of a size has another.

        If all can have another, such as those of square images, one alone that the model takes is enough.
        """
        alone = (self._first_verdict(calls) for calls in example.resized_alone(size))
        return any(alone) if each else next((verdict for verdict in alone if verdict is not None), False)

    def _first_verdict(self, calls: Iterable[ExampleCall]) -> bool | None:
        """Whether the graph is wrong on the first of these calls that the model takes; None if it takes none.

        One that it takes in both modes comes before those that it takes in one.
        """
        best: tuple[ExampleCall, dict[bool, Outcome]] | None = None
        for other in calls:
            outcomes = {training: tried(self.model, other, training) for training in MODES}
            wanted = {mode: each for mode, each in outcomes.items() if not isinstance(each, Exception)}
            if len(wanted) > (0 if best is None else len(best[1])):
                best = other, wanted
            if len(wanted) == len(MODES):
                break
        if best is None:
            return None
        return any(self._is_wrong(best[0], training, outcome) for training, outcome in best[1].items())

    def _is_wrong(self, other: ExampleCall, training: bool, wanted: Outcome) -> bool:
        got = tried(self.gm, other, training, self.model)
        if isinstance(got, Exception):
            self.refused.append(str(got))
            return False
        if wanted.is_near(got):
            return False
        _log.info("at another size the graph %s", wanted.difference(got))
        return True
