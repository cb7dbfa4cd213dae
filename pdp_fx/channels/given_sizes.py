"""The sizes that views and the like are given as arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

VIEWS: frozenset[Any] = frozenset({"view", "reshape", torch.reshape})
"""Operations that lay all elements out anew, in which a size of -1 is what the others leave."""

SHAPE = ("shape", "size", "sizes")
"""The keywords of a method's sizes."""


def sizes_given(node: fx.Node, first: int, names: tuple[str, ...]) -> tuple[str | None, bool, Any]:
    """The sizes that start at argument ``first``: their keyword, whether they are one argument, and they."""
    name = next((name for name in names if name in node.kwargs), None)
    packed = len(node.args) == first + 1 and isinstance(node.args[first], (tuple, list))
    given: Any = node.kwargs[name] if name else node.args[first] if packed else node.args[first:]
    return name, packed, given
