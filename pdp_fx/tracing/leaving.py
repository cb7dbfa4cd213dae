"""What a model leaves in the lists, dicts and objects that it is given, which its caller sees after the call.

Models hand results back so: a matcher adds its features to the dict of a batch, a cache grows, an element of
a list is replaced. A recording shows only what is computed. The graph puts it there at its end, when it has
read all that it needs of its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pdp_fx.tracing.shapes import reached
from pdp_fx.tracing.steps import Expr, Scope, Step, UnrecordableError, Value
from pdp_fx.tracing.structure import BASE_TYPES, are_one, children, slots

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

PUTS = operator.setitem, setattr
"""The functions that a graph puts something in an input with."""

Parts = dict[Any, Any]
"""What is in a list, a dict or an object, by places, keys or names."""


class Leavings:
    """What the inputs of a run hold before it.

    Args:
        recorder: of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: dict[int, tuple[Any, Value, Parts]] = {}

    def watch(self, value: Value, example: Any) -> None:
        """Note what an input holds.

        Args:
            value: how to reach a part of the input.
            example: the part.
        """
        if isinstance(example, (torch.Tensor, *BASE_TYPES)) or id(example) in self._before:
            return
        self._before[id(example)] = example, value, _parts(example)
        for inner, part in reached(value, example):
            self.watch(inner, part)

    def settle(self) -> None:
        """Add the steps that leave in the inputs what the run has left there.

        Raises:
            UnrecordableError: that is something which a graph cannot hold.
        """
        for thing, value, before in self._before.values():
            for function, *args in _changes(thing, value, before, _parts(thing)):
                given = (*args[:2], *map(self._left, args[2:]))
                step = Step("call_function", function, given, {}, Scope(""), "", observed=True)
                self._recorder.steps.append(step)

    def _left(self, part: Any) -> Any:
        try:
            return self._recorder.arguments.output(part)
        except UnrecordableError as err:
            raise UnrecordableError(f"leaves something in an input: it {err.reason}") from err


def _parts(thing: Any) -> Parts:
    return {key: part for _, key, part in children(thing)}


def _changes(thing: Any, value: Value, before: Parts, after: Parts) -> Iterator[tuple[Any, ...]]:
    """The calls, without a result, that make a thing hold what it holds after a run."""
    if isinstance(thing, list):
        if len(before) != len(after) or not all(map(are_one, before.values(), after.values())):
            yield operator.setitem, value, slice(None), list(after.values())
        return
    kept = [key for key in before if key in after]
    # What is deleted and put back comes behind all else.
    again = set[Any]() if kept == [key for key in after if key in before] else set(kept)
    for key in before:
        if key not in after or key in again:
            yield (*_access(thing, value, key)[1:], key)
    for key, part in after.items():
        if key not in before or key in again or not are_one(before[key], part):
            put, _, table = _access(thing, value, key)
            yield put, table, key, part


def _access(thing: Any, value: Value, key: Any) -> tuple[Any, Any, Value]:
    """What puts something at a key of a dict or object, what deletes it, and what both are given first."""
    if isinstance(thing, Mapping):
        return operator.setitem, operator.delitem, value
    if key in slots(type(thing)):
        return setattr, delattr, value
    # What a class does when an attribute is set is done already.
    return operator.setitem, operator.delitem, Expr(getattr, (value, "__dict__"))
