"""The numbers that a graph will compute once channels are removed."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx
from torch.fx.node import map_aggregate

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.record import Labelled
from pdp_fx.tracing.functions import NUMBER_HOMES


class SmallNumbers:
    """Follows sizes that are read off tensors through arithmetic.

    Args:
        found: the channel structure, with the old results of all nodes.
        gone: for every class whether it is dropped.
        changing: the names of the nodes whose number depends on how many channels there are.
    """

    def __init__(self, found: ChannelMap, gone: np.ndarray, changing: frozenset[str]) -> None:
        self._found = found
        self._gone = gone
        self._changing = changing
        self._known: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """The new number of ``node``, or None if it is not known."""
        if node.name not in self._changing:
            return self._found.numbers.get(node.name)
        if node not in self._known:
            source = node.args[0] if node.args else None
            given = self._found.given(source) if isinstance(source, fx.Node) else None
            self._known[node] = self._sizes(node, given[0]) if given else self._computed(node)
        return self._known[node]

    def repeats(self, node: fx.Node) -> bool:
        """Whether a node reads the size of an axis with repeated labels, as of channels times batch."""
        source = node.args[0] if node.args else None
        given = self._found.given(source) if isinstance(source, fx.Node) and node.target == "size" else None
        axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if not given or axis is None:
            return False
        along = frozenset({axis % len(given[0].shape)})
        ids = [layer.ids for layer in given[0].layers if layer.support == along]
        return any(len(labels.unique()) < labels.numel() for labels in ids)

    def _sizes(self, node: fx.Node, read: Labelled) -> Any:
        kept = self._found.kept(read, self._gone)
        sizes = tuple(kept.size(axis) for axis in range(len(read.shape)))
        if node.target is getattr:
            return sizes if node.args[1] == "shape" else None
        axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return None if node.target != "size" else sizes if axis is None else sizes[axis]

    def _computed(self, node: fx.Node) -> Any:
        function: Any = node.target
        if node.op != "call_function" or getattr(function, "__module__", "") not in NUMBER_HOMES:
            return None
        args, kwargs = map_aggregate((node.args, node.kwargs), self._operand)
        if any(self.value(source) is None for source in node.all_input_nodes):
            return None
        return function(*args, **kwargs)

    def _operand(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, fx.Node) else leaf
