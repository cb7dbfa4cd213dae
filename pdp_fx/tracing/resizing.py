"""Trying a graph on other sizes than those of the example."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx, nn

from pdp_fx.tracing.exact import MODES
from pdp_fx.tracing.examples import ExampleCall
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

    def wrong(self, example: ExampleCall, larger: bool) -> frozenset[int]:
        """The sizes of the example that the graph must insist on, because it is wrong with others.

        Each size is replaced by the first other one that the model and the graph accept: along all axes that
        have it, and along one or, where they do not go together, such as channels and pixels, along each. A
        graph that fails by a check of its own is not wrong. Examples with whole numbers on a GPU are not
        tried.

        Args:
            example: what the graph was traced on.
            larger: whether each size is also replaced by a larger one. What is cut off at a constant is all
                that there is of a smaller one.
        """
        if example.has_places_elsewhere:
            return frozenset()
        return frozenset(
            size
            for size in sorted(example.sizes())
            if self._is_wrong_from(example, size, 1)
            # A size of 1 has only become larger.
            or (larger and size > 1 and self._is_wrong_from(example, size, size + 1))
        )

    def is_wrong_beyond(self, example: ExampleCall) -> bool:
        """Whether the graph is wrong for more examples than it was traced on if it is tried on fewer, too."""
        beyond = None if example.has_places_elsewhere else example.beyond()
        return beyond is not None and bool(self._first_verdict([beyond]))

    def _is_wrong_from(self, example: ExampleCall, size: int, least: int) -> bool:
        """Whether the graph is wrong where a size is another one, which is not less than ``least``.

        Along one axis alone the others tell apart what is mixed up, so once is enough if all go together.
        """
        together = self._first_verdict(example.resized(size, least))
        if together or (together is False and least > size):
            return together
        return self._is_wrong_along_one(example, size, least, together is None)

    def _is_wrong_along_one(self, example: ExampleCall, size: int, least: int, each: bool) -> bool:
        """Whether the graph is wrong where one of the axes of a size has another.

        If all can have another, such as those of square images, one alone that the model takes is enough.
        """
        alone = (self._first_verdict(calls) for calls in example.resized_alone(size, least))
        return any(alone) if each else next((verdict for verdict in alone if verdict is not None), False)

    def _first_verdict(self, calls: Iterable[ExampleCall]) -> bool | None:
        """Whether the graph is wrong on one of these calls; None if the model takes none of them.

        They are tried until there is one that both take in both modes: what a graph refuses says nothing.
        """
        taken = False
        for other in calls:
            compared = 0
            for training in MODES:
                taken, wrong = self._verdict(other, training, taken)
                if wrong:
                    return True
                compared += wrong is not None
            if compared == len(MODES):
                break
        return False if taken else None

    def _verdict(self, other: ExampleCall, training: bool, taken: bool) -> tuple[bool, bool | None]:
        """Whether the model takes other sizes, and whether the graph is wrong on a call; None if one refuses.

        Args:
            other: the call.
            training: the mode.
            taken: whether the model is known to take others: then the graph comes first, which refuses before
                it computes.
        """
        got = tried(self.gm, other, training, self.model) if taken else None
        if isinstance(got, Exception):
            return True, None
        wanted = tried(self.model, other, training)
        if isinstance(wanted, Exception):
            return taken, None
        got = tried(self.gm, other, training, self.model) if got is None else got
        if isinstance(got, Exception):
            self.refused.append(str(got))
            return True, None
        if not wanted.is_near(got):
            _log.info("at another size the graph %s", wanted.difference(got))
            return True, True
        return True, False
