import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdp_fx.errors import SpecError
from pdp_fx.schedule import Schedule, share

PAPER = Schedule(start=16, epsilon=0.015)


@pytest.mark.parametrize(
    ("counter", "expected"), [(0, 0.0), (15, 0.0), (16, 0.0), (17, 0.015), (82, 0.99), (83, 1.0), (120, 1.0)]
)
def test_the_default_schedule_is_the_ramp_of_the_paper(counter: int, expected: float) -> None:
    assert Schedule() == PAPER
    assert share(PAPER, counter) == pytest.approx(expected, abs=1e-12)


def test_one_step_of_the_full_epsilon_reaches_the_full_target() -> None:
    at_once = Schedule(start=0, epsilon=1.0)
    assert [share(at_once, counter) for counter in (0, 1, 2)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("parts", [3, 7, 10, 49, 98, 103, 10_000, 1_000_003])
def test_the_last_of_n_nth_parts_is_exactly_one_whatever_the_rounding(parts: int) -> None:
    ramp = Schedule(start=5, epsilon=1 / parts)
    assert ramp.ramp_end == 5 + parts
    assert share(ramp, 5 + parts) == 1.0
    assert share(ramp, 5 + parts - 1) < 1.0


@given(
    start=st.integers(0, 1000),
    epsilon=st.floats(1e-9, 1),
    shape=st.sampled_from(["linear", "cubic"]),
    counters=st.tuples(*[st.integers(0, 10**10)] * 2),
)
def test_the_share_stays_between_zero_and_one_and_never_falls(
    start: int, epsilon: float, shape: Any, counters: tuple[int, int]
) -> None:
    ramp = Schedule(start=start, epsilon=epsilon, shape=shape)
    shares = [share(ramp, counter) for counter in sorted(counters)]
    assert 0.0 <= shares[0] <= shares[1] <= 1.0


@given(start=st.integers(0, 1000), epsilon=st.floats(1e-9, 1))
def test_ramp_end_is_the_first_counter_whose_share_is_one(start: int, epsilon: float) -> None:
    ramp = Schedule(start=start, epsilon=epsilon)
    assert share(ramp, ramp.ramp_end) == 1.0
    assert share(ramp, ramp.ramp_end - 1) < 1.0


@pytest.mark.parametrize(
    ("start", "epsilon", "length"), [(16, 0.015, 84), (16, 0.015, 100), (0, 1.0, 2), (3, 0.1, 14)]
)
def test_a_ramp_that_is_over_at_the_last_epoch_is_accepted(start: int, epsilon: float, length: int) -> None:
    assert Schedule(start, epsilon, length=length).ramp_end <= length - 1


@pytest.mark.parametrize(
    ("start", "epsilon", "length", "message"),
    [
        (16, 0.015, 83, r"reaches the full target at epoch 83, but with length=83 the last epoch is 82"),
        (16, 0.015, 60, r"write epsilon=0\.02326 or length=84 or Schedule\.fit\(60\)$"),
        (40, 0.015, 100, r"write epsilon=0\.01695 or start=32 or length=108 or Schedule\.fit\(100\)$"),
        (16, 0.5, 10, r"write start=7 or length=19 or Schedule\.fit\(10\)$"),
        (0, 1.0, 1, r"write length=2$"),
    ],
)
def test_a_ramp_that_cannot_finish_is_refused_with_what_would_work(
    start: int, epsilon: float, length: int, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        Schedule(start, epsilon, length=length)


@given(start=st.integers(0, 300), epsilon=st.floats(1e-4, 1), length=st.integers(1, 300))
def test_every_remedy_offered_for_an_unfinished_ramp_is_accepted(
    start: int, epsilon: float, length: int
) -> None:
    try:
        Schedule(start, epsilon, length=length)
    except SpecError as refusal:
        remedies = re.findall(r"(epsilon|start|length)=([\d.e-]+)(?: or|$)", str(refusal))
        assert remedies
        for name, value in remedies:
            changed: dict[str, Any] = {"start": start, "epsilon": epsilon, "length": length}
            changed[name] = float(value) if name == "epsilon" else int(value)
            Schedule(**changed)


def test_a_schedule_per_step_counts_and_complains_in_steps() -> None:
    with pytest.raises(SpecError) as refusal:
        Schedule(start=100, epsilon=0.01, per="step", length=150)
    assert "full target at step 200, but with length=150 the last step is 149" in str(refusal.value)
    assert str(refusal.value).endswith("Schedule.fit(150, per='step')")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": -1}, "Schedule: start must be 0 or more, got -1"),
        ({"start": 1.5}, r"Schedule: start must be a whole number, got 1\.5 \(float\)"),
        ({"start": True}, r"Schedule: start must be a whole number, got True \(bool\)"),
        (
            {"epsilon": 0},
            "epsilon must lie between 1e-09 and 1, got 0; it is the progress towards the target",
        ),
        ({"epsilon": 1.5}, r"epsilon must lie between 1e-09 and 1, got 1\.5"),
        ({"epsilon": float("nan")}, "Schedule: epsilon must be finite, got nan"),
        ({"epsilon": "0.015"}, r"Schedule: epsilon must be a number, got '0\.015' \(str\)"),
        ({"per": "epochs"}, "per must be 'epoch' or 'step', got 'epochs' .*did you mean 'epoch'"),
        ({"length": 0}, "Schedule: length must be 1 or more, got 0"),
        ({"length": 100.0}, "Schedule: length must be a whole number"),
    ],
)
def test_an_impossible_schedule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schedule(**arguments)


