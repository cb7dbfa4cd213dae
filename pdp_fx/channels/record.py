"""What one run of a graph with labels has shown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pdp_fx.channels.labels import Layer, Reason, Slot, Ties
from pdp_fx.tracing.structure import flat_tensors


@dataclass(frozen=True)
class Contraction:
    """A conv, linear or matmul with a parameter as its weight.

    Attributes:
        weight: the parameter's qualified name.
        positions: how often each weight is used, summed over the batch; less than once where only a
            part of the parameter is used.
        node: the graph node that does it.
        inputs: the labels of the input channels, or None when they have none.
    """

    weight: str
    positions: float
    node: str
    inputs: Tensor | None


@dataclass(frozen=True)
class Production:
    """A parameter axis whose indices become new channels.

    Attributes:
        slot: the axis.
        ids: the labels that become channels; other indices of the axis are cut off before.
        inner: whether it meets parameters only, so that what comes of it may be a weight itself.
    """

    slot: Slot
    ids: Tensor
    inner: bool


@dataclass(frozen=True)
class StandIn:
    """A computed weight that can stand for a parameter of its shape and dtype.

    Attributes:
        parameter: the qualified name of a parameter that serves to compute this weight only.
        node: the name of the graph node that gives the weight.
        sources: the parameters and buffers that it is computed from.
        needed: whether no parameter can be pruned in its place.
    """

    parameter: str
    node: str
    sources: frozenset[str]
    needed: bool


@dataclass(frozen=True)
class NormSite:
    """A node whose statistics run over channels, and which can be given a mask of them.

    Attributes:
        node: the graph node.
        axis: the axis of its input that the channels lie along.
        ids: the labels along that axis.
        gated: whether a residual stream goes through it only if the spec says so.
        source: the line of code that made the node.
        why: what keeps the channels without a mask.
    """

    node: str
    axis: int
    ids: Tensor
    gated: bool
    source: str
    why: str


@dataclass(frozen=True)
class Call:
    """One aten operation that has just run."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def tensors(self) -> list[Tensor]:
        """All tensor arguments, in order."""
        return [*flat_tensors(self.args), *flat_tensors(self.kwargs)]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True)
class Sized:
    """Labels that an operation has laid out by sizes or places it was given.

    Attributes:
        before: where they were.
        after: where they are.
        shaped: whether it was given a shape for all of them, and no places among them.
    """

    before: Layer
    after: Layer
    shaped: bool = False


Tainted = tuple[int | None, int, Tensor]
"""A number that depends on how many channels there are: its place in a shape, and the axis of labels."""


@dataclass(frozen=True)
class Labelled:
    """The shape of a tensor and the labels it carries."""

    shape: tuple[int, ...]
    layers: tuple[Layer, ...]

    def bare(self) -> Labelled:
        """The same without what the labels were made from."""
        return Labelled(self.shape, tuple(replace(layer, needs=()) for layer in self.layers))


def stored(name: str) -> str:
    """The key of a parameter or buffer among the values of nodes; no node has a dot in its name."""
    return f"self.{name}"


@dataclass
class Record:
    """What one run of the graph has shown.

    Attributes:
        ties: all labels and their ties.
        slots: the labels of every parameter and buffer axis that was read.
        shapes: the shape of every parameter and buffer.
        producers: weight axes that make new channels.
        weighing: parameter axes that, as they are or in a computed weight, are multiplied with data.
        contractions: uses of weights.
        grouped: by node and weight of a convolution, whether each channel is a group of its own.
        demands: layers that must be 0 where their channel is dropped.
        grids: labels that lie along several axes.
        norms: nodes that normalise over channels, to be given masks.
        parts: labels of parts that are cut out of channels; none may become empty.
        counted: labels whose number along an axis must not change, with the reason.
        values: the tensors that each node gave, in order.
        numbers: the numbers that nodes gave.
        resized: nodes whose sizes have to be written anew when channels go.
        taint: for every number node, which labels its value counts.
        varying: nodes that may give something else at the next call.
        free_axes: for every shape that was read, the axes whose sizes may be others then, and its rank.
        stand_ins: the computed weights that stand for parameters, by the parameter.
    """

    ties: Ties = field(default_factory=Ties)
    slots: dict[Slot, Tensor] = field(default_factory=dict[Slot, Tensor])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    producers: list[Production] = field(default_factory=list[Production])
    weighing: set[Slot] = field(default_factory=set[Slot])
    contractions: list[Contraction] = field(default_factory=list[Contraction])
    grouped: dict[tuple[str, str], bool] = field(default_factory=dict[tuple[str, str], bool])
    demands: list[Layer] = field(default_factory=list[Layer])
    grids: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[NormSite] = field(default_factory=list[NormSite])
    parts: list[Tensor] = field(default_factory=list[Tensor])
    counted: list[tuple[Tensor, int, Reason]] = field(default_factory=list[tuple[Tensor, int, Reason]])
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    values: dict[str, tuple[Labelled, ...]] = field(default_factory=dict[str, "tuple[Labelled, ...]"])
    resized: list[str] = field(default_factory=list[str])
    taint: dict[str, list[Tainted]] = field(default_factory=dict[str, "list[Tainted]"])
    varying: set[str] = field(default_factory=set[str])
    free_axes: dict[str, tuple[frozenset[int], int]] = field(
        default_factory=dict[str, "tuple[frozenset[int], int]"]
    )
    stand_ins: dict[str, StandIn] = field(default_factory=dict[str, StandIn])
