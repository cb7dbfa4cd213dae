"""The data types of the channel analysis: what one run of a graph with labels has shown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pdp_fx.channels.labels import Layer, Reason, Slot, Ties
from pdp_fx.tracing.structure import flat_tensors


@dataclass(frozen=True, eq=False)
class Use:
    """A product of data with a weight, be it a parameter or computed from some.

    Attributes:
        axes: for every axis of the weight its labels, as classes once they are known, or its length where it
            has none; then the labels of each axis of the data for whose every element it is used anew.
        positions: how often each weight is used for each element of such axes, summed over the batch.
    """

    axes: tuple[np.ndarray | int, ...]
    positions: float


@dataclass(frozen=True)
class Contraction:
    """A conv, linear or matmul with a parameter as its weight, or as a part of that.

    Attributes:
        weight: the parameter's qualified name.
        positions: how often each number of the parameter, or of ``part``, is used, summed over the batch; 0
            in a product with other parameters or in training only.
        node: the graph node that does it.
        inputs: the labels of the input channels, or None when they have none.
        across: the labels of each axis of the data for whose every element it is used anew, as classes once
            they are known.
        part: for each axis of the parameter the indices that are used; nothing if it is used as a whole, or
            if they are not known and ``positions`` is a mean.
    """

    weight: str
    positions: float
    node: str
    inputs: Tensor | None
    across: tuple[np.ndarray, ...]
    part: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Production:
    """A parameter axis whose indices become new channels.

    Attributes:
        slot: the axis.
        ids: the labels that become channels; other indices of the axis are cut off before.
        inner: whether it is multiplied with parameters only, so that the result may itself be a weight.
    """

    slot: Slot
    ids: Tensor
    inner: bool


@dataclass(frozen=True)
class StandIn:
    """A computed weight that can be pruned in the place of a parameter of its shape and dtype.

    Attributes:
        parameter: the qualified name of a parameter that only serves to compute this weight.
        node: the name of the graph node that gives the weight.
        sources: the parameters and buffers that it is computed from.
        needed: whether no parameter can be pruned in its place.
        alone: whether single weights of no parameter can, even if channels can.
    """

    parameter: str
    node: str
    sources: frozenset[str]
    needed: bool
    alone: bool


@dataclass(frozen=True)
class NormSite:
    """A node whose statistics run over channels, and which can be given a mask of them.

    Attributes:
        node: the graph node.
        axis: the axis of its input that the channels lie along.
        axes: how many axes its input has.
        ids: the labels along that axis.
        gated: whether the channels of a residual stream stay because of it unless the spec's rule says
            ``through_norms=True``.
        source: the line of the model's code that the node comes from.
        why: the reason why the channels stay if no mask is given.
    """

    node: str
    axis: int
    axes: int
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

    def named(self) -> dict[str, Any]:
        """The arguments by the names in the operation's schema, without those that are left out."""
        names = [argument.name for argument in self.func._schema.arguments]
        return dict(zip(names, self.args, strict=False)) | self.kwargs


@dataclass(frozen=True)
class Sized:
    """Labels that an operation has laid out by sizes or positions in its arguments.

    Attributes:
        before: their layer in the operand.
        after: their layer in the result.
        shaped: whether the operation was given a shape for all of them, and no positions among them.
    """

    before: Layer
    after: Layer
    shaped: bool = False


ALIGNED = 8
"""Grouped products read rows of a multiple of 16 bytes, which are so many numbers in half precision."""

Tainted = tuple[int | None, int, Tensor]
"""A number of channels in the result of a node: its position if that is a shape, else None; the axis of the
channels in the tensor whose size was read; and their labels."""


@dataclass(frozen=True)
class Labelled:
    """The shape of a tensor and the labels it carries."""

    shape: tuple[int, ...]
    layers: tuple[Layer, ...]

    def bare(self) -> Labelled:
        """The same without the layers that the labels were made from."""
        return Labelled(self.shape, tuple(replace(layer, needs=()) for layer in self.layers))


def stored(name: str) -> str:
    """The key of a parameter or buffer among the values of nodes; no node has a dot in its name."""
    return f"self.{name}"


