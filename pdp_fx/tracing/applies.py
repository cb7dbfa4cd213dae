"""Replacing the ``apply`` of autograd functions, wherever code has looked it up before."""

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.replacing import entries, namespaces, replaced


@contextmanager
def with_apply(model: nn.Module, apply: Callable[..., Any]) -> Generator[None, None, None]:
    """Let the model call ``apply``, with the class and the arguments, in the place of that of any class.

    What is held out of sight is not replaced; a recording notices it by its results (`Origins.value`).
    """
    with replaced(torch.autograd.Function, "apply", classmethod(apply)), entries(_bound(model, apply)):
        yield


def _bound(model: nn.Module, apply: Callable[..., Any]) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Where the model's code and its modules hold an ``apply`` from before, as in ``ste = Round.apply``."""
    modules = list(model.modules())
    codes = namespaces((*map(type, modules), *_kinds_of(torch.autograd.Function)), of_torch=False)
    for names in (*codes, *map(vars, modules)):
        for name, value in list(names.items()):
            kind = _function_of_apply(value)
            if kind is not None:
                yield names, name, functools.partial(apply, kind)


def _function_of_apply(value: object) -> type[torch.autograd.Function] | None:
    """The autograd function whose bound ``apply`` a value is, or calls as a partial without arguments."""
    if isinstance(value, functools.partial) and not (value.args or value.keywords):
        value = value.func
    if not isinstance(value, BuiltinMethodType | MethodType) or value.__name__ != "apply":
        return None
    kind = value.__self__
    return kind if isinstance(kind, type) and issubclass(kind, torch.autograd.Function) else None


def _kinds_of(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds_of(each)
