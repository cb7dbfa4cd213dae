"""Computed weights that can be pruned in the place of a parameter.

With weight standardisation, for example, zeros of no parameter become zeros of the weight. The computed value
itself can then be pruned if it has the shape of a parameter that nothing else uses: masks are applied to the
value, and `convert` writes the masked value into that parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from pdp_fx.channels.record import StandIn
from pdp_fx.ops.kinds import attribute
from pdp_fx.tracing.functions import changes_numbers, only_marks
from pdp_fx.tracing.modes import When
from pdp_fx.tracing.structure import are_equal
from pdp_fx.tracing.watch import storage_of
from pdp_fx.weights.sources import asks_kind, computed_with, sources_of, stored_nodes, value_of
from pdp_fx.weights.writes import idle_in_eval, memory_written

SWITCH = When(torch._C._set_grad_enabled)
"""The target of nodes that turn gradients off or on for a training step."""


class Standing:
    """Finds the parameters that computed weights can stand for; used inside a `trial` of the graph module.

    Args:
        gm: the graph module.
        names: the name of every parameter and buffer by its id.
    """

    def __init__(self, gm: fx.GraphModule, names: Mapping[int, str]) -> None:
        self._gm, self._names = gm, names
        self._readers: dict[str, list[fx.Node]] = {}
        self._overwritten: set[fx.Node] = set()
        self._idle = idle_in_eval(gm.graph)
        self._stored = stored_nodes(gm)
        self._marks = {node for node in gm.graph.nodes if only_marks(node) and not node.users}
        steps: list[fx.Node] = []
        for node in gm.graph.nodes:
            for name in self._read_by(node):
                self._readers.setdefault(name, []).append(node)
            if changes_numbers(node) and node not in self._idle:
                self._overwritten.update(node.all_input_nodes)
            elif changes_numbers(node):
                steps.append(node)
        self._steps = memory_written(gm, steps, self._stored)

    def stand_in(self, weight: fx.Node, needed: bool, alone: bool) -> StandIn | None:
        """How a weight can stand for a parameter of its shape that nothing else uses; None if it cannot.

        Args:
            weight: a node that depends on parameters, buffers and constants only.
            needed: as in `StandIn`.
            alone: as in `StandIn`.
        """
        sources = sources_of(weight)
        if not self._overwritten.isdisjoint(sources):
            return None
        if any(asks_kind(node) and node.args[0] not in sources for node in sources):
            return None  # A stored value does not follow the data's dtype.
        value = value_of(self._gm, weight)
        if not isinstance(value, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            return None  # Quantisers return records that act like tensors.
        if not are_equal(value, value_of(self._gm, weight)):
            return None  # It depends on random numbers, so no stored value is right.
        read = {name: tensor for node in sources for name, tensor in self._read_by(node).items()}
        if not self._moves(weight, {storage_of(tensor) for tensor in read.values()}):
            return None
        for name, tensor in read.items():
            alike = isinstance(tensor, nn.Parameter) and tensor.shape == value.shape
            if alike and tensor.dtype == value.dtype and self._only_serves(name, sources):
                return StandIn(name, weight.name, frozenset(read), needed, alone)
        return None

    def _moves(self, weight: fx.Node, memory: set[int]) -> bool:
        """Whether a weight can be computed earlier, with the steps of training that change what it reads."""
        steps = {node for node, written in self._steps.items() if not written.isdisjoint(memory)}
        together = set(computed_with(weight, self._idle))
        others = {node for node in self._idle - steps if changes_numbers(node)}
        own = (self._idle - others).union(sources_of(weight))
        switches = [node for node in together if node.target == SWITCH]
        return not steps or (steps <= together <= own & self._stored and len(switches) % 2 == 0)

    def _only_serves(self, name: str, sources: list[fx.Node]) -> bool:
        """Whether all that reads a tensor, at once or through other nodes, only serves the last source."""
        serving = set(self._readers[name]) - self._idle
        if any(node.op != "get_attr" for node in serving):
            return False
        for node in sources[:-1]:
            if not serving.isdisjoint(node.all_input_nodes):
                serving.add(node)
        inside = self._idle.union(sources, self._marks)
        return serving <= inside and all(user in inside for node in serving for user in node.users)

    def _read_by(self, node: fx.Node) -> dict[str, Tensor]:
        """The parameters and buffers that a node gives or, inside a module, uses."""
        if node.op not in ("get_attr", "call_module"):
            return {}
        found = attribute(self._gm, node.target)
        held = [*found.parameters(), *found.buffers()] if isinstance(found, nn.Module) else [found]
        return {
            self._names[id(each)]: each
            for each in held
            if isinstance(each, Tensor) and id(each) in self._names
        }