@pytest.mark.parametrize(
    ("length", "start", "ramp_end"), [(2, 0, 1), (3, 0, 2), (10, 1, 7), (40, 5, 28), (120, 16, 84)]
)
def test_fit_scales_the_ramp_to_the_length_of_the_run(length: int, start: int, ramp_end: int) -> None:
    fitted = Schedule.fit(length)
    assert (fitted.start, fitted.ramp_end, fitted.length) == (start, ramp_end, length)


def test_fit_with_the_fractions_of_the_paper_gives_its_epochs() -> None:
    fitted = Schedule.fit(120, start=0.13, end=0.69)
    assert (fitted.start, fitted.ramp_end) == (16, 83)
    assert fitted.epsilon == pytest.approx(0.015, abs=1e-4)


@given(
    length=st.integers(2, 100_000),
    fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(lambda pair: pair[0] != pair[1]),
)
def test_fit_always_finishes_within_the_run(length: int, fractions: tuple[float, float]) -> None:
    fitted = Schedule.fit(length, start=min(fractions), end=max(fractions), per="step")
    assert 0 <= fitted.start < fitted.ramp_end <= length - 1
    assert fitted.per == "step"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1,), r"Schedule\.fit: length must be 2 or more, got 1"),
        ((10, 0.7, 0.7), r"0 <= start < end <= 1, got start=0\.7 and end=0\.7; write for example"),
        ((10, 16, 83), "fractions of the run .* got start=16 and end=83"),
        ((10, -0.1), r"got start=-0\.1 and end=0\.7"),
    ],
)
def test_fit_refuses_what_is_no_fraction_of_a_run(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schedule.fit(*arguments)


@pytest.mark.parametrize(
    ("counter", "expected"), [(10, 0.0), (11, 1 - 0.9**3), (15, 0.875), (20, 1.0), (99, 1.0)]
)
def test_a_cubic_ramp_prunes_fast_first_and_ends_where_the_linear_one_ends(
    counter: int, expected: float
) -> None:
    cubic = Schedule(10, 0.1, shape="cubic")
    assert share(cubic, counter) == pytest.approx(expected, abs=1e-12)
    assert cubic.ramp_end == Schedule(10, 0.1).ramp_end


def test_a_ramp_that_fits_a_run_keeps_its_shape() -> None:
    assert Schedule.fit(30, shape="cubic").shape == "cubic"
    with pytest.raises(SpecError, match=r"Schedule\.fit\(60, shape='cubic'\)$"):
        Schedule(16, 0.015, length=60, shape="cubic")


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(SpecError, match="shape must be 'linear' or 'cubic'"):
        Schedule(shape="cubical")  # pyright: ignore[reportArgumentType]
