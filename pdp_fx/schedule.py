"""How the share of the target grows while the model trains: a pure function of the epoch or step.

Progress at counter e: p = min(1, epsilon * (e - start)), and 0 before `start`; the counter counts the calls
of `pdp_fx.step`. The share of the target is p itself (paper, appendix, algorithm "Training flow for PDP") or,
with `shape="cubic"`, 1 - (1 - p)^3, which prunes fast at first and slowly at the end (Zhu and Gupta, 2017).
"""

import math
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, final

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import finite_number, one_of, store, whole_number

Unit: TypeAlias = Literal["epoch", "step"]
Shape: TypeAlias = Literal["linear", "cubic"]

RANKINGS = 100
"""How often at most a dynamic allocation ranks the weights of all layers while the ramp runs."""

_TOLERANCE = 1e-9
"""How far below 1 a share counts as 1: fifty times 1/50 must end the ramp, whatever the rounding."""


@final
@dataclass(frozen=True)
class Schedule:
    """The paper's ramp from the dense model to the full target.

    Args:
        start: first epoch (or step) of the ramp, at which the layers' ratios are fixed too; 0 or more. At 0
            they are fixed by the first call of `pdp_fx.step`.
        epsilon: progress per epoch (or step), from 1e-9 to 1; 0.015 takes 67 epochs.
        per: what one call of `pdp_fx.step` stands for, "epoch" or "step".
        length: how many epochs (or steps) the training will have; when given, the ramp must be over at the
            start of the last one.
        shape: "linear" as in the paper, or "cubic"; both end at the same epoch (or step).

    Raises:
        SpecError: a value is out of its range, or the ramp cannot finish within `length`.

    Example:
        >>> Schedule().ramp_end
        83
    """

    start: int = 16
    epsilon: float = 0.015
    per: Unit = "epoch"
    length: int | None = None
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        epsilon = finite_number("Schedule: epsilon", self.epsilon)
        if not _TOLERANCE <= epsilon <= 1:
            raise SpecError(
                f"Schedule: epsilon must lie between {_TOLERANCE:g} and 1, got {epsilon:g}; "
                "it is the progress towards the target per epoch or step, and 1.0 takes it all at once"
            )
        store(
            self,
            start=whole_number("Schedule: start", self.start, 0),
            epsilon=epsilon,
            per=one_of("Schedule: per", self.per, ("epoch", "step")),
            shape=one_of("Schedule: shape", self.shape, ("linear", "cubic")),
        )
        if self.length is not None:
            store(self, length=whole_number("Schedule: length", self.length, 1))
            self._check_finishes(self.length)

    @classmethod
    def fit(
        cls, length: int, start: float = 0.13, end: float = 0.7, per: Unit = "epoch", shape: Shape = "linear"
    ) -> Self:
        """The ramp scaled to a run of `length` epochs (or steps), which may be short.

        The paper's ramp runs from epoch 16 to epoch 83; of the 120 epochs of its CIFAR-10 run that is from
        0.13 to 0.69.

        Args:
            length: how many epochs (or steps) the training will have; 2 or more.
            start: where the ramp starts, as a fraction of `length`, rounded to a whole epoch (or step).
            end: where the ramp reaches the full target, likewise; at the latest at the last epoch.
            per: what one call of `pdp_fx.step` stands for, "epoch" or "step".
            shape: "linear" or "cubic".

        Raises:
            SpecError: not 0 <= start < end <= 1, or `length` is too short to hold a ramp.
        """
        length = whole_number("Schedule.fit: length", length, 2)
        start = finite_number("Schedule.fit: start", start)
        end = finite_number("Schedule.fit: end", end)
        if not 0 <= start < end <= 1:
            raise SpecError(
                "Schedule.fit: start and end are fractions of the run with 0 <= start < end <= 1, "
                f"got start={start:g} and end={end:g}; write for example "
                f"Schedule.fit({length}, start=0.13, end=0.7)"
            )
        first = min(round(start * length), length - 2)
        last = min(max(round(end * length), first + 1), length - 1)
        return cls(start=first, epsilon=1 / (last - first), per=per, length=length, shape=shape)

    @property
    def ramp_end(self) -> int:
        """The first epoch (or step) at which the share is 1."""
        return self.start + math.ceil((1 - _TOLERANCE) / self.epsilon)

    def _check_finishes(self, length: int) -> None:
        """Refuse a ramp that is not over at the start of the last epoch (or step)."""
        if self.ramp_end <= length - 1:
            return
        raise SpecError(
            f"Schedule(start={self.start}, epsilon={self.epsilon:g}) reaches the full target at {self.per} "
            f"{self.ramp_end}, but with length={length} the last {self.per} is {length - 1}; "
            f"write {' or '.join(self._remedies(length))}"
        )

    def _remedies(self, length: int) -> list[str]:
        """Changes each of which makes the ramp finish."""
        room = length - 1 - self.start
        latest = length - 1 - (self.ramp_end - self.start)
        remedies = [f"length={self.ramp_end + 1}"]
        if latest >= 0:
            remedies.insert(0, f"start={latest}")
        if room >= 1:
            remedies.insert(0, f"epsilon={_one_over(room)!r}")
        if length >= 2:
            per = "" if self.per == "epoch" else f", per={self.per!r}"
            shape = "" if self.shape == "linear" else f", shape={self.shape!r}"
            remedies.append(f"Schedule.fit({length}{per}{shape})")
        return remedies


def share(schedule: Schedule, counter: int) -> float:
    """The share of the target that holds at `counter` epochs (or steps), from 0.0 to exactly 1.0."""
    if counter <= schedule.start:
        return 0.0
    if counter >= schedule.ramp_end:
        return 1.0
    progress = schedule.epsilon * (counter - schedule.start)
    return progress if schedule.shape == "linear" else 1.0 - (1.0 - progress) ** 3


def ranks_anew(schedule: Schedule, counter: int) -> bool:
    """Whether a dynamic allocation ranks at `counter`: evenly spaced, and last at the end of the ramp."""
    length, done = schedule.ramp_end - schedule.start, counter - schedule.start
    return 0 <= done <= length and (done % math.ceil(length / RANKINGS) == 0 or done == length)


def _one_over(count: int) -> float:
    """1 / count, rounded up to a few digits so that `count` such parts make at least 1."""
    scale = 10 ** (3 + len(str(count)))
    return -(-scale // count) / scale
