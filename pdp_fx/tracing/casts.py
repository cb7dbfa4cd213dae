"""Python's own functions of numbers while a model is recorded: they would make plain numbers of live ones.

A graph would keep what the example had, as the batch size in ``int(windows.shape[0] / count)``. So `max`,
`math.sqrt` and the like are others while a model is recorded. `int` and `float` are types that code may ask
about, too, so there it is their names in the Python modules where users' code was seen to call them that
stand for types of ours, while the model is recorded once more. NumPy has numbers of its own: where it is
given live ones, the graph checks that they are the same. A loop over ``range(x.shape[1])`` becomes as many
steps as the example has; a graph that is given more must not leave out the rest, so it checks the size.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from pdp_fx.tracing.reads import counted
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, replaced
from pdp_fx.tracing.sizes import Live, Session, live, note_fixed, plain, value_of
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


_FUNCTIONS = {
    builtins: ("max", "min"),
    math: tuple(
        name
        for name, function in vars(math).items()
        # These ask the number itself.
        if inspect.isbuiltin(function) and name not in ("ceil", "floor", "trunc", "prod")
    ),
}
_OF_MANY = frozenset({max, min})
"""What does the same with the numbers of a sequence as with a sequence of numbers."""

_NUMPY = ("arange", "array", "asarray", "full", "linspace", "ones", "prod", "zeros")
"""What makes arrays of sizes; a live number itself sees to the element-wise functions."""


@contextmanager
def casting(recorder: Recorder) -> Generator[None, None, None]:
    """Keep live numbers alive in functions and, where that is known to be needed, in casts; check ranges."""
    known = (recorder.findings.casts or {}).items()
    casts = [(names, name, _CASTS[name]) for (_, name), names in known if name not in names]
    with ExitStack() as stack:
        stack.enter_context(entries(casts))
        stack.enter_context(replaced(builtins, "range", _stand_in(range, _checked_range(recorder))))
        stack.enter_context(replaced(math, "prod", _product))
        for home, functions in _FUNCTIONS.items():
            for name in functions:
                stack.enter_context(replaced(home, name, _alive(getattr(home, name), recorder.session)))
        for name in _NUMPY:
            stack.enter_context(replaced(np, name, _fixing(getattr(np, name), recorder.session)))
        yield


def _fixing(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if session.open:
            note_fixed(tree_leaves((args, kwargs)), session)
        return function(*args, **kwargs)

    return call


def _product(numbers: Iterable[Any], /, *, start: Any = 1) -> Any:
    """`math.prod`, by multiplications, each of which is live where its numbers are."""
    return functools.reduce(operator.mul, numbers, start)


def _alive(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A function of numbers, or of one sequence of them, whose result is live where one of them is."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        sequence = None
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], torch.Tensor):
            sequence = tuple(args[0])
            args = (sequence,)
        leaves = tree_leaves((args, kwargs))
        if not session.open or not any(isinstance(leaf, Live) for leaf in leaves):
            return function(*args, **kwargs)
        numbers = args if sequence is None else sequence
        if (
            kwargs
            or (sequence is not None and function not in _OF_MANY)
            or any(not isinstance(number, int | float) for number in numbers)
        ):
            note_fixed(leaves, session)
            return function(*args, **kwargs)
        if sequence is not None and len(sequence) == 1:
            return sequence[0]
        result = function(*(plain(number) for number in numbers))
        if isinstance(result, bool) or not isinstance(result, int | float):
            note_fixed(leaves, session)
        return live(result, Expr(function, tuple(value_of(number, session) for number in numbers)), session)

    return call


def _to(kind: type) -> Any:
    def cast(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(number := args[0], Live) and number.session.open:
            if isinstance(number, kind):
                return number
            return live(kind(plain(number)), Expr(kind, (number.value,)), number.session)
        return kind(*args, **kwargs)

    return _stand_in(kind, cast)


_CASTS = {"int": _to(int), "float": _to(float)}


def _checked_range(recorder: Recorder) -> Callable[..., Any]:
    original = range

    def call(*args: Any) -> range:
        steps = original(*(plain(number) for number in args))
        numbers = [*args]
        if len(args) == 3 and _is_of(args[1], recorder) and len(steps) and plain(args[2]) > 1:
            # Where the last step ends is up to what is done in it.
            numbers[1] = -((args[0] - args[1]) // plain(args[2]))
        for number in numbers:
            if _is_of(number, recorder):
                counted(recorder, number)
        return steps

    return call


def _is_of(number: Any, recorder: Recorder) -> bool:
    return isinstance(number, Live) and number.session is recorder.session
