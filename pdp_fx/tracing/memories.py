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
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.arguments import leaves
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, replaced
from pdp_fx.tracing.sizes import Live

_Memory = functools._lru_cache_wrapper

_NOT_THEIRS = (torch.__name__, __name__.partition(".")[0])
"""Packages whose cached functions never get live numbers."""

_found: dict[str, tuple[int, tuple[str, ...], tuple[CellType, ...]]] = {}
"""For each Python module its number of names when it was last searched, those of cached functions, and the
cells in which its functions hold others."""

DEPTH = 3
"""How many decorators around each other are searched."""


@contextmanager
def without_memory(recorder: Recorder) -> Generator[None, None, None]:
    """Let cached functions and methods compute results for live numbers anew inside the block."""
    past = functools.cache(functools.partial(_past, recorder))
    functions = [(names, name, past(names[name])) for names, name in _functions(recorder.model)]
    cells = [(cell, past(cell.cell_contents)) for cell in _held(recorder.model)]
    with ExitStack() as stack:
        for owner, name in _methods(recorder.model):
            method = vars(owner)[name]
            bypassed = past(_bare(method))
            wrapped = bypassed if method is _bare(method) else type(method)(bypassed)
            stack.enter_context(replaced(owner, name, wrapped))
        for cell, value in cells:
            stack.enter_context(_holding(cell, value))
        with entries(functions):
            yield


def _past(recorder: Recorder, memory: Any) -> Callable[..., Any]:
    @functools.wraps(memory)
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = not recorder.inside and any(isinstance(leaf, Live) for leaf in leaves((args, kwargs)))
        return (memory.__wrapped__ if alive else memory)(*args, **kwargs)

    return call


def _functions(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The cached functions in Python modules and in attributes of the model's modules, as dict entries."""
    for module_name, module in list(sys.modules.items()):
        for name in _searched(module_name, vars(module))[0]:
            yield vars(module), name
    for part in model.modules():
        for name in _remembering(vars(part)):
            yield vars(part), name


def _methods(model: nn.Module) -> Iterator[tuple[type, str]]:
    """The cached methods of the classes of the model's modules."""
    for owner in _classes(model):
        for name in _remembering(vars(owner)):
            yield owner, name


def _held(model: nn.Module) -> list[CellType]:
    """The cells in which decorators hold cached functions: of functions in Python modules and of methods."""
    found: dict[int, CellType] = {}
    for module_name, module in list(sys.modules.items()):
        found |= {id(cell): cell for cell in _searched(module_name, vars(module))[1]}
    for owner in _classes(model):
        found |= {id(cell): cell for cell in _cells(vars(owner).values())}
    for part in model.modules():
        found |= {id(cell): cell for cell in _cells(vars(part).values())}
    return list(found.values())


@contextmanager
def _holding(cell: CellType, value: object) -> Generator[None, None, None]:
    """Let a cell hold this inside the block."""
    before, cell.cell_contents = cell.cell_contents, value
    try:
        yield
    finally:
        cell.cell_contents = before


def _classes(model: nn.Module) -> set[type]:
    return {owner for kind in {type(part) for part in model.modules()} for owner in kind.__mro__}


def _searched(module_name: str, contents: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[CellType, ...]]:
    """The names of cached functions in a Python module, and the cells in which its functions hold others.

    It is searched again only if its size has changed.
    """
    size, names, cells = _found.get(module_name, (-1, (), ()))
    if size != len(contents) or any(type(contents.get(name)) is not _Memory for name in names):
        own = module_name.partition(".")[0] in _NOT_THEIRS
        names = () if own else tuple(_remembering(contents))
        cells = () if own else tuple(_cells(list(contents.values())))
        _found[module_name] = len(contents), names, cells
    return names, cells


def _cells(values: Iterable[Any], depth: int = DEPTH) -> Iterator[CellType]:
    """The cells in which functions hold cached functions, directly or through other functions."""
    for function in map(_bare, values):
        for cell in (function.__closure__ or ()) if type(function) is FunctionType else ():
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


def _remembering(contents: Mapping[str, Any]) -> list[str]:
    """The names of cached functions that take arguments."""
    return [
        name
        for name, value in list(contents.items())
        if type(_bare(value)) is _Memory and _takes_arguments(_bare(value).__wrapped__)
    ]


def _bare(value: Any) -> Any:
    """The function of a static method or a class method, or else the value itself."""
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _takes_arguments(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_varnames)
