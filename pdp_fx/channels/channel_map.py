"""`ChannelMap`, the channel structure of a graph: the result of the analysis, read by passes and reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, fx

from pdp_fx.channels.kept import Kept
from pdp_fx.channels.labels import Reason, Slot
from pdp_fx.channels.record import Contraction, Labelled, NormSite, StandIn, Use, stored
from pdp_fx.errors import PassError
from pdp_fx.tracing.skipping import kept_unless


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that the same weights produce, and that are ranked against each other.

    Attributes:
        name: the module that produces them first, numbered where it produces several groups.
        classes: the class of each channel, shape (width,), in the order of the first producer.
        producers: the weight axes that produce these channels.
        members: every axis of a parameter, buffer or constant that carries some of them.
        reasons: why the channels must stay; empty if they can be removed.
        parts: the positions of channels that are split off or picked out; one channel of each part must stay.
        streams: why these channels stay unless their rule allows residual streams to go.
    """

    name: str
    classes: np.ndarray
    producers: tuple[Slot, ...]
    members: tuple[Slot, ...]
    reasons: tuple[Reason, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    streams: tuple[Reason, ...] = ()

    @property
    def width(self) -> int:
        """Number of channels."""
        return len(self.classes)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelGroup:
        """A group never changes, so a copied model shares it."""
        return self


@dataclass(frozen=True, repr=False)
class ChannelMap:
    """The channel structure of one graph.

    Attributes:
        groups: prunable groups, in graph order.
        frozen: groups whose channels stay, each with its reasons.
        slots: the class of every index of every axis of a parameter, buffer or constant.
        ids: the label of every index of these axes.
        met: for every label whether its elements meet those of another label in an operation.
        stays: the classes that must stay.
        grouped: by node and weight of a convolution, whether each channel is a group of its own.
        masked: the parameter axes that must be masked so that dropped channels are 0.
        norms: nodes that normalise over channels, to be given masks.
        contractions: where parameters are multiplied.
        uses: products of data with weights, for counting; the labels of their axes are classes.
        shapes: the shape of every parameter and buffer.
        values: the shapes and labels of the tensors that each node returned.
        resized: the nodes whose sizes must be updated when channels are removed.
        numbers: the numbers that nodes returned.
        taint: for every node that returned numbers, the labels whose count they depend on.
        batch: the size of the first axis of the first input tensor.
        classes: the class of every label.
        stand_ins: the computed weights that stand for parameters, by the parameter's name.
        lengths: as in `Record`.
        by_sizes: whether what is done to channels may be something else on inputs of other sizes.
        alone: whether an axis of the example has one index, so that one of channels may hold another, too.
        aligned: the classes of which a multiple of `ALIGNED` has to stay.
        inner: the nodes at which channels inside others, such as heads, were followed instead of those.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: tuple[ChannelGroup, ...]
    slots: dict[Slot, np.ndarray]
    ids: dict[Slot, np.ndarray]
    met: np.ndarray
    stays: np.ndarray
    grouped: dict[tuple[str, str], bool]
    masked: frozenset[Slot]
    norms: tuple[NormSite, ...]
    contractions: tuple[Contraction, ...]
    uses: tuple[Use, ...]
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, tuple[Labelled, ...]]
    resized: tuple[str, ...]
    numbers: dict[str, Any]
    taint: dict[str, list[Tensor]]
    batch: int
    classes: np.ndarray
    stand_ins: dict[str, StandIn]
    lengths: dict[str, int]
    by_sizes: bool
    alone: bool
    aligned: np.ndarray
    inner: frozenset[str]

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelMap:
        """A map never changes, so a copied model shares it."""
        return self

    def abridged(self, gm: fx.GraphModule) -> ChannelMap:
        """The map without the values of nodes, except those that a resized node reads or returns.

        In ``gm`` a mask may lie between a node and the parameter that it reads, so all parameters are kept.
        """
        nodes = {node.name: node for node in gm.graph.nodes}
        wanted = list(gm.graph.find_nodes(op="get_attr"))
        for name in self.resized:
            wanted += [nodes[name], *nodes[name].all_input_nodes]
        wanted += [source for name in self.taint for source in nodes[name].all_input_nodes]
        for node in wanted:
            # Eval mode skips nothing, and reads what is made.
            if node.target is kept_unless and isinstance(node.args[2], fx.Node):
                wanted.append(node.args[2])
        values = {_key(node): given for node in wanted if (given := self.given(node)) is not None}
        bare = {key: tuple(value.bare() for value in given) for key, given in values.items()}
        return replace(self, values=bare)

    def given(self, node: fx.Node) -> tuple[Labelled, ...] | None:
        """The tensors that a node returned, or None if this map does not know the node."""
        return self.values.get(_key(node), self.values.get(node.name))

    def norms_by_group(self) -> dict[int, list[NormSite]]:
        """The norms that run over channels of each group, by the group's first class."""
        first = np.full(len(self.classes), -1)
        for group in (*self.groups, *self.frozen):
            first[group.classes] = group.classes[0]
        found: dict[int, list[NormSite]] = {}
        for site in self.norms:
            for group in np.unique(first[self.classes[site.ids.numpy()]]).tolist():
                found.setdefault(group, []).append(site)
        return found

    def covers(self, gm: fx.GraphModule) -> bool:
        """Whether all inputs of resized nodes are known, although passes may have inserted nodes."""
        resized = frozenset(self.resized)
        read = {source for node in gm.graph.nodes if node.name in resized for source in node.all_input_nodes}
        return all(self.given(source) is not None for source in read)

    def kept(self, value: Labelled, gone: np.ndarray) -> Kept:
        """Which indices of a tensor stay when classes are dropped.

        Args:
            value: the tensor's shape and labels.
            gone: for every class whether it is dropped.

        Raises:
            PassError: what stays is not a rectangle.
        """
        stays: dict[int, np.ndarray] = {}
        for layer in value.layers:
            grid = ~gone[self.classes[layer.ids.numpy()]]
            for axis in layer.support:
                others = tuple(other for other in range(grid.ndim) if other != axis)
                stays[axis] = np.asarray(grid.any(axis=others))
            if int(grid.sum()) != int(np.prod([stays[axis].sum() for axis in layer.support])):
                raise PassError(
                    f"the channels that stay in a tensor of shape {value.shape} do not form a rectangle; "
                    "this is a bug of this package"
                )
        return Kept(value, stays)


def _key(node: fx.Node) -> str:
    """The key of a node in `values`: its name, or for a read of a parameter the parameter's key."""
    return stored(str(node.target)) if node.op == "get_attr" else node.name
