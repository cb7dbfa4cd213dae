"""What modules hold in plain objects, nested containers, arrays and tensors that are no buffers.

A forward may keep something there for its next call, as a module does in its own attributes. Objects that
work beside the model, with threads, locks or files of their own, are left alone, and so are those of torch.
"""

from __future__ import annotations

import argparse
import io
import logging
import operator
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import Queue
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from pdp_fx.tracing.structure import BASE_TYPES, OF_TORCH, are_equal, attributes, children, is_object

_log = logging.getLogger(__name__)

CONTAINERS = (dict, list, set, deque)
"""What is put back with its content. Hooks are in an OrderedDict, caches in anything."""

MOST = 100_000
"""So many things are looked at; a model may hold a data set, or all that trains it."""

LARGEST = 2**24
"""Tensors and arrays of more numbers are not copied."""

_BESIDE = (threading.Thread, io.IOBase, Queue, type(threading.Lock()), type(threading.RLock()))
"""What an object holds that works beside the model."""

_OF_PYTHON = (types.SimpleNamespace, argparse.Namespace)
"""The classes of Python's own library whose objects are put back."""


@dataclass(frozen=True)
class Kept:
    """Something that a module holds, as it was.

    Attributes:
        module: the module.
        name: the attribute of it by which the thing is reached.
        thing: a container, object, array or tensor.
        content: a copy of what it held; of the things in that no copies.
    """

    module: nn.Module
    name: str
    thing: Any
    content: Any

    def put_back(self) -> bool:
        """Put back what the thing held; returns whether it holds something else."""
        thing, content = self.thing, self.content
        if isinstance(thing, torch.Tensor):
            changed = thing._version != content[0] and not are_equal(thing, content[1])
            if changed:
                with torch.no_grad():
                    thing.copy_(content[1])
        elif isinstance(thing, np.ndarray):
            changed = thing.tobytes() != content.tobytes()
            if changed:
                np.copyto(thing, content)
        elif isinstance(thing, CONTAINERS):
            changed = not same_content(thing, content)
            if changed:
                refill(thing, content)
        else:
            now = attributes(thing)
            changed = not same_content(now, content)
            for name in {**now, **content} if changed else ():
                _set(thing, name, content)
        return changed


def held_by(modules: Iterable[nn.Module]) -> list[Kept]:
    """All that modules hold, each thing once, without what are attributes and containers of their own."""
    seen, found = set[int](), list[Kept]()
    for module in modules:
        for name, value in vars(module).items():
            if name in OF_TORCH or isinstance(value, BASE_TYPES):
                continue
            for thing, content in _reached(value, seen):
                found.append(Kept(module, name, thing, content))
                if len(found) == MOST:
                    _log.info("a model holds too much: what is left of it is not put back")
                    return found
    return found


def content_of(container: Any) -> Any:
    """A copy of what a container holds."""
    if isinstance(container, dict):
        return dict(cast(dict[Any, Any], container))
    return set(container) if isinstance(container, set) else list(container)


def same_content(container: Any, content: Any) -> bool:
    """Whether a container holds the very things that its copy holds."""
    if isinstance(container, set):
        return container == content
    if len(container) != len(content) or not all(map(operator.is_, container, content)):
        return False
    return isinstance(container, list | deque) or all(map(operator.is_, container.values(), content.values()))


def refill(container: Any, content: Any) -> None:
    """Give a container the content of its copy."""
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


def _reached(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """The things in a value, and copies of their contents."""
    todo = [value]
    while todo:
        thing = todo.pop()
        if isinstance(thing, (*BASE_TYPES, nn.Module, type)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if not isinstance(thing, nn.Parameter) and thing.layout is torch.strided and _is_copied(thing):
                yield thing, (thing._version, thing.detach().clone())
        elif isinstance(thing, np.ndarray):
            if thing.size <= LARGEST and not thing.dtype.hasobject and thing.flags.writeable:
                yield thing, thing.copy()
        elif isinstance(thing, CONTAINERS):
            if thing is not value:
                yield thing, content_of(thing)
            todo += [part for _, _, part in children(thing)]
        elif isinstance(thing, tuple):
            # A subclass may refuse to say how long it is.
            todo.extend(tuple.__iter__(thing))
        elif _is_state(thing):
            held = attributes(thing)
            yield thing, held
            todo += held.values()


def _is_copied(tensor: torch.Tensor) -> bool:
    return not (tensor.is_nested or tensor.is_meta or tensor.is_inference()) and tensor.numel() <= LARGEST


def _is_state(thing: Any) -> bool:
    """Whether a thing is an object that is put back."""
    if not is_object(thing) or isinstance(thing, types.ModuleType):
        return False
    home = type(thing).__module__.partition(".")[0]
    if home in ("torch", "pdp_fx", "numpy"):
        return False
    if home in sys.stdlib_module_names and not isinstance(thing, _OF_PYTHON):
        return False
    return not any(isinstance(part, _BESIDE) for part in attributes(thing).values())


def _set(thing: Any, name: str, content: dict[str, Any]) -> None:
    """Give an object an attribute as it was, or take it away, past what its class says about that."""
    own = getattr(thing, "__dict__", {})
    if name in own or not hasattr(type(thing), name):
        own.pop(name, None)
        if name in content:
            own[name] = content[name]
    elif name in content:
        object.__setattr__(thing, name, content[name])
    else:
        object.__delattr__(thing, name)
