import math
from collections.abc import Callable
from typing import Any

import pytest

from pdp_fx import find_tau
from pdp_fx.errors import SpecError


@pytest.mark.parametrize("best", [1e-6, 3e-5, 1e-4, 7e-3, 1e-2])
def test_the_top_of_a_concave_curve_is_found(best: float) -> None:
    found = find_tau(lambda tau: -(math.log(tau / best) ** 2), trials=16)
    assert math.log10(found / best) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("trials", [2, 3, 7])
def test_every_trial_is_used_and_the_best_of_them_returned(trials: int) -> None:
    tried: dict[float, float] = {}

    def score(tau: float) -> float:
        tried[tau] = -abs(math.log10(tau) + 3)
        return tried[tau]

    found = find_tau(score, trials=trials)
    assert len(tried) == trials
    assert found == pytest.approx(max(tried, key=lambda tau: tried[tau]))


@pytest.mark.parametrize("diverging", [lambda tau: tau < 1e-4, lambda tau: tau > 1e-4])
def test_a_training_that_diverged_is_never_the_best(diverging: Callable[[float], bool]) -> None:
    found = find_tau(lambda tau: math.nan if diverging(tau) else -abs(math.log10(tau) + 4), trials=12)
    assert not diverging(found)
    assert math.log10(found) == pytest.approx(-4, abs=0.1)


def test_trainings_that_all_diverged_have_no_best() -> None:
    with pytest.raises(SpecError, match="no training reached a score"):
        find_tau(lambda tau: math.nan)


@pytest.mark.parametrize(("low", "high", "trials"), [(0, 1, 5), (1, 1, 5), (2, 1, 5), (1e-5, 1e-3, 1)])
def test_an_impossible_range_is_refused(low: float, high: float, trials: int) -> None:
    with pytest.raises(SpecError, match="0 < low < high"):
        find_tau(lambda tau: tau, low, high, trials)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"score": None}, "score must be a function of tau, got None"),
        ({"score": lambda tau: None}, "score must return a number, got None"),
        ({"low": "1e-6"}, "low must be a number, got '1e-6'"),
        ({"high": math.inf}, "high must be finite, got inf"),
        ({"trials": 2.5}, "trials must be a whole number, got 2.5"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"score": lambda tau: 1.0, **given}  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(SpecError, match=f"find_tau: {message}"):
        find_tau(**arguments)
