"""tau, the softness of the masks: a number, or one relative to the scale of each layer, which may shrink.

An absolute tau is compared with w^2 - t^2, so what it means depends on how large the weights are. A relative
one, "rel:c", is c times the mean square of the layer's weights as they are at each step, a constant of the
step like the threshold. With an end, tau goes from its start to it geometrically while the ramp runs.
"""

from dataclasses import dataclass
from typing import Self, final

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, finite_number

RELATIVE = "rel:"


@final
@dataclass(frozen=True)
class Softness:
    """How tau follows from the progress of the ramp and the scale of the layer.

    Args:
        start: tau, or its factor, while nothing is pruned; above 0.
        end: the same at the full target; above 0. None means that it stays what it is.
        relative: whether the mean square of the layer's weights is a factor of tau.
        hard: whether layers compute with hard masks in training, too, and only the gradient is soft.
    """

    start: float
    end: float | None = None
    relative: bool = False
    hard: bool = False

    @classmethod
    def parse(cls, tau: float | str, end: float | None) -> Self:
        """What a spec's ``tau`` and ``tau_end`` say.

        Raises:
            SpecError: one of them is not a number above 0, or a text is not of the form "rel:0.1".
        """
        if isinstance(tau, str):
            return cls(_factor(tau), _end(end), relative=True)
        start = finite_number("PruneSpec: tau", tau)
        if start <= 0:
            raise SpecError(f"PruneSpec: tau must be above 0, got {start:g}; the paper's value is 1e-4")
        return cls(start, _end(end))

    @property
    def constant(self) -> bool:
        """Whether tau is one number for the whole training."""
        return self.end is None and not self.relative

    def at(self, share: float) -> float:
        """The number that holds when ``share`` of the target, from 0 to 1, is pruned."""
        return self.start if self.end is None else self.start * (self.end / self.start) ** share

    def __str__(self) -> str:
        end = "" if self.end is None else f"..{self.end:g}"
        forward = ", hard forward" if self.hard else ""
        return f"{RELATIVE if self.relative else ''}{self.start:g}{end}{forward}"


def _factor(text: str) -> float:
    number = text.removeprefix(RELATIVE)
    try:
        factor = float(number) if number != text else None
    except ValueError:
        factor = None
    if factor is None or not 0 < factor < float("inf"):
        raise SpecError(
            f"PruneSpec: tau must be a number above 0 or a text like 'rel:0.1', got {described(text)}"
        )
    return factor


def _end(end: float | None) -> float | None:
    if end is None:
        return None
    number = finite_number("PruneSpec: tau_end", end)
    if number <= 0:
        raise SpecError(
            f"PruneSpec: tau_end must be above 0, got {number:g}; leave it out to keep tau as it is"
        )
    return number
