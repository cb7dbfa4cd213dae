"""Numbers that code which is not looked into returns, as what the graph reads of its results.

Such a number is a constant of the graph, which checks it, as long as it is the same for inputs of other sizes
(`unseen`). If it is not, such as the sizes of the pictures that a part has scaled, it becomes a live number.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pdp_fx.tracing.shapes import reached
from pdp_fx.tracing.sizes import is_plain, plain
from pdp_fx.tracing.steps import Expr, Step, Value
from pdp_fx.tracing.structure import BASE_TYPES, LiveShape, as_base, children, is_namedtuple

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

_log = logging.getLogger(__name__)


def followed(recorder: Recorder, step: Step, result: Any) -> tuple[Any, list[Step]]:
    """What a step returns with live numbers, and the steps that read them, in copies of what holds them.

    Args:
        recorder: the recorder.
        step: a call of code that is not looked into.
        result: what it has returned. Truth values stay what they are.
    """
    reading = _Reading(recorder, step)
    return reading.followed(step, result, frozenset()), reading.steps


def has_numbers(value: Any, beside: Callable[[Any], bool], around: frozenset[int] = frozenset()) -> bool:
    """Whether there is an int or a float in a structure, without those things that are ``beside`` it."""
    if isinstance(value, (*BASE_TYPES, np.generic, torch.Tensor)):
        return is_plain(value)
    if id(value) in around or beside(value):
        return False
    return any(has_numbers(part, beside, around | {id(value)}) for _, _, part in children(value))


class _Reading:
    def __init__(self, recorder: Recorder, step: Step) -> None:
        self.steps: list[Step] = []
        self._recorder, self._step = recorder, step

    def followed(self, value: Value, found: Any, around: frozenset[int]) -> Any:
        """A part of the result with live numbers in the place of plain ones.

        Args:
            value: what it is in the graph.
            found: what it is in this run.
            around: the containers and objects that it is in.
        """
        if is_plain(found):
            return self._live(value, plain(as_base(found)))
        beside = isinstance(found, (*BASE_TYPES, torch.Tensor, nn.Module)) or id(found) in around
        if beside or self._recorder.origins.is_kept(found):
            return found
        within = around | {id(found)}
        parts = [self.followed(inner, part, within) for inner, part in reached(value, found)]
        if all(part is inner for part, (_, _, inner) in zip(parts, children(found), strict=True)):
            return found
        try:
            made = _with_parts(found, parts)
        except Exception as err:  # noqa: BLE001 a class may refuse to be copied
            _log.info("numbers in a %s are not followed: %s", type(found).__name__, err)
            return found
        self._recorder.origins.note_copy(made, found)
        return made

    def _live(self, value: Value, number: float) -> Any:
        target, args = (value.call, value.args) if isinstance(value, Expr) else (operator.pos, (value,))
        made = Step("call_function", target, args, {}, self._step.scope, self._step.source)
        made.data, made.returned = False, True
        # What depends on numbers may decide no more than sizes that do.
        made.ragged = made.sized = self._step.reads_numbers or self._step.ragged
        self.steps.append(made)
        return self._recorder.returned(number, made, len(self.steps))


def _with_parts(whole: Any, parts: list[Any]) -> Any:
    """A copy of a container or object with these parts in the place of its own."""
    if isinstance(whole, torch.Size):
        return LiveShape(parts)
    if is_namedtuple(whole):
        return type(whole)(*parts)
    if isinstance(whole, tuple):
        return type(whole)(parts)
    made = copy.copy(whole)
    for (_, key, _), part in zip(children(whole), parts, strict=True):
        if isinstance(whole, list | Mapping):
            made[key] = part
        else:
            object.__setattr__(made, key, part)
    return made
