"""Checks that turn a given value into a field of a frozen dataclass, or into a `SpecError` that names it."""

import difflib
import math
import numbers
from collections.abc import Iterable

from pdp_fx.errors import SpecError


def finite_number(what: str, value: object) -> float:
    """`value` as a float; `SpecError` naming `what` if it is not a finite real number (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpecError(f"{what} must be a number, got {described(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SpecError(f"{what} must be finite, got {described(value)}")
    return number


def whole_number(what: str, value: object, minimum: int) -> int:
    """`value` as an int; `SpecError` naming `what` if it is not a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise SpecError(f"{what} must be a whole number, got {described(value)}")
    if value < minimum:
        raise SpecError(f"{what} must be {minimum} or more, got {value}")
    return int(value)


def one_of(what: str, value: object, options: tuple[str, ...]) -> str:
    """`value` if it is one of `options`, else a `SpecError` naming `what`, them and the closest one."""
    if isinstance(value, str) and value in options:
        return value
    accepted = " or ".join(repr(option) for option in options)
    raise SpecError(f"{what} must be {accepted}, got {described(value)}{did_you_mean(value, options)}")


def truth(what: str, value: object) -> bool:
    """`value` if it is True or False, else a `SpecError` naming `what`."""
    if isinstance(value, bool):
        return value
    raise SpecError(f"{what} must be True or False, got {described(value)}")


def refuse_uncallable(what: str, value: object) -> None:
    """Raise a `SpecError` naming `what` unless `value` can be called or is None."""
    if value is not None and not callable(value):
        raise SpecError(f"{what} must be a function, got {described(value)}")


def did_you_mean(word: object, options: Iterable[str], most: int = 1) -> str:
    """The end of a sentence: `; did you mean 'x'?` with the options closest to `word`, else nothing."""
    close = difflib.get_close_matches(str(word), list(options), n=most)
    return f"; did you mean {' or '.join(repr(option) for option in close)}?" if close else ""


def described(value: object) -> str:
    """`value` and its type as an error message shows them, cut to a readable length."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def store(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass while it is being built."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