@dataclass
class Record:
    """What one run of the graph has shown.

    Attributes:
        ties: all labels and their ties.
        slots: the labels of every axis of a parameter, buffer or constant that was read.
        shapes: the shape of every parameter and buffer.
        producers: weight axes that produce new channels.
        weighing: parameter axes that are multiplied with data, directly or as part of a computed weight.
        contractions: products of parameters, by name.
        uses: products of data with weights, for counting multiply-accumulates.
        grouped: by node and weight of a convolution, whether each channel is a group of its own.
        unmasked: (slots, labels, reason) where a mask on one of these parameter axes, or of a norm if there
            are none, would make elements 0 that must not be.
        demands: layers that must be 0 where their channel is dropped.
        elsewhere: labels that must stay because of inputs of other sizes, with the reasons (`elsewhere`).
        grids: labels that lie along several axes.
        norms: nodes that normalise over channels, to be given masks.
        parts: labels of parts that are split off or picked out of channels; none may become empty.
        counted: (labels, axis, reason) where the number of labels along the axis must not change.
        values: the shapes and labels of the tensors that each node returned, in order.
        numbers: the numbers that nodes returned.
        resized: nodes whose sizes must be updated when channels are removed.
        taint: for every node that returned numbers, which numbers of channels they depend on.
        masks: nodes that return booleans, which pick where they are true.
        varying: nodes whose result may differ at the next call.
        free_axes: for every shape that was read, the axes whose sizes may then differ, and its rank.
        stand_ins: the computed weights that stand for parameters, by the parameter's name.
        lengths: the parameters whose numbers are lengths of rows of a weight, with how long these rows are.
        reorders: whether an operation put axes into another order, so that the first need not be the batch.
        by_sizes: whether what is done to channels may be something else on inputs of other sizes.
        masked: parameter axes that must be masked because of inputs of other sizes.
        aligned: labels of which a multiple of `ALIGNED` has to stay.
        choices: (node, labels) where channels along an outer axis could be followed or those inside them;
            the labels are those of the outer ones.
        inner: the nodes at which those inside were followed.
        fixed_sizes: what `counts.has_fixed_size` has found so far, by the node's name and the axis.
    """

    ties: Ties = field(default_factory=Ties)
    slots: dict[Slot, Tensor] = field(default_factory=dict[Slot, Tensor])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    producers: list[Production] = field(default_factory=list[Production])
    weighing: set[Slot] = field(default_factory=set[Slot])
    contractions: list[Contraction] = field(default_factory=list[Contraction])
    uses: list[Use] = field(default_factory=list[Use])
    grouped: dict[tuple[str, str], bool] = field(default_factory=dict[tuple[str, str], bool])
    unmasked: list[tuple[frozenset[Slot], Tensor, Reason]] = field(
        default_factory=list[tuple[frozenset[Slot], Tensor, Reason]]
    )
    demands: list[Layer] = field(default_factory=list[Layer])
    elsewhere: list[tuple[np.ndarray, Reason]] = field(default_factory=list[tuple[np.ndarray, Reason]])
    grids: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[NormSite] = field(default_factory=list[NormSite])
    parts: list[Tensor] = field(default_factory=list[Tensor])
    counted: list[tuple[Tensor, int, Reason]] = field(default_factory=list[tuple[Tensor, int, Reason]])
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    values: dict[str, tuple[Labelled, ...]] = field(default_factory=dict[str, "tuple[Labelled, ...]"])
    resized: list[str] = field(default_factory=list[str])
    taint: dict[str, list[Tainted]] = field(default_factory=dict[str, "list[Tainted]"])
    masks: set[str] = field(default_factory=set[str])
    varying: set[str] = field(default_factory=set[str])
    free_axes: dict[str, tuple[frozenset[int], int]] = field(
        default_factory=dict[str, "tuple[frozenset[int], int]"]
    )
    stand_ins: dict[str, StandIn] = field(default_factory=dict[str, StandIn])
    lengths: dict[str, int] = field(default_factory=dict[str, int])
    reorders: bool = False
    by_sizes: bool = False
    masked: frozenset[Slot] = frozenset()
    aligned: list[np.ndarray] = field(default_factory=list[np.ndarray])
    choices: list[tuple[str, np.ndarray]] = field(default_factory=list[tuple[str, np.ndarray]])
    inner: frozenset[str] = frozenset()
    fixed_sizes: dict[tuple[str, int], bool] = field(default_factory=dict[tuple[str, int], bool])

    def values_of(self, given: Any) -> tuple[Labelled, ...]:
        """The tensors that a node returned; none if it returned none, or is no node but a number."""
        return self.values.get(given.name, ()) if isinstance(given, fx.Node) else ()

    def tells_varying(self, node: fx.Node) -> bool:
        """Whether a node is told a number that may be another at the next call."""
        return any(each.name in self.numbers and each.name in self.varying for each in node.all_input_nodes)
