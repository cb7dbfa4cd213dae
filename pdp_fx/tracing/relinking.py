"""Letting what modules hold besides parameters, buffers and modules refer to other modules.

Where a module is kept whole, its code runs, and may reach its layers by a list, a dict, an object or a
function that it holds, as in ``self.order = [self.first, self.last]``. When others take the places of these
layers, such as masked ones, that has to lead to the others, too.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from pdp_fx.errors import StateError
from pdp_fx.tracing.structure import BASE_TYPES, OF_TORCH, is_namedtuple

Swaps = Mapping[nn.Module, nn.Module]
"""Modules, and what takes their places."""

_HOOKS = frozenset(("_forward_pre_hooks", "_forward_hooks"))

_OURS = f"{__name__.partition('.')[0]}."

_CLOSED = (*BASE_TYPES, type, ModuleType, torch.Tensor, np.ndarray, torch.Generator)
"""What holds no modules."""


def relink(modules: Iterable[nn.Module], swaps: Swaps) -> None:
    """Let all that modules hold, their hooks, too, refer to others.

    What leads to a swapped module is replaced by a copy that leads to the other; all else stays what it is.

    Args:
        modules: whose attributes are changed; their tables of modules are left alone.
        swaps: what takes the place of what.
    """
    links = _Links(swaps)
    for module in modules if swaps else ():
        # Masks and the like hold no layers.
        if not type(module).__module__.startswith(_OURS):
            held = vars(module)
            for name in (*(held.keys() - OF_TORCH), *(held.keys() & _HOOKS)):
                held[name] = links.of(held[name])


class _Links:
    """Values with swapped modules in them, each made once."""

    def __init__(self, swaps: Swaps) -> None:
        self._swaps = swaps
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The value that leads to the others; the value itself if it leads to no swapped module."""
        if isinstance(value, nn.Module):
            return self._swaps.get(value, value)
        if isinstance(value, _CLOSED):
            return value
        if id(value) not in self._known:
            # For what leads to itself.
            self._known[id(value)] = value, value
            self._known[id(value)] = value, self._made(value)
        return self._known[id(value)][1]

    def _all(self, values: Iterable[Any]) -> tuple[list[Any], bool]:
        """Values, and whether any is another."""
        before = list(values)
        now = list(map(self.of, before))
        return now, any(one is not other for one, other in zip(before, now, strict=True))

    def _made(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._sequence(value)
        if isinstance(value, MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts, other = self._all((value.func, *value.args, *value.keywords.values()))
            count = 1 + len(value.args)
            keywords = dict(zip(value.keywords, parts[count:], strict=True))
            return type(value)(*parts[:count], **keywords) if other else value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, weakref.ref):
            target = value()
            found = self.of(target)
            return value if found is target else weakref.ref(found)
        return self._object(value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        keys, moved = self._all(value)
        parts, other = self._all(value.values())
        if not moved and not other:
            return value
        made = copy.copy(value)
        made.clear()
        made.update(zip(keys, parts, strict=True))
        return made

    def _sequence(self, value: Any) -> Any:
        parts, other = self._all(value)
        if not other:
            return value
        if isinstance(value, list | deque):
            made = copy.copy(value)
            made.clear()
            made.extend(parts)
            return made
        return type(value)(*parts) if is_namedtuple(value) else type(value)(parts)

    def _function(self, value: FunctionType) -> FunctionType:
        cells = list(value.__closure__ or ())
        held, other = self._all(map(_content, cells))
        given, told = self._all(value.__defaults__ or ())
        named, named_told = self._all((value.__kwdefaults__ or {}).values())
        if not (other or told or named_told):
            return value
        places = [
            cell if part is _content(cell) else CellType(part) for cell, part in zip(cells, held, strict=True)
        ]
        made = FunctionType(value.__code__, value.__globals__, value.__name__, tuple(given), tuple(places))
        made.__kwdefaults__ = dict(zip(value.__kwdefaults__ or {}, named, strict=True)) or None
        vars(made).update(vars(value))
        return made

    def _object(self, value: Any) -> Any:
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict):
            return value
        parts, other = self._all(held.values())
        if not other:
            return value
        try:
            made = copy.copy(value)
        except Exception as err:
            raise StateError(
                f"the model holds a {type(value).__name__} that leads to layers of it and cannot be copied: "
                f"{type(err).__name__}: {err}"
            ) from err
        vars(made).update(zip(held, parts, strict=True))
        return made


def _content(cell: CellType) -> Any:
    """What a cell holds; the cell itself as long as its name has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell
