"""What `rewrites` works on: the `Job`, one node to resize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import fx

from pdp_fx.channels.counts import Counts
from pdp_fx.channels.kept import Kept, scaled
from pdp_fx.channels.record import Record


@dataclass(frozen=True)
class Job:
    """One node to resize.

    Among the arguments of the node, a number that depends on how many channels there are is a stand-in for
    the one from before any were removed. Those that a rewrite leaves in place become that number.

    Attributes:
        node: the node.
        source: the first tensor that it reads; an empty one if there is none.
        results: the tensors that it returns.
        numbers: the old value of every node that returned a number, and of stand-ins, by the node's name.
        stand_ins: the nodes that stand-ins stand for.
        counts: finds the numbers from before.
    """

    node: fx.Node
    source: Kept
    results: tuple[Kept, ...]
    numbers: dict[str, Any]
    stand_ins: dict[fx.Node, fx.Node]
    counts: Counts

    def number(self, value: Any) -> Any:
        """The old value of an argument: of a node, the number that it returned."""
        return self.numbers[value.name] if isinstance(value, fx.Node) else value

    def resized(self, kept: Kept, axis: int, given: Any) -> Any:
        """The new argument for the size of ``axis``, in the place of ``given``, a number or a node."""
        if not isinstance(given, fx.Node):
            return kept.size(axis) if given != -1 and kept.changes(axis) else given
        new, old = kept.size(axis), kept.value.shape[axis]
        if given in self.stand_ins:
            number = self.stand_ins[given]
            if old and self.counts.ratio(number) == Fraction(new, old):
                return number
            given = self.counts.before(number, self.node)
        if new == old:
            return given
        return scaled(given, new, old) if isinstance(given, fx.Node) else given * new // old


Apply = Callable[[fx.Node, Job], None]
Varies = Callable[[fx.Node, Record], frozenset[int]]
Fits = Callable[[fx.Node, Record], bool]


@dataclass(frozen=True)
class Rewrite:
    """How to resize the nodes of one function, method or module.

    Attributes:
        apply: changes the node's arguments.
        fits: whether ``apply`` can handle the node.
        varies: the axes of its first argument along which the next call may choose other channels.
    """

    apply: Apply
    fits: Fits = lambda node, record: True
    varies: Varies = lambda node, record: frozenset()
