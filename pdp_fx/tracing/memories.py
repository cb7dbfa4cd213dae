"""Bypassing `functools.lru_cache` and `cache` while a model is recorded.

A cached function looks up its arguments by value. Called with the size of a tensor, it would return what it
computed for another tensor of that size, in this run or an earlier one: numbers that do not follow the
present tensor. einops caches its plans for reshapes in this way, and many models their masks and tables.
During a recording, calls with live numbers therefore run the function itself. So they do where a decorator
holds the cached function, such as one that asks first whether the model is being compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.arguments import leaves
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, replaced
from pdp_fx.tracing.sizes import Live
from pdp_fx.tracing.structure import OF_TORCH

_Memory = functools._lru_cache_wrapper

_MAY_REMEMBER = (FunctionType, _Memory, staticmethod, classmethod)
"""What a cached function is, or is held by."""

_NOT_THEIRS = (torch.__name__, __name__.partition(".")[0])
"""Packages whose cached functions and methods never get live numbers."""

DEPTH = 3
"""How many decorators around each other are searched."""


@dataclass(frozen=True)
class _Memories:
    """The names of cached functions, and the cells in which functions, such as decorators, hold others."""

    names: tuple[str, ...] = ()
    cells: tuple[CellType, ...] = ()


_NONE = _Memories()

_FOUND: dict[str, tuple[int, _Memories]] = {}
"""For each Python module its number of names when it was last searched, and what was found."""


class _PythonModules:
    """The names of all Python modules but those of `_NOT_THEIRS`, which are a thousand or two."""

    def __init__(self) -> None:
        self._mark: tuple[int, str] | None = None
        self._contents: list[tuple[str, dict[str, Any]]] = []

    def now(self) -> list[tuple[str, dict[str, Any]]]:
        """What each module is called, and its names; looked up again where one was imported since."""
        mark = len(sys.modules), next(reversed(sys.modules))
        if mark != self._mark:
            modules = list(sys.modules.items())
            theirs = [(name, each) for name, each in modules if name.partition(".")[0] not in _NOT_THEIRS]
            # Who bars a module from being imported has None in its place.
            named = [(name, getattr(each, "__dict__", None)) for name, each in theirs]
            self._mark, self._contents = mark, [(name, each) for name, each in named if each is not None]
        return self._contents


_PYTHON_MODULES = _PythonModules()


@contextmanager
def without_memory(recorder: Recorder) -> Generator[None, None, None]:
    """Let cached functions and methods compute results for live numbers anew inside the block."""
    past = functools.cache(functools.partial(_past, recorder))
    functions: list[tuple[dict[str, Any], str, object]] = []
    cells: dict[int, CellType] = {}
    for contents, memories in _searched(recorder.model):
        functions += [(contents, name, past(contents[name])) for name in memories.names]
        cells |= {id(cell): cell for cell in memories.cells}
    with ExitStack() as stack:
        for owner in _classes(recorder.model):
            memories = _found_in(vars(owner))
            cells |= {id(cell): cell for cell in memories.cells}
            for name in memories.names:
                method = vars(owner)[name]
                bypassed = past(_bare(method))
                wrapped = bypassed if method is _bare(method) else type(method)(bypassed)
                stack.enter_context(replaced(owner, name, wrapped))
        for cell in cells.values():
            stack.enter_context(_holding(cell, past(cell.cell_contents)))
        with entries(functions):
            yield


def _past(recorder: Recorder, memory: Any) -> Callable[..., Any]:
    # What `wraps` does besides takes longer than all else here, as this is made for each recording anew.
    @functools.wraps(memory, assigned=("__name__",), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = not recorder.inside and any(isinstance(leaf, Live) for leaf in leaves((args, kwargs)))
        return (memory.__wrapped__ if alive else memory)(*args, **kwargs)

    return call


def _searched(model: nn.Module) -> Iterator[tuple[dict[str, Any], _Memories]]:
    """The names in each Python module and the attributes of each of the model's modules, with what they hold.

    A Python module is searched again only if its size has changed.
    """
    for module_name, contents in _PYTHON_MODULES.now():
        size, memories = _FOUND.get(module_name, (-1, _NONE))
        if size == len(contents) and memories is _NONE:
            continue
        if size != len(contents) or any(type(contents.get(name)) is not _Memory for name in memories.names):
            memories = _found_in(contents)
            _FOUND[module_name] = len(contents), memories
        yield contents, memories
    for part in model.modules():
        yield (
            vars(part),
            _found_in({name: value for name, value in vars(part).items() if name not in OF_TORCH}),
        )


@contextmanager
def _holding(cell: CellType, value: object) -> Generator[None, None, None]:
    """Let a cell hold this inside the block."""
    before, cell.cell_contents = cell.cell_contents, value
    try:
        yield
    finally:
        cell.cell_contents = before


def _classes(model: nn.Module) -> set[type]:
    """The classes of the model's modules and those that they are derived from, but for `_NOT_THEIRS`."""
    kinds = {owner for kind in {type(part) for part in model.modules()} for owner in kind.__mro__}
    return {kind for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_THEIRS}


def _found_in(contents: Mapping[str, Any]) -> _Memories:
    """The cached functions that take arguments and that names stand for."""
    names, functions = list[str](), list[FunctionType]()
    # Most of a hundred thousand values are neither.
    for name, value in list(contents.items()):
        if isinstance(value, _MAY_REMEMBER):
            bare = _bare(value)
            if type(bare) is _Memory and _takes_arguments(bare.__wrapped__):
                names.append(name)
            elif type(bare) is FunctionType and bare.__closure__:
                functions.append(bare)
    cells = tuple(_cells(functions))
    return _Memories(tuple(names), cells) if names or cells else _NONE


def _cells(functions: Iterable[FunctionType], depth: int = DEPTH) -> Iterator[CellType]:
    """The cells in which functions hold cached functions, directly or through other functions."""
    for function in functions:
        for cell in function.__closure__ or ():
            held = _in(cell)
            if type(held) is _Memory and _takes_arguments(held.__wrapped__):
                yield cell
            elif depth and type(held) is FunctionType:
                yield from _cells([held], depth - 1)


def _in(cell: CellType) -> Any:
    """What a cell holds; None as long as its name has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _bare(value: Any) -> Any:
    """The function of a static method or a class method, or else the value itself."""
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _takes_arguments(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_varnames)
