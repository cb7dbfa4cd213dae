"""Telling `x.to(y.dtype)` from `x.to(torch.float32)`.

Both pass the same object to torch, but the first must follow when the model is cast to bfloat16 or runs under
autocast. The source code tells them apart: the argument is an attribute `dtype`, or a variable that was
assigned one, or one that the caller was given so. The recorder knows whose `dtype` was read.
"""

import ast
import sys
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from pdp_fx.tracing.expressions import (
    Located,
    Span,
    arguments_of,
    assignments,
    attribute_read,
    expression_at,
    parameters_of,
    span_of,
)
from pdp_fx.tracing.kept_dtypes import gives_kept
from pdp_fx.tracing.source import Frames, is_ours, is_users, runs_models, source_line, user_frame
from pdp_fx.tracing.steps import Expr, Value, identity


@dataclass(frozen=True)
class _Read:
    """A read of the dtype of a tensor.

    Attributes:
        call: the number of the call that read it (`Frames`).
        dtype: what it read.
        value: where the tensor comes from.
        step: the number of steps before it.
        place: where the expression that reads it stands in the code, or None.
        names: the variables that it is assigned to.
        moves: whether it is that of `module.to(tensor)`, which casts what the module holds.
    """

    call: int
    dtype: torch.dtype
    value: Value
    step: int
    place: Span | None
    names: frozenset[str]
    moves: bool


class Dtypes:
    """The dtypes read so far; only recent ones matter."""

    def __init__(self, frames: Frames) -> None:
        self._number = frames.number
        self._reads: deque[_Read] = deque(maxlen=256)
        self._told: set[Hashable] = set()
        self._given: list[_Read] = []
        self._open: dict[tuple[int, Hashable], tuple[str, torch.dtype, Value]] = {}

    def note(
        self, dtype: torch.dtype, value: Value, step: int, moves: bool = False, by_torch: bool = False
    ) -> None:
        """Note that the model reads the dtype of a tensor.

        Args:
            dtype: what it reads.
            value: where the tensor comes from.
            step: the number of steps so far.
            moves: whether it moves a module to where the tensor is.
            by_torch: whether code of torch reads it, which gives it on at once or does nothing with it.
        """
        if dtype.is_floating_point or dtype.is_complex:
            frame = reading_frame()
            located = None if frame is None else expression_at(frame)
            place = None if located is None else span_of(located.node)
            names = frozenset[str]() if located is None else names_given(located)
            call = self._number(frame)
            self._reads.append(_Read(call, dtype, value, step, place, names, moves))
            if frame is not None and (moves or not by_torch):
                self._open[call, identity(value)] = source_line(), dtype, value

    def given(self) -> None:
        """Note that the call for which dtypes were `followed` last is in the graph."""
        for read in self._given:
            self._open.pop((read.call, identity(read.value)), None)

    @property
    def unfollowed(self) -> list[tuple[str, torch.dtype, Value]]:
        """The reads of which no call was seen to be given what they gave: the line, the dtype, the tensor."""
        return list(self._open.values())

    def settle(self, value: Value) -> None:
        """Note that it is known what the model does with the dtype of a tensor that it has read last."""
        last = next((key for key in reversed(self._open) if key[1] == identity(value)), None)
        if last is not None:
            del self._open[last]

    def followed(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> dict[torch.dtype, Expr]:
        """The dtypes among the arguments of the current call that follow a tensor, and how."""
        wanted, self._given = self._wanted(args, kwargs), []
        if not wanted:
            return {}
        frame, named = user_frame(), _naming_frame()
        if named is None and not (_names_a_dtype(frame) or self._moves(frame)):
            return {}
        by = [each for each in (frame, user_frame(named)) if each is not None]
        # What code of torch reads, it gives on at once.
        at_once = named is not None and not is_users(named.f_code.co_filename)
        found = {dtype: self._latest(dtype, by, step, at_once) for dtype in wanted}
        followed = {dtype: read for dtype, read in found.items() if read is not None}
        self._given = list(followed.values())
        return {dtype: Expr(getattr, (read.value, "dtype")) for dtype, read in followed.items()}

    def kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.dtype, Value]]:
        """The reads that the dtypes among the arguments of the current call may be from, if they were kept.

        They come with the dtype that was read, and each only once in a recording.
        """
        wanted = self._wanted(args, kwargs)
        if not any(map(_is_given_kept, wanted)):
            return []
        found = {identity(read.value): read for read in self._reads if read.dtype in wanted}
        new = found.keys() - self._told
        self._told |= new
        return [(read.dtype, read.value) for key, read in found.items() if key in new]

    def _wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.dtype]:
        """The dtypes among arguments that were read before."""
        given = {arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)}
        return {dtype for dtype in given if any(read.dtype is dtype for read in self._reads)}

    def _moves(self, frame: FrameType | None) -> bool:
        """Whether the call that a frame makes is a `module.to(tensor)`."""
        located = None if frame is None else expression_at(frame)
        place = None if located is None else span_of(located.node)
        call = self._number(frame)
        return any(r.moves and (r.call, r.place) == (call, place) for r in self._reads)

    def _latest(self, dtype: torch.dtype, by: list[FrameType], step: int, at_once: bool) -> _Read | None:
        """The read of the dtype that these frames give; None if it may be that of several tensors.

        Args:
            dtype: what is given.
            by: the frames.
            step: the number of steps so far.
            at_once: whether it is the one that was read last.
        """
        told = {self._number(frame): _told(frame) for frame in by}
        # A property of the user's may have read it, in a frame of its own, just now.
        reads = [r for r in reversed(self._reads) if r.dtype is dtype and (r.call in told or r.step == step)]
        for read in reads:
            places, names = told.get(read.call, (set[Span](), set[str]()))
            if read.place in places or not read.names.isdisjoint(names):
                return read
        several = len({identity(read.value) for read in reads}) > 1
        return reads[0] if reads and (at_once or not several) else None


