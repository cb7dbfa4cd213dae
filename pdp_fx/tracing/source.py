"""Where a node comes from: the line of the user's code that made it."""

import contextlib
import dis
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from types import CodeType, FrameType
from typing import TypeVar

import torch

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, _OURS, contextlib.__file__)


_RUNNERS: dict[int, CodeType] = {}
"""The code objects of functions that run models, by their ids, for to hash one takes long.

Frames outside of these do not belong to a model.
"""

NO_LINE = "no user code"
"""What is said in the place of a line where there is none."""

Function = TypeVar("Function", bound=Callable[..., object])


def runs_model(function: Function) -> Function:
    """Mark a function that runs the model whose lines are looked for."""
    _RUNNERS[id(function.__code__)] = function.__code__
    return function


def runs_models(frame: FrameType) -> bool:
    """Whether a function that was marked with `runs_model` runs in a frame."""
    return id(frame.f_code) in _RUNNERS


@cache
def is_users(filename: str) -> bool:
    """Whether a file of code is no file of torch, pdp_fx, `contextlib`, or a part of Python that has none.

    What was typed into a notebook or a prompt has no file either, but a name such as `<ipython-input-1>`.
    """
    return not filename.startswith((*_SKIPPED, "<frozen ", "<__array_function__"))


def is_ours(filename: str) -> bool:
    """Whether a file of code belongs to pdp_fx."""
    return filename.startswith(_OURS)


def asker() -> FrameType:
    """The innermost frame of code outside pdp_fx: the model's own, or that of torch or Python in between."""
    frame = sys._getframe()
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_generated(frame: FrameType) -> bool:
    """Whether `torch.fx` has written the code that runs in a frame, from a graph."""
    return frame.f_code.co_filename.startswith("<eval_with_key>")


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the model's code, which lies outside torch and pdp_fx, or None."""
    frame = sys._getframe(1) if start is None else start
    while frame is not None and not is_users(frame.f_code.co_filename):
        if runs_models(frame):
            return None
        frame = frame.f_back
    return frame


class Frames:
    """Numbers the calls that frames run, since a frame that is gone may lend its id to another."""

    def __init__(self) -> None:
        self._numbers: dict[FrameType, int] = {}
        self._next = count()

    def number(self, frame: FrameType | None) -> int:
        """The number of a call that is under way; that of no call is -1."""
        if frame is None:
            return -1
        # The frames of calls that have ended are let go, with the tensors that they hold.
        self._numbers = {each: self._numbers[each] for each in under_way() if each in self._numbers}
        return self._numbers.setdefault(frame, next(self._next))

    def forget(self) -> None:
        """Let go of all frames; nothing is asked any more."""
        self._numbers = {}


def under_way() -> Iterator[FrameType]:
    """The frames that run, from the innermost to the one that runs the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not runs_models(frame):
        yield frame
        frame = frame.f_back


def source_line() -> str:
    """The innermost line of the model's code as `file.py:line`, or an empty string."""
    frame = user_frame(sys._getframe(1))
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def line_of(function: Callable[..., object]) -> str:
    """Where a function begins, as `file.py:line`, or an empty string if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def source_of(err: BaseException, function: Callable[..., object] | None = None) -> str:
    """The innermost line outside torch and pdp_fx that an error came through, as `file.py:line`.

    Args:
        err: the error.
        function: the one to blame if there is no such line.
    """
    lines = [f for f in traceback.extract_tb(err.__traceback__) if is_users(f.filename)]
    if lines:
        return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}"
    return (function and line_of(function)) or NO_LINE


def raised_by_user(err: BaseException) -> bool:
    """Whether an error comes from a `raise` or an `assert` of code outside torch and pdp_fx."""
    last = err.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return is_users(code.co_filename) and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
