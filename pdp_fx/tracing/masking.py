"""Masks that do nothing if they mask nothing.

``if not padding.any(): padding = None``, or ``if kept.all(): kept = None``, depends on data, but only to
save work: where nothing is padded, a model that goes on with the mask computes the same as one that goes on
without. A recording of the model that is told that nothing is masked has fewer steps; here it is shown of
each step more that it changes nothing, by what an operation makes of zeros and ones, whatever other masks
are: ``x.masked_fill(mask, 0)`` and ``x * (1 - mask)`` are x.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from pdp_fx.tracing.align import kind_of_step
from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.selecting import LOOKS
from pdp_fx.tracing.skipping import differences
from pdp_fx.tracing.steps import CHECKS, Recording, Step, with_steps


def is_as_without(full: Recording, other: Recording, number: int) -> bool:
    """Whether a recording does what another one does, provided that a mask masks nothing.

    Args:
        full: a recording that goes on with the mask.
        other: one that was told that it masks nothing.
        number: that of the mask, as in `Asked`.
    """
    asked = [[(each.source, each.number) for each in recording.asked] for recording in (full, other)]
    if not set(asked[0]).issuperset(asked[1]):
        return False
    steps, others = ([s for s in each.steps if s.target not in CHECKS] for each in (full, other))
    known, pairs, done = _Known(), dict[Step, Step](), 0
    for step in steps:
        known.learn(step, step.selects if abs(step.selects) == number else 0)
        if done < len(others) and known.is_same(step, others[done], pairs):
            if not known.outlasts(step) or step.selects != others[done].selects:
                return False
            pairs[others[done]] = step
            done += 1
        elif not known.is_idle(step):
            return False
    return done == len(others) and known.agree(full.output, other.output, pairs)


class _Known:
    """What is known of the values of a recording: all 0, all 1, or the same as another value."""

    def __init__(self) -> None:
        self._numbers: dict[Step, int] = {}
        self._same: dict[Step, Step] = {}
        self._shaped: dict[tuple[Step, tuple[int, ...] | None], Step] = {}

    def resolved(self, value: Any) -> Any:
        """The value that a value is the same as, also inside a structure."""
        return with_steps(self._resolved, value)

    def _resolved(self, step: Step) -> Step:
        while step in self._same:
            step = self._same[step]
        return step

    def number(self, value: Any) -> float | None:
        """The finite number that all elements of a value are, if that is known."""
        if isinstance(value, bool | int | float):
            return value if math.isfinite(value) else None
        return self._numbers.get(value) if isinstance(value, Step) else None

    def learn(self, step: Step, selects: int) -> None:
        """Find what a step gives; if it makes a mask which selects nothing, ``selects`` is as in `Step`."""
        if selects:
            self._numbers[step] = int(selects < 0)
            return
        name, args = _name(step), step.args
        if name in _RESHAPES:
            whole = self._reshaped(step)
            if whole is not None:
                self._same[step] = whole
                return
        applies = name in _RULES and len(args) >= _NEEDED.get(name, 2)
        if not applies or (step.kwargs and name not in _LOOKS and name not in _MAKES):
            return
        if name == "where" and step.op == "call_method":
            args = args[1], args[0], args[2]
        found = _RULES[name](self, *args)
        if found is None:
            return
        number = self.number(found)
        if number in (0, 1):
            self._numbers[step] = int(number)
        elif isinstance(found, Step) and (found.shape, found.dtype) == (step.shape, step.dtype):
            self._same[step] = self.resolved(found)

    def _reshaped(self, step: Step) -> Step | None:
        """The value of which a step only puts the numbers, in their order, into its old shape again."""
        source = step
        while isinstance(source, Step) and _name(source) in _RESHAPES:
            source = self.resolved(source.args[0])
        if not isinstance(source, Step) or source in self._numbers:
            return None
        found = source if source.shape == step.shape else self._shaped.setdefault((source, step.shape), step)
        return None if found is step else found

    def is_same(self, step: Step, other: Step, pairs: Mapping[Step, Step]) -> bool:
        """Whether a step does the same as one of the other recording."""
        mine, theirs = step, other
        if step.called == other.called == "scaled_dot_product_attention":
            mine, theirs = (self._without_mask(each) for each in (step, other))
        elif step.called == "baddbmm" and other.called == "bmm" and self.number(step.args[0]) == 0:
            mine = Step(step.op, other.target, step.args[1:], step.kwargs, step.scope, step.source)
        if kind_of_step(mine) != kind_of_step(theirs):
            return False
        return self.agree((mine.args, mine.kwargs), (theirs.args, theirs.kwargs), pairs)

    def agree(self, mine: Any, theirs: Any, pairs: Mapping[Step, Step]) -> bool:
        """Whether a structure of values is that of the other recording."""
        return next(differences(self.resolved(mine), theirs, pairs), None) is None

    def outlasts(self, step: Step) -> bool:
        """Whether what is known stays true after a step that both have; changed numbers are forgotten."""
        self._same.pop(step, None)
        changed = set(map(_memory, step.changes))
        if changed and not changed.isdisjoint(
            _memory(value) for pair in self._same.items() for value in pair
        ):
            return False
        if changed:
            self._numbers = {each: n for each, n in self._numbers.items() if _memory(each) not in changed}
            self._shaped = {key: each for key, each in self._shaped.items() if _memory(each) not in changed}
        return True

    def is_idle(self, step: Step) -> bool:
        """Whether a step can be left out if nothing that is not left out uses its result.

        What it changes in place must stay the same.
        """
        if step.op not in ("call_function", "call_method") or step.random or step.updates or step.reason:
            return False
        if step.called == "setitem":
            return any(_is_boolean(mask) and self.number(mask) == 0 for mask in all_values(step.args[1]))
        return all(self._stays(step, value) for value in step.changes)

    def _stays(self, step: Step, changed: Any) -> bool:
        if step in self._numbers:
            return self.number(changed) == self._numbers[step]
        return step in self._same and self.resolved(step) is self.resolved(changed)

    def _without_mask(self, step: Step) -> Step:
        """Attention without a mask that lets everything see everything: True, or 0 to be added."""
        args, kwargs = list(step.args), dict(step.kwargs)
        mask = args[3] if len(args) > 3 else kwargs.pop("attn_mask", None)
        if mask is not None and self.number(mask) != int(_is_boolean(mask)):
            return step
        if len(args) > 3:
            args[3] = None
        if args[3:] == [None]:
            del args[3]
        return Step(step.op, step.target, tuple(args), kwargs, step.scope, step.source)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, Step) and value.boolean


def _name(step: Step) -> str:
    return step.called.strip("_")


def _memory(value: Any) -> Any:
    """The step that has made the memory which a value may lie in."""
    while isinstance(value, Step) and value.args and (_name(value) in _LOOKS or value.changes):
        value = value.args[0]
    return value


Rule = Callable[..., Any]
"""What an operation gives, if it is known: a number, or one of its operands."""


def _made(name: str) -> Rule:
    return lambda *_: _MAKES[name]


def _look(known: _Known, x: Any, *_: Any) -> Any:
    return known.number(x)


def _opposite(known: _Known, x: Any, *_: Any) -> Any:
    number = known.number(x)
    return None if number is None else int(not number)


def _inverted(known: _Known, x: Any, *_: Any) -> Any:
    return _opposite(known, x) if _is_boolean(x) else None


def _negative(known: _Known, x: Any, *_: Any) -> Any:
    return 0 if known.number(x) == 0 else None


def _sum(known: _Known, x: Any, y: Any, *_: Any) -> Any:
    numbers = known.number(x), known.number(y)
    return x if numbers[1] == 0 else y if numbers[0] == 0 else None


def _difference(known: _Known, x: Any, y: Any, *_: Any) -> Any:
    one, other = known.number(x), known.number(y)
    return x if other == 0 else one - other if one is not None and other is not None else None


def _product(known: _Known, x: Any, y: Any, *_: Any) -> Any:
    one, other = known.number(x), known.number(y)
    if one is not None and other is not None:
        return one * other
    return x if other == 1 else y if one == 1 else None


def _joined(neutral: int) -> Rule:
    """The rule of an operation on booleans, which gives one operand if the other is ``neutral``, else that.

    Of other numbers it makes something else.
    """

    def rule(known: _Known, x: Any, y: Any, *_: Any) -> Any:
        for one, other in ((x, y), (y, x)):
            number = known.number(other)
            if number is not None and _is_boolean(one):
                return one if number == neutral else number
        return None

    return rule


def _chosen(known: _Known, condition: Any, x: Any, y: Any, *_: Any) -> Any:
    number = known.number(condition)
    return None if number is None else x if number else y


def _filled(known: _Known, x: Any, mask: Any, *_: Any) -> Any:
    return x if known.number(mask) == 0 else None


def _compared(name: str) -> Rule:
    def rule(known: _Known, x: Any, y: Any, *_: Any) -> Any:
        one, other = known.number(x), known.number(y)
        return None if one is None or other is None else int(getattr(operator, name)(one, other))

    return rule


_LOOKS = LOOKS.union(
    "expand expand_as broadcast_to repeat movedim swapaxes unflatten getitem".split(),
    "type type_as float double half bfloat16 int long".split(),
)
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"})
_MAKES = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_LOOKS, _look),
    **{name: _made(name) for name in _MAKES},
    **dict.fromkeys(("bitwise_not", "invert"), _inverted),
    **dict.fromkeys(("add", "iadd", "radd"), _sum),
    **dict.fromkeys(("sub", "isub", "subtract"), _difference),
    **dict.fromkeys(("mul", "imul", "rmul", "multiply"), _product),
    **dict.fromkeys(("logical_and", "bitwise_and", "and", "iand"), _joined(1)),
    **dict.fromkeys(("logical_or", "bitwise_or", "or", "ior"), _joined(0)),
    **{name: _compared(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "rsub": lambda known, x, y, *_: _difference(known, y, x),
    "logical_not": _opposite,
    "neg": _negative,
    "any": _look,
    "where": _chosen,
    "masked_fill": _filled,
    "masked_scatter": _filled,
}
_NEEDED = {
    **dict.fromkeys((*_LOOKS, "logical_not", "bitwise_not", "invert", "neg", "any"), 1),
    **dict.fromkeys(_MAKES, 0),
    "where": 3,
}
"""How many arguments an operation must be given by position for its rule to apply."""
