"""What stays of a tensor when channels are removed (`Kept`), and nodes that compute sizes from that."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pdp_fx.channels.record import Labelled


@dataclass(frozen=True)
class Kept:
    """A tensor before channels are removed, and which of its indices will stay.

    Attributes:
        value: its shape and labels.
        stays: for each axis with channels, which of its indices stay, as booleans.
    """

    value: Labelled
    stays: dict[int, np.ndarray]

    def size(self, axis: int) -> int:
        """The size of ``axis`` afterwards."""
        return int(self.stays[axis].sum()) if axis in self.stays else self.value.shape[axis]

    def changes(self, axis: int) -> bool:
        """Whether ``axis`` gets shorter."""
        return self.size(axis) != self.value.shape[axis]

    def before(self, axis: int, index: int) -> int:
        """How many of the indices below ``index`` stay."""
        return int(self.stays[axis][:index].sum()) if axis in self.stays else index

    def placed(self, axis: int, index: int) -> int:
        """Where an index that stays is afterwards; one that counts from the end goes on to."""
        place = self.before(axis, index % self.value.shape[axis])
        return place - self.size(axis) if index < 0 else place

    def labels(self, axis: int) -> Tensor:
        """The labels that change along ``axis``, and perhaps along others."""
        return next(layer.ids for layer in self.value.layers if axis in layer.support)


def scaled(number: fx.Node, new: int, old: int) -> fx.Node:
    """Nodes for number * new / old: an axis that merges channels with the batch keeps following the batch."""
    common = math.gcd(new, old)
    times = _after(number, operator.mul, number, new // common)
    return _after(times, operator.floordiv, times, old // common)


def _after(place: fx.Node, call: Callable[..., Any], number: fx.Node, other: int | fx.Node) -> fx.Node:
    """A node for ``call(number, other)`` after ``place``; ``number`` itself if the other operand is 1."""
    if other == 1:
        return number
    with place.graph.inserting_after(place):
        return place.graph.call_function(call, (number, other))


def placed_after(node: fx.Node, call: Callable[..., Any], *args: Any) -> fx.Node:
    """A node behind ``node``, from the same place, that calls a function."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(call, args)
    made.meta = {name: told for name, told in node.meta.items() if name != "shape"}
    return made


def placed_before(node: fx.Node, call: Any, *args: Any) -> fx.Node:
    """A node before ``node``, from the same place, that calls a method by its name or a function."""
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_method" if isinstance(call, str) else "call_function", call, args)
    made.meta = {name: told for name, told in node.meta.items() if name != "shape"}
    return made


def checked_before(node: fx.Node, read: fx.Node, wanted: int, message: str) -> None:
    """Check before ``node`` that a number which is read there is the wanted one."""
    placed_before(node, torch._assert, placed_before(node, operator.eq, read, wanted), message)


def are_distinct(ids: Tensor) -> bool:
    """Whether no label occurs twice."""
    return len(ids.unique()) == ids.numel()
