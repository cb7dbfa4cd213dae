"""Replacements for Python's functions of numbers while a model is recorded, which keep live numbers alive.

The originals return plain numbers, so the graph would keep those of the example, such as the batch size in
``int(windows.shape[0] / count)``.

* `max`, `math.sqrt` and the like are replaced while a model is recorded, in `math` and where the files of the
  model's classes import them from it.
* `int` and `float` are also types that code may test for, so they are replaced only in the globals of code
  that was seen to call them on live numbers or on tensors, and the model is recorded again.
* NumPy makes plain numbers of live ones; the graph checks that these are the same.
* What `torch.finfo` says of the dtype of a tensor, such as ``torch.finfo(scores.dtype).min``, is asked again
  in the graph, for the tensor has another dtype under autocast or in a model that was cast.
* A loop over ``range(x.shape[1])`` becomes as many steps as in the example, so the graph checks the size.
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
from torch.utils._pytree import tree_leaves, tree_map

from pdp_fx.tracing.reads import counted
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, replaced, wherever_named
from pdp_fx.tracing.sizes import Live, Session, computed, live, note_fixed, plain, value_of
from pdp_fx.tracing.steps import Expr, is_data


class _StandIn(type):
    """The metaclass of stand-ins for a type: equal to it in type tests, but a call runs our function."""

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


_FUNCTIONS = frozenset({max, min}) | {
    function
    for name, function in vars(math).items()
    # These call a method of the number, which a live number defines.
    if inspect.isbuiltin(function) and name not in ("ceil", "floor", "trunc")
}
_OF_MANY = frozenset({max, min})
"""Functions that take several numbers or one sequence of numbers."""

_PLAIN = frozenset({int, float, type, np.ndarray})
"""The classes of what cannot be or hold a live number."""

_NUMPY = ("arange", "array", "asarray", "full", "linspace", "ones", "prod", "zeros")
"""Functions that make arrays from sizes; element-wise functions are handled by `LiveInt.__array_ufunc__`."""


@contextmanager
def casting(recorder: Recorder) -> Generator[None, None, None]:
    """Replace the functions of numbers, the casts that are known to need it, and `range` inside the block."""
    known = (recorder.findings.casts or {}).items()
    kept = {kind.__name__: _to(kind, recorder) for kind in (int, float)}
    casts = [(names, name, kept[name]) for (_, name), names in known if name not in names]
    alive = {function: _alive(function, recorder.session) for function in _FUNCTIONS} | {math.prod: _product}
    limits = _stand_in(torch.finfo, _limits_of(recorder))
    kinds, homes = map(type, recorder.model.modules()), (math.__dict__, builtins.__dict__, torch.__dict__)
    functions = wherever_named([*alive.items(), (torch.finfo, limits)], kinds, *homes)
    with ExitStack() as stack:
        stack.enter_context(entries([*casts, *functions]))
        stack.enter_context(replaced(builtins, "range", _stand_in(range, _checked_range(recorder))))
        for name in _NUMPY:
            stack.enter_context(replaced(np, name, _fixing(getattr(np, name), recorder.session)))
        yield


def _fixing(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # NumPy calls them itself, many times, for the state of its generator.
        if all(type(each) in _PLAIN for each in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if session.open:
            note_fixed(tree_leaves((args, kwargs)), session)
        args, kwargs = tree_map(plain, (args, kwargs))
        return function(*args, **kwargs)

    return call


def _product(numbers: Iterable[Any], /, *, start: Any = 1) -> Any:
    """`math.prod` by multiplications, so that the product of live numbers is live."""
    return functools.reduce(operator.mul, numbers, start)


def _alive(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A function of numbers, or of a sequence of numbers, whose result is live if one of the numbers is."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        sequence = None
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], torch.Tensor):
            sequence = tuple(args[0])
            args = (sequence,)
        key = kwargs.get("key")
        if key is not None and session.open:
            note_fixed([key(item) for item in (args if sequence is None else sequence)], session)
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
            args = tree_map(plain, args)
            return function(*args, **kwargs)
        if sequence is not None and len(sequence) == 1:
            return sequence[0]
        result = computed(function, session, *numbers)
        if isinstance(result, bool) or not isinstance(result, int | float):
            note_fixed(leaves, session)
        return live(result, Expr(function, tuple(value_of(number, session) for number in numbers)), session)

    return call


def _to(kind: type, recorder: Recorder) -> Any:
    def cast(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and _holds_a_number(args[0], recorder):
            args = (args[0].item(),)
            if isinstance(args[0], torch.Tensor) and kind is float:
                # A random number, which stays a tensor.
                return args[0].double()
        if len(args) == 1 and isinstance(number := args[0], Live) and number.session.open:
            if isinstance(number, kind):
                return number
            return live(kind(plain(number)), Expr(kind, (number.value,)), number.session)
        return kind(*args, **kwargs)

    return _stand_in(kind, cast)


def _holds_a_number(tensor: torch.Tensor, recorder: Recorder) -> bool:
    """Whether a tensor is one number that depends on data; of others the graph checks what they are."""
    with recorder.silent():
        single = tensor.numel() == 1
    return single and is_data(recorder.origins.known(tensor))


def _checked_range(recorder: Recorder) -> Callable[..., Any]:
    original = range

    def call(*args: Any) -> range:
        steps = original(*(plain(number) for number in args))
        numbers = [*args]
        if len(args) == 3 and _is_of(args[1], recorder) and len(steps) and plain(args[2]) > 1:
            # Only the number of steps is checked: where the last one ends is decided by the body of the loop.
            numbers[1] = -((args[0] - args[1]) // plain(args[2]))
        for number in numbers:
            if _is_of(number, recorder):
                counted(recorder, number)
        return steps

    return call


class _Limits:
    """What `torch.finfo` says of the dtype of a tensor; its numbers are live."""

    def __init__(self, found: torch.finfo, value: Expr, session: Session) -> None:
        self._found, self._value, self._session = found, value, session

    def __getattr__(self, name: str) -> Any:
        return live(getattr(self._found, name), Expr(getattr, (self._value, name)), self._session)


def _limits_of(recorder: Recorder) -> Callable[..., Any]:
    original = torch.finfo

    def call(*args: Any, **kwargs: Any) -> Any:
        limits = original(*args, **kwargs)
        open_ = recorder.session.open and not recorder.inside
        followed = recorder.dtypes.followed(args, kwargs, len(recorder.steps)) if open_ else {}
        if not followed:
            return limits
        return _Limits(limits, Expr(original, tuple(followed.values())), recorder.session)

    return call


def _is_of(number: Any, recorder: Recorder) -> bool:
    return isinstance(number, Live) and number.session is recorder.session
