"""Numbers that remember how they were computed.

Reading `x.shape[1]` while recording gives a `LiveInt`: an `int` in every respect, with the expression
`x.size(1)` beside it. Arithmetic keeps the expression going, so `x.shape[1] // 2` stays a computation in the
graph and batch size stays dynamic. A comparison gives a plain bool: the branch that the model took is the
branch in the graph, which therefore checks the comparison. `int(...)`, `float(...)` and NumPy make plain
numbers; the graph checks that they come from the same ones.
"""

import math
import operator
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdp_fx.tracing.expressions import only_says
from pdp_fx.tracing.source import is_users
from pdp_fx.tracing.steps import Expr, How, Value
from pdp_fx.tracing.structure import as_base

Casts = dict[tuple[int, str], dict[str, Any]]


@dataclass
class Session:
    """The recording that a live number belongs to.

    Attributes:
        decided: called with every comparison of live numbers in users' code, as it came out, and with how the
            code goes by it.
        selected: called with the expression of a number that users' code compares with 0; whether to go on as
            if it were not 0, or None to go by the number.
        open: whether the recording is still running; after it live numbers act like plain ones.
        decoy: which numbers have other digits; None if none has.
        compared: whether users' code compared live numbers with each other or with 1. For a batch of one such
            a comparison may be true by chance.
        cast_in: the globals of users' code that called `int` or `float` on a live number or on a
            tensor, by the id of the globals and the name of the type.
    """

    decided: Callable[[Expr, How], None]
    selected: Callable[[Value], bool | None] = lambda _: None
    open: bool = True
    decoy: "Decoy | None" = None
    compared: bool = False
    cast_in: Casts = field(default_factory=dict[tuple[int, str], dict[str, Any]])

    def note_cast(self, kind: type, names: dict[str, Any]) -> None:
        """Note that code with these globals makes a plain number of this kind of one that it was given."""
        self.cast_in[id(names), kind.__name__] = names


class Place(NamedTuple):
    """Where a model reads numbers.

    Attributes:
        source: the line of the model's code, `file.py:line`.
        call: the method of the tensor that is read, such as "size".
        axis: which of the numbers; 0 of a single one.
    """

    source: str
    call: str
    axis: int


def given_as(name: str) -> Place:
    """The place of a number that is given as the argument with this name."""
    return Place(name, "given", 0)


class Decoy:
    """Which live numbers have other digits, which none of their methods shows (`pdp_fx.tracing.decoys`).

    What is added to digits is far out of the range of lists, and another amount for each number: what two
    are off by may cancel out.

    Args:
        sign: 1 or -1, that of what is added.
        most: how many steps the recording may have.
        places: where the hidden numbers are read; None if everywhere. Those computed with them are, too.

    Attributes:
        met: the places so far.
        most: as given.
    """

    def __init__(self, sign: int, most: int, places: Container[Place] | None = None) -> None:
        self.most = most
        self.met: dict[Place, None] = {}
        self._sign, self._places = sign, places
        self._added: dict[int, tuple[Value, int]] = {}

    def meet(self, place: Place, value: Value) -> None:
        """Hide the number with this expression that is read at a place, if those there are hidden."""
        self.met[place] = None
        if self._places is None or place in self._places:
            self._hide(value)

    def added(self, value: Value) -> int:
        """What is added to the digits of the number with this expression; 0 if it is not hidden."""
        operands = value.args if isinstance(value, Expr) else ()
        if id(value) not in self._added and any(id(each) in self._added for each in operands):
            self._hide(value)
        return self._added[id(value)][1] if id(value) in self._added else 0

    def _hide(self, value: Value) -> None:
        number = len(self._added)
        self._added[id(value)] = value, self._sign * (1009 * (1 + number % 5) + 2 * number)


_OVER = Session(lambda _expression, _how: None, open=False)
"""That of numbers which code makes of the type of a live one, as in ``type(size)(3)``; they are plain."""


class LiveInt(int):
    """An int with the expression that computes it.

    Attributes:
        value: the expression.
        session: the recording that it belongs to.
        number: the number, if its own digits are a decoy.
    """

    value: Value
    session: Session = _OVER
    number: int | None = None


class LiveFloat(float):
    """A float with the expression that computes it, and the attributes of a `LiveInt`."""

    value: Value
    session: Session = _OVER
    number: float | None = None


Live = LiveInt | LiveFloat


class YieldingFloat(float):
    """A plain float that leaves it to a live number to compute with the two (`pdp_fx.tracing.yielding`).

    A float has the first word in ``0.5 * size``, and would take the size for a plain number.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def is_plain(value: Any) -> bool:
    """Whether a value is an int or a float that is not live, be it NumPy's, and no truth value."""
    return type(as_base(value)) in (int, float, YieldingFloat)


