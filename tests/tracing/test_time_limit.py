"""Ending loops of models, and nothing else."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from pdp_fx.tracing.replacing import replaced
from pdp_fx.tracing.time_limit import TooLongError, time_limit


class Thing:
    value = 0


def forever() -> None:
    while True:
        pass


def test_a_loop_is_ended() -> None:
    with pytest.raises(TooLongError), time_limit(0.05):
        forever()


def test_a_loop_that_holds_on_to_one_error_is_ended_by_the_next() -> None:
    caught: list[BaseException] = []

    def stubborn() -> None:
        try:
            forever()
        except TooLongError as err:
            caught.append(err)
        forever()

    with pytest.raises(TooLongError), time_limit(0.05):
        stubborn()
    assert len(caught) == 1


def test_work_that_ends_in_time_is_left_alone() -> None:
    with time_limit(0.05):
        pass
    time.sleep(0.1)


def test_what_was_replaced_is_put_back_however_short_the_limit() -> None:
    """An error in the middle of putting back would leave the value of one of many blocks."""

    @contextmanager
    def blocks(number: int) -> Generator[None, None, None]:
        with replaced(Thing, "value", number):
            if number:
                with blocks(number - 1):
                    yield
            else:
                yield

    def replace_forever() -> None:
        while True:
            with blocks(20):
                pass

    # Python swallows, with a warning, what is raised in a callback of its collector, as hypothesis has one.
    gc.disable()
    try:
        for limit in range(1, 40):
            with pytest.raises(TooLongError), time_limit(limit / 4000):
                replace_forever()
            assert Thing.value == 0
    finally:
        gc.enable()
