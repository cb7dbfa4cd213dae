"""Replacing attributes and dict entries for the time of a block."""

import inspect
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import FunctionType
from typing import Any

ALONE = threading.RLock()
"""The lock of tracing: the attributes that it replaces and the generators belong to the whole process."""


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Generator[None, None, None]:
    """Let an attribute have this value inside the block."""
    inherited = name not in vars(owner)
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_ABSENT = object()


@contextmanager
def entries(values: Iterable[tuple[dict[str, Any], str, object]]) -> Generator[None, None, None]:
    """Let dicts have other values inside the block: of each the dict, the key and the value."""
    before = []
    try:
        for held, key, value in values:
            before.append((held, key, held.get(key, _ABSENT)))
            held[key] = value
        yield
    finally:
        for held, key, value in reversed(before):
            if value is _ABSENT:
                # The code inside may have done so, too.
                held.pop(key, None)
            else:
                held[key] = value


def wherever_named(
    replacements: Iterable[tuple[object, object]], kinds: Iterable[type], *homes: dict[str, Any]
) -> list[tuple[dict[str, Any], str, object]]:
    """What to give `entries` so that objects are replaced by others under all names by which code knows them.

    Args:
        replacements: objects, such as functions, each with what takes its place.
        kinds: classes whose code may have imported them.
        homes: the global names of the Python modules that define them.
    """
    pairs = {id(old): (old, new) for old, new in replacements}
    return [
        (names, name, pairs[id(value)][1])
        for names in (*homes, *namespaces(kinds))
        for name, value in names.items()
        if id(value) in pairs
    ]


def namespaces(kinds: Iterable[type], of_torch: bool = True) -> list[dict[str, Any]]:
    """The global names of the code of these classes and of those that they are derived from.

    Args:
        kinds: the classes; the code of the ``forward`` of one may have been generated, as by `fx`.
        of_torch: whether those of torch's own modules are among them.
    """
    kinds = set(kinds)
    homes = {base.__module__ for kind in kinds for base in kind.__mro__}
    found = [vars(sys.modules[home]) for home in homes if home in sys.modules]
    found += [
        kind.forward.__globals__ for kind in kinds if isinstance(getattr(kind, "forward", None), FunctionType)
    ]
    return [
        names
        for names in {id(each): each for each in found}.values()
        if of_torch or str(names.get("__name__", "")).partition(".")[0] != "torch"
    ]