def live(number: Any, value: Value, session: Session) -> Any:
    """The number with its expression; anything but an int or a float is returned as it is."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    added = session.decoy.added(value) if session.decoy is not None else 0
    made: Any = LiveInt(number + added) if isinstance(number, int) else LiveFloat(number + 1.37 * added)
    made.number = number if added else None
    made.value = value
    made.session = session
    return made


def plain(number: Any) -> Any:
    """The number without its expression; anything else is returned as it is."""
    if isinstance(number, Live) and number.number is not None:
        return number.number
    if isinstance(number, LiveInt):
        return int.__int__(number)
    if isinstance(number, LiveFloat | YieldingFloat):
        return float.__float__(number)
    return number


def value_of(number: Any, session: Session) -> Any:
    """The expression of a number that is live in this session; anything else as a plain number."""
    if isinstance(number, Live) and number.session is session:
        return number.value
    return as_base(plain(number))


# `size + 0` and the like need no node of their own.
_NEUTRAL_RIGHT = {operator.add: 0, operator.sub: 0, operator.mul: 1, operator.floordiv: 1, operator.pow: 1}
_NEUTRAL_LEFT = {operator.add: 0, operator.mul: 1}


def _is(number: Any, neutral: int | None) -> bool:
    return type(number) is int and number == neutral


def computed(call: Callable[..., Any], session: Session, *numbers: Any) -> Any:
    """The result of arithmetic; code that catches an error of it goes by these numbers."""
    try:
        return call(*map(plain, numbers))
    except (ArithmeticError, ValueError):
        if session.open:
            note_fixed(numbers, session)
        raise


def _binary(call: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def combine(left: Any, right: Any, session: Session) -> Any:
        number = computed(call, session, left, right)
        if not session.open:
            return number
        return live(number, Expr(call, (value_of(left, session), value_of(right, session))), session)

    def repeated(self: Any, other: Any) -> Any:
        """Repeat a list, and let the graph check how often."""
        if call is not operator.mul or not isinstance(other, Sequence):
            return NotImplemented
        if _is_asked_by_user(self.session, 3):
            note_fixed((self,), self.session)
        return operator.mul(other, plain(self))

    def forward(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:
            if self.session.open:
                note_fixed((self, other, *modulus), self.session)
            return computed(pow, self.session, self, other, *modulus)
        if not isinstance(other, int | float):
            return repeated(self, other)
        if type(self) is LiveInt and _is(other, _NEUTRAL_RIGHT.get(call)):
            return self
        return combine(self, other, self.session)

    def reflected(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return repeated(self, other)
        if type(self) is LiveInt and _is(other, _NEUTRAL_LEFT.get(call)):
            return self
        return combine(other, self, self.session)

    return forward, reflected


def _unary(call: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, *args: Any) -> Any:
        number = computed(call, self.session, self, *args)
        if not self.session.open:
            return number
        return live(number, Expr(call, (value_of(self, self.session), *args)), self.session)

    return apply


_OPPOSITES: dict[Callable[[Any, Any], bool], Callable[[Any, Any], bool]] = {
    operator.eq: operator.ne,
    operator.ne: operator.eq,
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
}


def _comparison(call: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        other = as_base(other)
        if not isinstance(other, int | float):
            return NotImplemented
        answer = call(plain(self), plain(other))
        if _is_asked_by_user(self.session):
            way = _way(self, if_any(call, other))
            if way is not None:
                return way
            by_chance = isinstance(other, Live) or 1 in (plain(self), other)
            fact = call if answer else _OPPOSITES[call]
            how = How.COMPARED_WITH_NUMBER if not by_chance and other > 1 else How.COMPARED
            _note(self.session, fact, self, other, how, by_chance)
        return answer

    return compare


def if_any(compare: Callable[[Any, Any], bool], number: Any) -> bool | None:
    """What the comparison of a count with a number gives for every count but 0; None if it asks more."""
    if type(number) is not int or number not in (0, 1):
        return None
    for_none = compare(0, number)
    return None if any(compare(count, number) == for_none for count in (1, 2, 3)) else not for_none


def _way(self: Any, if_some: bool | None) -> bool | None:
    """What a question whether a number is 0 is answered where it counts what is selected; else None."""
    selected = None if if_some is None else self.session.selected(self.value)
    return None if selected is None else if_some == selected


def is_one(number: Any) -> bool:
    """Whether a size is 1, which torch asks to broadcast; the graph checks that of a live one."""
    answer: bool = plain(number) == 1
    if isinstance(number, Live):
        fact = operator.eq if answer else operator.ne
        _note(number.session, fact, number, 1, How.COMPARED, by_chance=True)
    return answer


def _truth(self: Any) -> bool:
    answer = bool(plain(self))
    if _is_asked_by_user(self.session):
        way = _way(self, True)
        if way is not None:
            return way
        _note(self.session, operator.ne if answer else operator.eq, self, 0, How.COMPARED, by_chance=True)
    return answer


def _is_integer(self: Any) -> bool:
    answer = plain(self).is_integer()
    if _is_asked_by_user(self.session):
        _note(self.session, operator.eq if answer else operator.ne, self % 1, 0, How.COMPARED)
    return answer


def _fixed(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method by which something is picked, as from a dict by hash: the graph checks the number."""

    def ask(self: Any, *args: Any) -> Any:
        if _is_asked_by_user(self.session) and not only_says(sys._getframe(1)):
            note_fixed((self,), self.session)
        return call(plain(self), *args)

    return ask


