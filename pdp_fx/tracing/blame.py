"""Choosing the part of a model to keep whole when something in it cannot be recorded.

The smaller the part, the more of the model is traced. But a part that uses weights directly must be a module,
since only the weights of modules can be masked and sliced.
"""

import inspect
import sys
from collections.abc import Container, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from pdp_fx.tracing.leaves import stores_tensors
from pdp_fx.tracing.source import is_users
from pdp_fx.tracing.steps import Whole

_NEVER = ("forward", "train", "eval")
"""Methods that are not kept whole: a module as a whole, and what only sets its mode."""


def to_blame(
    frame: FrameType | None, module: nn.Module, path: str, paths: Mapping[int, str], tried: Container[Whole]
) -> Whole:
    """The part to keep whole because of what a frame does.

    That is the innermost method of one of the model's modules, but for those of `_NEVER`, among the frames
    between the forward of the current module and ``frame``; else, if the current module stores tensors, the
    outermost function among them; else the current module.

    Args:
        frame: where the recording failed.
        module: the current module.
        path: its path.
        paths: the path of each module of the model, by identity.
        tried: parts that were kept whole before, in vain.
    """
    functions: list[Whole] = []
    while frame is not None:
        owner, name = _owner(frame), frame.f_code.co_name
        found = paths.get(id(owner))
        if found == path and name == "forward":
            break
        if found is None:
            functions += [function for function in _functions(frame) if function not in tried]
        elif name not in _NEVER:
            whole = Whole(found, name)
            if whole not in tried and not name.startswith("_call_impl"):
                return whole
        frame = frame.f_back
    return functions[-1] if functions and stores_tensors(module) else Whole(path)


def _owner(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in a frame, whatever its first argument is called; None if none does."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if not isinstance(owner, nn.Module):
        return None
    method = getattr(getattr(owner, code.co_name, None), "__func__", None)
    return owner if code.co_name == "forward" or _runs(method, code) else None


def _functions(frame: FrameType) -> list[Whole]:
    """The function that runs in a frame, if it is the user's and its callers look it up by its name."""
    code = frame.f_code
    if not is_users(code.co_filename):
        return []
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    for kind in () if isinstance(owner, nn.Module) else type(owner).__mro__:
        if _runs(vars(kind).get(code.co_name), code):
            return [Whole("", code.co_name, kind)]
    callers = {} if frame.f_back is None else frame.f_back.f_globals
    for names in (callers, frame.f_globals):
        home = sys.modules.get(names.get("__name__", ""))
        if home is not None and vars(home) is names and _runs(names.get(code.co_name), code):
            return [Whole("", code.co_name, home)]
    return []


def _runs(function: Any, code: CodeType) -> bool:
    """Whether calling a function, which may be decorated, runs this code."""
    return isinstance(function, FunctionType) and getattr(inspect.unwrap(function), "__code__", None) is code
