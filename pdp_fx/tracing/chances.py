"""Random numbers that a model draws one by one from Python's or NumPy's generator.

Code that skips layers at random often draws from them: ``if self.training and random.random() < self.rate``.
In a recording such a number is a tensor that the graph draws anew at each call, so that branches on it are
followed as those on torch's random numbers are (`pdp_fx.tracing.skipping`). Where they cannot be, the model
is recorded without, and what draws is kept whole.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from pdp_fx.tracing.objects import DrawNumber
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, wherever_named
from pdp_fx.tracing.source import is_users

DRAWS = (
    *(DrawNumber("random", name) for name in ("random", "uniform")),
    *(DrawNumber("numpy.random", name) for name in ("random", "random_sample", "rand", "uniform")),
)
"""The functions that draw one number; one object for each, so that two recordings hold the same."""


@contextmanager
def following_numbers(recorder: Recorder) -> Generator[None, None, None]:
    """Record what the model's code draws inside the block, if branches may be recorded both ways."""
    with entries(_replacements(recorder) if recorder.branches.go_both_ways else ()):
        yield


def _replacements(recorder: Recorder) -> list[tuple[dict[str, Any], str, object]]:
    """Where the functions are looked up: in their Python modules, and in those of the model's classes."""
    recording = [(draw.function, _recording(recorder, draw, draw.function)) for draw in DRAWS]
    homes = (vars(sys.modules[home]) for home in {draw.home for draw in DRAWS})
    return wherever_named(recording, map(type, recorder.model.modules()), *homes)


def _recording(recorder: Recorder, draw: DrawNumber, function: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        bounds = len(args) <= 2 * (draw.name == "uniform") and all(isinstance(a, int | float) for a in args)
        if recorder.inside or kwargs or not bounds or not is_users(sys._getframe(1).f_code.co_filename):
            return function(*args, **kwargs)
        return recorder.guarded(_draw, recorder, draw, args)

    return drawn


def _draw(recorder: Recorder, draw: DrawNumber, args: tuple[Any, ...]) -> Any:
    recorder.check_drawn()
    step = recorder.step("call_function", draw, args, {})
    number, _ = recorder.run_and_compare(draw, args, {}, step, [])
    step.random = step.data = True
    recorder.watch.allow_drawn()
    return recorder.commit(step, number, ())