def _cast(kind: type) -> Callable[[Any], Any]:
    def cast(self: Any) -> Any:
        number = plain(self)
        if _is_asked_by_user(self.session):
            self.session.note_cast(kind, sys._getframe(1).f_globals)
            note_fixed((self,), self.session)
        return kind(number)

    return cast


def _ufunc(self: Any, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Compute as NumPy does, with plain numbers."""
    if self.session.open:
        note_fixed(args, self.session)
    return getattr(function, method)(*(plain(arg) for arg in args), **kwargs)


def note_fixed(numbers: Iterable[Any], session: Session) -> None:
    """Let the graph check that live numbers are the same, because plain numbers were made of them."""
    for number in numbers:
        if isinstance(number, Live) and number.session is session:
            _note(session, operator.eq, number, plain(number), How.MADE_PLAIN)


def _is_asked_by_user(session: Session, depth: int = 2) -> bool:
    """Whether users' code has called the method, ``depth`` frames up, that asks this.

    It does so by way of Python's `collections.abc`, too, as by ``size in sizes`` of a class of its own.
    """
    frame = sys._getframe(depth)
    while frame.f_code.co_filename == _ABSTRACT and frame.f_back is not None:
        frame = frame.f_back
    return session.open and is_users(frame.f_code.co_filename)


_ABSTRACT = Sequence.index.__code__.co_filename


def _note(
    session: Session,
    fact: Callable[[Any, Any], bool],
    left: Any,
    right: Any,
    how: How,
    by_chance: bool = False,
) -> None:
    session.compared |= by_chance
    session.decided(Expr(fact, (value_of(left, session), value_of(right, session))), how)


def _reduced(self: Any) -> tuple[Any, ...]:
    """A plain number for what writes it down; the graph checks that it comes from the same one."""
    number = plain(self)
    note_fixed((self,), self.session)
    return type(number), (number,)


def _copied(self: Any, _memo: Any = None) -> Any:
    return self if self.session.open else plain(self)


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _equip(kind: Any) -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        forward, reflected = _binary(getattr(operator, name))
        setattr(kind, f"__{name}__", forward)
        setattr(kind, f"__r{name}__", reflected)
    for name in ("neg", "pos", "abs"):
        setattr(kind, f"__{name}__", _unary(getattr(operator, name)))
    for call in (math.floor, math.ceil, math.trunc, round):
        setattr(kind, f"__{call.__name__}__", _unary(call))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(kind, f"__{name}__", _comparison(getattr(operator, name)))
    for call in (hash, repr, format):
        setattr(kind, f"__{call.__name__}__", _fixed(call))
    kind.__divmod__ = _divmod
    kind.__reduce__ = _reduced
    kind.__copy__ = kind.__deepcopy__ = _copied
    kind.__bool__ = _truth
    kind.__int__ = _cast(int)
    kind.__float__ = _cast(float)
    kind.__array_ufunc__ = _ufunc


def _equip_integer(kind: Any) -> None:
    for name in ("and_", "or_", "xor", "lshift", "rshift"):
        forward, reflected = _binary(getattr(operator, name))
        setattr(kind, f"__{name.rstrip('_')}__", forward)
        setattr(kind, f"__r{name.rstrip('_')}__", reflected)
    kind.__invert__ = _unary(operator.invert)
    for call in (int.bit_length, int.bit_count):
        setattr(kind, call.__name__, _fixed(call))


def _yielding(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def compute(self: Any, *others: Any) -> Any:
        if any(isinstance(other, Live) for other in others):
            return NotImplemented
        number = method(self, *others)
        return YieldingFloat(number) if type(number) is float else number

    return compute


def _equip_yielding(kind: Any) -> None:
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    both = [f"__{side}{name}__" for name in arithmetic for side in ("", "r")]
    for name in (*both, "__neg__", "__pos__", "__abs__", "__round__"):
        setattr(kind, name, _yielding(name))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(kind, f"__{name}__", _yielding(f"__{name}__"))
    kind.__hash__ = float.__hash__


LiveFloat.is_integer = _is_integer
_equip(LiveInt)
_equip(LiveFloat)
_equip_integer(LiveInt)
_equip_yielding(YieldingFloat)