def _told(frame: FrameType) -> tuple[set[Span], set[str]]:
    """By which places in the code and which variables the call that a frame makes is given a dtype."""
    located = expression_at(frame)
    given = [] if located is None else [a for a in arguments_of(located) if is_read(a, located, "dtype")]
    names = {argument.id for argument in given if isinstance(argument, ast.Name)}
    itself = set[Span]() if located is None else {span_of(located.node)}
    return itself | {span_of(way) for argument in given for way in _ways(argument)}, names


def reading_frame() -> FrameType | None:
    """The frame of the model's code that reads a dtype or device, be it by a property of the model's own."""
    frame = user_frame()
    while frame is not None and frame.f_code.co_name in ("dtype", "device", "<genexpr>"):
        frame = user_frame(frame.f_back)
    return frame


def _naming_frame() -> FrameType | None:
    """The frame whose call has some tensor's dtype as an argument, which the innermost call is given.

    It is that of the innermost call of torch's or the model's code, or that of a caller that passes a dtype.
    """
    for frame in _calling_frames():
        if _names_a_dtype(frame):
            return frame
        if not any(_is_given_dtype(argument, frame) for argument in arguments_of(expression_at(frame))):
            return None
    return None


def _is_given_kept(dtype: torch.dtype) -> bool:
    """Whether the innermost call is given a dtype that the model's code may have read and kept."""
    answers = (gives_kept(dtype, frame) for frame in _calling_frames())
    return next((answer for answer in answers if answer is not None), False)


def _calling_frames() -> Iterator[FrameType]:
    """The frames of the model's code and of torch's, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not runs_models(frame):
        if not _is_between(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_between(filename: str) -> bool:
    """Whether code only passes calls on to the recorder."""
    return is_ours(filename) or filename == torch.overrides.__file__


def _is_given_dtype(argument: ast.expr, frame: FrameType) -> bool:
    """Whether an argument is a dtype that the function which runs in a frame was given, or holds one.

    All arguments that a function was given are passed on by ``*args`` and ``**kwargs``, and one of them by
    ``kwargs["dtype"]``.
    """
    name = argument.value if isinstance(argument, ast.Starred | ast.Subscript) else argument
    if not isinstance(name, ast.Name):
        return False
    value = frame.f_locals.get(name.id) if name.id in parameters_of(frame.f_code) else None
    held = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, torch.dtype) for each in held)


def _names_a_dtype(frame: FrameType | None) -> bool:
    """Whether an argument of the call that a frame makes is some tensor's dtype."""
    located = None if frame is None else expression_at(frame)
    arguments = arguments_of(located)
    return located is not None and any(is_read(argument, located, "dtype") for argument in arguments)


def is_read(expression: ast.expr, located: Located, name: str) -> bool:
    """Whether an expression is an attribute of a tensor, or a variable that is assigned one.

    Args:
        expression: the expression.
        located: an expression of the same function.
        name: the attribute, such as ``dtype``.
    """
    if not isinstance(expression, ast.Name):
        return _reads(expression, name)
    function = located.function
    assigned = (
        value
        for node in (ast.walk(function) if function is not None else ())
        for target, whole in assignments(node)
        for value in _assigned_to(expression.id, target, whole)
    )
    return any(_reads(value, name) for value in assigned)


def _reads(expression: ast.expr, name: str) -> bool:
    """Whether an expression is an attribute of this name, at least one way."""
    reads = (attribute_read(way) for way in _ways(expression))
    return any(read is not None and read[1] == name for read in reads)


def _ways(expression: ast.expr) -> list[ast.expr]:
    """The expressions that one may choose; itself if it does not choose."""
    if isinstance(expression, ast.IfExp):
        return [*_ways(expression.body), *_ways(expression.orelse)]
    if isinstance(expression, ast.BoolOp):
        return [way for value in expression.values for way in _ways(value)]
    return [expression]


def _assigned_to(name: str, target: ast.expr, value: ast.expr) -> list[ast.expr]:
    """What a variable gets by an assignment, which may be one of several values to several targets."""
    if isinstance(target, ast.Name):
        return [value] if target.id == name else []
    if not (isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)):
        return []
    if len(target.elts) != len(value.elts):
        return []
    pairs = zip(target.elts, value.elts, strict=True)
    return [found for one, given in pairs for found in _assigned_to(name, one, given)]


def names_given(located: Located) -> frozenset[str]:
    """The variables that an expression is assigned to, at least one way."""
    statement = next((parent for parent in reversed(located.parents) if not isinstance(parent, _OPEN)), None)
    return frozenset(
        name.id
        for target, whole in (() if statement is None else assignments(statement))
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
        and any(located.node in _ways(value) for value in _assigned_to(name.id, target, whole))
    )


_OPEN = ast.Tuple | ast.List | ast.IfExp
