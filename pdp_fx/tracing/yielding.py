"""Letting floats of a model see the sizes that they are combined with while the model is recorded.

In ``0.5 * x.shape[1]`` Python asks the float on the left first, which takes a live number for a plain one. So
for the time of a recording, the floats in the model's code and attributes are of a class that yields: the
number on the right then computes, and stays alive. What remains unseen, such as where a float comes out of a
list, is found by `pdp_fx.tracing.decoys`.
"""

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.sizes import YieldingFloat
from pdp_fx.tracing.source import is_users


@contextmanager
def yielding_floats(model: nn.Module) -> Generator[None, None, None]:
    """Let the floats in the code of a model, in its globals and in its attributes yield inside the block."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    homes = [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds} if _is_models(name)]
    held = (value for part in (*model.modules(), *kinds) for value in vars(part).values())
    found = chain.from_iterable((*map(_behind, held), *map(_functions, homes)))
    functions = {id(function): function for function in found}
    with ExitStack() as undoing:
        for function in functions.values():
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                old = getattr(function, name)
                new = _yielding(old)
                if new is not old:
                    setattr(function, name, new)
                    undoing.callback(setattr, function, name, old)
        for names in (*_attributes(model), *homes):
            for name, old in list(names.items()):
                if type(old) is float:
                    new = names[name] = YieldingFloat(old)
                    undoing.callback(_put_back, names, name, old, new)
        yield


def _put_back(names: dict[str, Any], name: str, old: float, new: float) -> None:
    # The model may have changed it meanwhile.
    if names.get(name) is new:
        names[name] = old


_CODES: dict[int, tuple[CodeType, CodeType]] = {}
"""Code objects, by their identity, and what they became."""


def _yielding(value: Any) -> Any:
    """A float that yields, or code, a tuple or a dict with such floats; anything else as it is."""
    if type(value) is float:
        return YieldingFloat(value)
    if isinstance(value, CodeType):
        known = _CODES.get(id(value))
        if known is None:
            consts = tuple(_yielding(c) if isinstance(c, CodeType | float) else c for c in value.co_consts)
            changed = any(new is not old for new, old in zip(consts, value.co_consts, strict=True))
            known = _CODES[id(value)] = value, value.replace(co_consts=consts) if changed else value
        return known[1]
    if type(value) is tuple and any(type(part) is float for part in value):
        return tuple(map(_yielding, value))
    if type(value) is dict and any(type(part) is float for part in value.values()):
        return {key: _yielding(part) for key, part in value.items()}
    return value


def _is_models(name: str) -> bool:
    """Whether a Python module is neither torch's, ours, nor built in; that of a notebook has no file."""
    home = sys.modules.get(name)
    file = getattr(home, "__file__", None) or "<notebook>"
    return home is not None and name != "builtins" and is_users(file)


def _functions(home: dict[str, Any]) -> Iterator[FunctionType]:
    """The functions that globals hold, and those of the classes that are defined there."""
    for value in list(home.values()):
        yield from _behind(value)
        if isinstance(value, type) and value.__module__ == home.get("__name__"):
            for method in list(vars(value).values()):
                yield from _behind(method)


def _behind(value: Any) -> Iterator[FunctionType]:
    """The users' functions that run when this is called or looked up: behind decorators and descriptors."""
    if type(value) in _INERT:
        return
    if isinstance(value, property):
        yield from _behind(value.fget)
    elif isinstance(value, functools.cached_property):
        yield from _behind(value.func)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _behind(value.__func__)
    elif isinstance(value, functools.partial):
        yield from _behind(value.func)
    elif callable(value) and not isinstance(value, type):
        while value is not None:
            if isinstance(value, FunctionType) and is_users(value.__code__.co_filename):
                yield value
            # Looking an attribute up statically takes long, and those of a function are in its dict.
            is_function = type(value) is FunctionType
            value = (
                value.__dict__.get(_WRAPPED) if is_function else inspect.getattr_static(value, _WRAPPED, None)
            )


_WRAPPED = "__wrapped__"
"""Where a decorator keeps what it decorates."""

_INERT = frozenset((bool, int, float, str, bytes, type(None), tuple, list, dict, set, frozenset, OrderedDict))
"""Types of most of what modules and their classes hold, which is never called."""


def _attributes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of the model's own modules, and of objects that these hold, such as a configuration."""
    seen = set[int]()
    for module in model.modules():
        if not _is_models(type(module).__module__):
            continue
        for value in (module, *vars(module).values()):
            kept = value is module or not isinstance(value, (nn.Module, torch.Tensor, type, FunctionType))
            if kept and id(value) not in seen and type(getattr(value, "__dict__", None)) is dict:
                seen.add(id(value))
                yield vars(value)
