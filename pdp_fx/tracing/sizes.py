"""Numbers that remember how they were computed.

Reading `x.shape[1]` while recording gives a `LiveInt`: an `int` in every respect, with the expression `x.size(1)`
beside it. Arithmetic keeps the expression going, so `x.shape[1] // 2` stays a computation in the graph and batch size
stays dynamic. A comparison gives a plain bool: the branch that the model took is the branch in the graph. So does
`int(...)` give a plain number, because Python insists on it.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

from pdp_fx.tracing.steps import Expr, Value


class LiveInt(int):
    """An int with the expression that computes it."""

    value: Value

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class LiveFloat(float):
    """A float with the expression that computes it."""

    value: Value

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


Live = LiveInt | LiveFloat


def live(number: Any, value: Value) -> Any:
    """The number with its expression; anything but an int or a float is returned as it is."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    made = LiveInt(number) if isinstance(number, int) else LiveFloat(number)
    made.value = value
    return made


def plain(number: Any) -> Any:
    """The number without its expression; anything else is returned as it is."""
    if isinstance(number, LiveInt):
        return int.__int__(number)
    if isinstance(number, LiveFloat):
        return float.__float__(number)
    return number


def value_of(number: Any) -> Any:
    """The expression of a live number; anything else is returned as it is."""
    return number.value if isinstance(number, Live) else number


_NEUTRAL = {operator.add: 0, operator.sub: 0, operator.mul: 1, operator.floordiv: 1, operator.pow: 1}


def _binary(call: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        if isinstance(self, int) and type(other) is int and _NEUTRAL.get(call) == other:
            return self
        return live(call(plain(self), plain(other)), Expr(call, (value_of(self), value_of(other))))

    def reflected(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        if isinstance(self, int) and type(other) is int and (call, other) in ((operator.add, 0), (operator.mul, 1)):
            return self
        return live(call(plain(other), plain(self)), Expr(call, (value_of(other), value_of(self))))

    return forward, reflected


def _unary(call: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self: live(call(plain(self)), Expr(call, (value_of(self),)))


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _round(self: Any, digits: int | None = None) -> Any:
    return live(round(plain(self), digits), Expr(round, (value_of(self), digits)))


def _equip(kind: Any) -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        forward, reflected = _binary(getattr(operator, name))
        setattr(kind, f"__{name}__", forward)
        setattr(kind, f"__r{name}__", reflected)
    for name in ("neg", "pos", "abs"):
        setattr(kind, f"__{name}__", _unary(getattr(operator, name)))
    for call in (math.floor, math.ceil, math.trunc):
        setattr(kind, f"__{call.__name__}__", _unary(call))
    kind.__divmod__ = _divmod
    kind.__round__ = _round


_equip(LiveInt)
_equip(LiveFloat)
