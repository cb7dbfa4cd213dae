"""The types `int` and `range` while a model is recorded: both would make plain numbers of live ones.

A graph would keep what the example had, as the batch size in ``int(windows.shape[0] / count)``. So in the
Python modules of users' code where that was seen to happen, the name `int` stands for a type of ours while
the model is recorded once more. A loop over ``range(x.shape[1])`` becomes as many steps as the example has; a
graph that is given more must not leave out the rest, so it checks the size.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from pdp_fx.tracing.reads import counted
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, replaced
from pdp_fx.tracing.sizes import Live, live, plain
from pdp_fx.tracing.steps import Expr


class _StandIn(type):
    """The type of something that is, to those who ask, another type, and is called in our way."""

    original: type
    call: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.call(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def _stand_in(original: type, call: Callable[..., Any]) -> Any:
    return _StandIn(original.__name__, (), {"original": original, "call": staticmethod(call)})


@contextmanager
def casting(recorder: Recorder) -> Generator[None, None, None]:
    """Keep live numbers alive in `int(...)` where that is known to be needed; note those in `range(...)`."""
    names = [known for known in (recorder.findings.casts or {}).values() if "int" not in known]
    checked = _stand_in(range, _checked_range(recorder))
    with entries((known, "int", _LIVE_INT) for known in names), replaced(builtins, "range", checked):
        yield


def _to_int(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and isinstance(number := args[0], Live) and number.session.open:
        if isinstance(number, int):
            return number
        return live(int(plain(number)), Expr(int, (number.value,)), number.session)
    return int(*args, **kwargs)


_LIVE_INT = _stand_in(int, _to_int)


def _checked_range(recorder: Recorder) -> Callable[..., Any]:
    original = range

    def call(*args: Any) -> range:
        for number in args:
            if isinstance(number, Live) and number.session is recorder.session:
                counted(recorder, number)
        return original(*(plain(number) for number in args))

    return call
