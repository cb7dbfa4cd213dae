"""A search for tau; the paper suggests a binary search, since accuracy is a concave function of tau."""

import math
from collections.abc import Callable

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, finite_number, whole_number

GOLDEN = (math.sqrt(5) - 1) / 2


def find_tau(
    score: Callable[[float], float], low: float = 1e-6, high: float = 1e-2, trials: int = 7
) -> float:
    """Return the tau with the best score among a few trials, by a golden-section search over its logarithm.

    Args:
        score: trains with a tau, usually for a short time, and returns a score; higher is better, and NaN, as
            of a training that has diverged, is worse than any number.
        low: the smallest tau to consider, above 0.
        high: the largest tau to consider.
        trials: how often `score` is called, 2 or more; seven leave 6 % of the range, on its log scale.

    Raises:
        SpecError: the range or the number of trials is impossible, `score` gives no number, or no trial has
            a score.

    Example:
        >>> f"{find_tau(lambda tau: -abs(math.log10(tau) + 4), trials=12):.0e}"
        '1e-04'
    """
    if not callable(score):
        raise SpecError(f"find_tau: score must be a function of tau, got {described(score)}")
    low, high = finite_number("find_tau: low", low), finite_number("find_tau: high", high)
    if not 0 < low < high or whole_number("find_tau: trials", trials, 0) < 2:
        raise SpecError(
            f"find_tau needs 0 < low < high and 2 trials or more, got {low:g}, {high:g}, {trials}"
        )
    left, right = math.log(low), math.log(high)
    inner = [right - GOLDEN * (right - left), left + GOLDEN * (right - left)]
    scores = [_ranked(score, point) for point in inner]
    tried = dict(zip(inner, scores, strict=True))
    for _ in range(trials - 2):
        if scores[0] >= scores[1]:
            right = inner[1]
            inner = [right - GOLDEN * (right - left), inner[0]]
            scores = [_ranked(score, inner[0]), scores[0]]
        else:
            left = inner[0]
            inner = [inner[1], left + GOLDEN * (right - left)]
            scores = [scores[1], _ranked(score, inner[1])]
        tried |= zip(inner, scores, strict=True)
    if max(tried.values()) == -math.inf:
        raise SpecError("find_tau: no training reached a score; every one was NaN or -inf")
    return math.exp(max(tried, key=lambda point: tried[point]))


def _ranked(score: Callable[[float], float], point: float) -> float:
    """The score at exp(point), where NaN, which compares with nothing, is the lowest of all."""
    given: object = score(math.exp(point))
    try:
        found = float(given)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError) as err:
        raise SpecError(f"find_tau: score must return a number, got {described(given)}") from err
    return -math.inf if math.isnan(found) else found
