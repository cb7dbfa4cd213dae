"""Which parameters a function uses as its weight: directly, or through a weight that is computed from them.

`passes.find_sites` collects these uses into the list of prunable weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx, nn

from pdp_fx.channels.record import StandIn
from pdp_fx.example_inputs import fresh
from pdp_fx.ops.kinds import attribute
from pdp_fx.ops.products import has_weight, weight_operands
from pdp_fx.tracing.examples import Inputs
from pdp_fx.weights.effects import Effect, effects
from pdp_fx.weights.sources import asks_size, sizes_read, sources_of, stored_nodes
from pdp_fx.weights.stand_in import Standing


@dataclass(frozen=True)
class Use:
    """One use of a parameter as a weight, or as a part of a weight that is computed.

    Attributes:
        node: the name of the graph node that uses it.
        unfit: why its weights cannot be pruned one by one, or the empty string.
        unfit_for_groups: why they cannot be pruned N:M, or the empty string.
        axis: the axis of the parameter along the input channels, or None.
        inner: whether it is multiplied with other parameters only, and not with data.
        computed_axis: the axis of the input channels in the weight that is computed from it, or None.
    """

    node: str
    unfit: str = ""
    unfit_for_groups: str = ""
    axis: int | None = 1
    inner: bool = False
    computed_axis: int | None = None


@dataclass
class ComputedUses:
    """Finds the parameters behind the weights that functions are given; used inside a `trial` of the graph.

    Attributes:
        gm: the graph module.
        names: the name of every parameter and buffer by its id.
        outdated: parameters that training steps write to after they were read, so that a masked value would
            not be up to date.
        inputs: example inputs, or None.
        known: the effects found so far, by the node of a weight and the axis of its input channels.
        used: the weights that are multiplied with data.
    """

    gm: fx.GraphModule
    names: dict[int, str]
    outdated: set[str]
    inputs: Inputs | None
    known: dict[tuple[fx.Node, int | None], dict[str, Effect]] = field(default_factory=dict)
    used: set[fx.Node] = field(default_factory=set[fx.Node])

    def weights_of(self, node: fx.Node) -> list[tuple[str, Use]]:
        """The parameters that ``node`` uses as its weight, or in its weight."""
        if node.op not in ("call_function", "call_method"):
            return []
        inner, operands = node in self._stored, weight_operands(node)
        if not inner:
            self.used.update(weight for weight, _ in operands)
        return [
            (self.names[id(attribute(self.gm, target))], _use(node, weight, axis, effect, inner))
            for weight, axis in operands
            if weight in self._stored or (has_weight(node) and weight in self._cut)
            for target, effect in self._effects(weight, axis).items()
        ]

    def stand_ins(self) -> tuple[StandIn, ...]:
        """The computed weights among those that `weights_of` has seen which can stand for a parameter."""
        met: dict[fx.Node, list[Effect]] = {}
        for (weight, _), found in self.known.items():
            if weight in self.used and weight in self._stored:
                met.setdefault(weight, []).extend(
                    effect
                    for target, effect in found.items()
                    if self.names[id(attribute(self.gm, target))] not in self.outdated
                )
        if not met:
            return ()
        standing = Standing(self.gm, self.names)
        possible = [
            standing.stand_in(weight, not any(e.keeps_zeros for e in found), not any(e.fits for e in found))
            for weight, found in met.items()
        ]
        return tuple(by for by in possible if by is not None)

    @cached_property
    def _stored(self) -> set[fx.Node]:
        return stored_nodes(self.gm)

    @cached_property
    def _cut(self) -> set[fx.Node]:
        """The nodes that also depend on sizes of data, such as parts of a weight that is split by them."""
        if self.inputs is None:
            return set()
        asking = [n for n in self.gm.graph.nodes if asks_size(n) and n not in self._stored]
        return stored_nodes(self.gm, asking) - self._stored

    @cached_property
    def _sizes(self) -> dict[fx.Node, Any]:
        return {} if self.inputs is None else sizes_read(self.gm, fresh(self.inputs))

    def _effects(self, weight: fx.Node, axis: int | None) -> dict[str, Effect]:
        if weight.op == "get_attr":
            stored = attribute(self.gm, weight.target)
            own = isinstance(stored, nn.Parameter)
            return {str(weight.target): Effect(True, True, axis)} if own else {}
        key = (weight, axis)
        if key not in self.known:
            sizes = self._sizes if weight in self._cut else {}
            reads = dict.fromkeys(str(n.target) for n in sources_of(weight, sizes) if n.op == "get_attr")
            matrices = [target for target in reads if _is_matrix(attribute(self.gm, target))]
            self.known[key] = effects(self.gm, weight, matrices, axis, sizes)
        return self.known[key]


def _use(node: fx.Node, weight: fx.Node, axis: int | None, effect: Effect, inner: bool) -> Use:
    where = f"%{weight.name} ({weight.meta.get('source', '')})".replace(" ()", "")
    makes = "makes no zero" if not effect.keeps_zeros else "may make what is no number"
    unfit = f"a zero in it {makes} in the weight that {where} computes for %{node.name}"
    unfit_for_groups = f"no axis of it runs along the input channels of %{node.name}"
    return Use(node.name, "" if effect.fits else unfit, unfit_for_groups, effect.input_axis, inner, axis)


def _is_matrix(tensor: object) -> bool:
    """Whether a tensor is a parameter that is more than a scale for every row."""
    return isinstance(tensor, nn.Parameter) and sum(size > 1 for size in tensor.shape) > 1
