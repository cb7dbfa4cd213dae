"""Which way a recorded run goes where it branches by chance, or on whether a mask selects anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from pdp_fx.tracing.expressions import only_assigns
from pdp_fx.tracing.selecting import selection
from pdp_fx.tracing.skipping import asks_finite, is_drawn
from pdp_fx.tracing.source import source_line, user_frame
from pdp_fx.tracing.steps import Asked, Draw, Step, Value, is_ragged

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

MOST_DRAWS = 1000
"""After this many branches on random numbers, as of a loop that goes on by chance, none is followed."""

MOST_ASKED = 1000
"""So often a call may ask in one line whether anything is selected; a loop until nothing is would not end."""


class Branches:
    """The branches of a run that are followed whichever way its numbers go.

    Args:
        recorder: makes the recording.
        answers: which way to go at each branch that is recorded both ways, by number; None to refuse such.
        empty: as for `record.record`.

    Attributes:
        draws: the branches on random numbers so far.
        asked: those on whether a mask selects anything.
    """

    def __init__(
        self, recorder: Recorder, answers: Callable[[int], bool] | None, empty: Mapping[int, int]
    ) -> None:
        self.draws: list[Draw] = []
        self.asked: list[Asked] = []
        self._recorder, self._answers, self._empty = recorder, answers, empty
        self._asks: Counter[tuple[int, str]] = Counter()

    @property
    def go_both_ways(self) -> bool:
        """Whether there are branches that are recorded both ways."""
        return self._answers is not None

    def way(self, value: Value, frame: FrameType | None) -> bool | None:
        """Which way to go at a branch of a frame on a value; None if it is not to be followed both ways."""
        if self._answers is None or self._recorder.inside:
            return None
        repairs = frame is not None and asks_finite(value) and only_assigns(frame)
        if not repairs and not is_drawn(value):
            return None
        if len(self.draws) == MOST_DRAWS:
            return None
        number = next((draw.number for draw in self.draws if draw.value is value), None)
        if number is None:
            number = 1 + max((draw.number for draw in self.draws), default=-1)
        place, scope = len(self._recorder.steps), self._recorder.scope
        self.draws.append(Draw(value, number, place, scope, source_line(), repairs))
        return self._answers(number)

    def selected(self, mask: Step | None, inverted: bool = False) -> bool | None:
        """Whether to go on as if a mask selected any, at a branch on it; None if it is not followed.

        Args:
            mask: the step that makes the mask, if it is known.
            inverted: whether it selects what is False.
        """
        source = source_line()
        if mask is None or self._recorder.inside or source in self._recorder.findings.unproven:
            return None
        line = self._recorder.frames.number(user_frame()), source
        self._asks[line] += 1
        if self._asks[line] > MOST_ASKED:
            return None
        number = abs(mask.selects) or 1 + max((asked.number for asked in self.asked), default=0)
        if mask.selects not in (0, -number if inverted else number):
            return None
        mask.selects = -number if inverted else number
        self.asked.append(Asked(number, len(self._recorder.steps), source))
        return number not in map(abs, self._empty.values())

    def by_count(self, count: Value) -> bool | None:
        """As `selected`, at a branch on the number of what a mask selects."""
        return self.selected(selection(count)) if is_ragged(count) else None

    def empty(self, mask: Any) -> None:
        """Make a mask that the next step makes select nothing, if it is to count as empty."""
        selects = self._empty.get(len(self._recorder.steps))
        if selects is not None:
            self._recorder.run(torch.Tensor.fill_, (mask, selects < 0), {})
