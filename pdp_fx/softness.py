"""tau, the softness of the masks: absolute or relative to the scale of each layer, constant or changing.

The mask is sigmoid((w^2 - t^2) / tau), so the effect of an absolute tau depends on how large the weights are.
A relative tau, "rel:c", is c times the mean square of the layer's weights at each step; like the threshold it
gets no gradient. With an end, tau changes geometrically from its start to this end during the ramp.
"""

from dataclasses import dataclass
from typing import Self, final

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, finite_number

RELATIVE = "rel:"

SMALLEST_TAU = 1e-30
"""The least tau that float32 can compute masks with; under a relative tau, that of a layer of zeros."""


@final
@dataclass(frozen=True)
class Softness:
    """How tau follows from the progress of the ramp and the scale of the layer.

    Args:
        start: tau (or c in "rel:c") while nothing is pruned; at least `SMALLEST_TAU`.
        end: the same at the full target; None keeps it constant.
        relative: whether tau is multiplied by the mean square of the layer's weights.
        hard: whether layers compute with hard masks in training mode, too (the spec's ``forward="hard"``).
    """

    start: float
    end: float | None = None
    relative: bool = False
    hard: bool = False

    @classmethod
    def parse(cls, tau: float | str, end: float | None) -> Self:
        """The softness that a spec's ``tau`` and ``tau_end`` describe.

        Raises:
            SpecError: one of them is not a number of at least `SMALLEST_TAU`, or a text is not of the form
                "rel:0.1".
        """
        if isinstance(tau, str):
            return cls(_factor(tau), _end(end), relative=True)
        start = finite_number("PruneSpec: tau", tau)
        if start < SMALLEST_TAU:
            raise SpecError(
                f"PruneSpec: tau must be at least {SMALLEST_TAU:g}, got {start:g}; the paper's value is 1e-4"
            )
        return cls(start, _end(end))

    @property
    def constant(self) -> bool:
        """Whether tau is one number for all layers and the whole training."""
        return self.end is None and not self.relative

    def at(self, share: float) -> float:
        """Tau (or c in "rel:c") when ``share`` of the target, from 0 to 1, is pruned."""
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
    if factor is None or not SMALLEST_TAU <= factor < float("inf"):
        raise SpecError(
            "PruneSpec: tau must be a number, or a text like 'rel:0.1' with one, of at least "
            f"{SMALLEST_TAU:g}, got {described(text)}"
        )
    return factor


def _end(end: float | None) -> float | None:
    if end is None:
        return None
    number = finite_number("PruneSpec: tau_end", end)
    if number < SMALLEST_TAU:
        raise SpecError(
            f"PruneSpec: tau_end must be at least {SMALLEST_TAU:g}, got {number:g}; "
            "leave it out to keep tau as it is"
        )
    return number
