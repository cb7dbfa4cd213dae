"""Find the weights that can be pruned, and the parameters that a mask can be put on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import fx, nn

from pdp_fx.channels.record import StandIn
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import SpecError
from pdp_fx.example_inputs import fresh, trial
from pdp_fx.ops.kinds import attribute, input_axis, kind_of, owned_names
from pdp_fx.ops.products import has_weight, weight_operands
from pdp_fx.raw_reads import RawReads
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.modes import called_module, called_modules
from pdp_fx.weights.effects import Effect, effects
from pdp_fx.weights.sources import asks_size, sizes_read, sources_of, stored_nodes
from pdp_fx.weights.stand_in import Standing
from pdp_fx.weights.writes import idle_in_eval, read_before_written, writes


@dataclass(frozen=True)
class Site:
    """A weight that a conv or linear uses, as it is or after some computation.

    Attributes:
        parameter: its canonical qualified name.
        owner: the name of the module that owns it.
        nodes: the graph nodes that use it as their weight.
        unfit: why its weights cannot be pruned one by one, or the empty string.
        unfit_for_groups: why they cannot be pruned N:M, or the empty string.
        axis: the axis of the parameter along its input channels, where that is known.
    """

    parameter: str
    owner: str
    nodes: tuple[str, ...]
    unfit: str = ""
    unfit_for_groups: str = ""
    axis: int = 1


@dataclass(frozen=True)
class Sites:
    """All prunable weights in graph order, and what can stand for some of the parameters.

    Attributes:
        weights: the prunable weights.
        out_of_reach: parameters that no mask can be put on, with the reason as a relative clause.
        stand_ins: computed weights that can stand for parameters.
        trained: parameters that the model itself writes to while it trains.
    """

    weights: tuple[Site, ...]
    out_of_reach: dict[str, str]
    stand_ins: tuple[StandIn, ...]
    trained: frozenset[str]


@dataclass(frozen=True)
class FindSites(Pass):
    """Leaves a `Sites` in the context."""

    name: ClassVar[str] = "find-sites"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        if ctx.find(Sites) is None:
            with trial(gm):
                ctx.put(_sites(gm, ctx.example_inputs))
        return False

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        if not ctx.get(Sites).weights:
            raise SpecError("the model has no conv or linear weight that can be pruned")


OUTDATED = "the model writes to it while it trains, after it has read it"
"""Why a parameter stays whose masked value would not be up to date."""


def _sites(gm: fx.GraphModule, inputs: Inputs | None) -> Sites:
    names = owned_names(gm)
    uses: dict[str, list[_Use]] = {}
    written, trains = writes(gm, names), idle_in_eval(gm.graph)
    outdated = read_before_written(gm, names, written, trains)
    computed = _Computed(gm, names, outdated, inputs)
    for node in gm.graph.nodes:
        for parameter, use in (*_own_weights(node, gm, names), *computed.weights_of(node)):
            uses.setdefault(parameter, []).append(use)
    stand_ins = computed.stand_ins()
    whole = {name: by for by in stand_ins if by.needed for name in by.sources}
    standing = {by.parameter for by in whole.values()}
    barred = _barred(gm, names, inputs) | dict.fromkeys(outdated - standing, OUTDATED)
    weights = tuple(
        _site(name, gm.get_parameter(name).ndim, found, whole.get(name), barred.get(name))
        for name, found in uses.items()
    )
    trained = frozenset(name for node, found in written.items() if node in trains for name in found)
    always = {
        name: f"which %{node.name} writes to"
        for node, found in written.items()
        if node not in trains
        for name in found
    }
    late = dict.fromkeys(outdated, f"as {OUTDATED}")
    return Sites(weights, late | always | _used_inside(gm, names), stand_ins, trained)


@dataclass(frozen=True)
class _Use:
    """One use of a parameter as a weight, or in one; with the reasons of `Site`.

    Attributes:
        axis: the axis of the parameter along the input channels, or None.
        inner: whether it is multiplied with other parameters, and not with data.
        standing: that axis of the weight that is computed from it, or None.
    """

    node: str
    unfit: str = ""
    unfit_for_groups: str = ""
    axis: int | None = 1
    inner: bool = False
    standing: int | None = None


def _site(parameter: str, axes: int, uses: list[_Use], whole: StandIn | None, barred: str | None) -> Site:
    """What holds for one use holds for the weight; a product of parameters may be a weight itself.

    ``whole`` is the computed weight that is pruned in the place of the parameters behind it; ``barred`` is
    why no weight of this parameter can be pruned, whatever uses it.
    """
    if barred is not None:
        uses = [replace(use, unfit=barred) for use in uses]
        whole = None
    uses = [use for use in uses if not use.inner] or uses
    nodes = tuple(dict.fromkeys(use.node for use in uses))
    if whole is not None and parameter == whole.parameter:
        uses = [replace(use, unfit="", axis=use.standing) for use in uses]
    elif whole is not None:
        why = f"the weight that %{whole.node} computes from it is pruned instead, as {whole.parameter}"
        uses = [replace(use, unfit=use.unfit and why) for use in uses]
    unfit = min((use.unfit for use in uses), key=bool)
    along = {use.axis % axes for use in uses if use.axis is not None and not use.unfit}
    axis = 1 if 1 in along or not along else min(along)
    unfit_for_groups = "" if along else next(use.unfit or use.unfit_for_groups for use in uses)
    return Site(parameter, parameter.rpartition(".")[0], nodes, unfit, unfit_for_groups, axis)


def _own_weights(node: fx.Node, gm: fx.GraphModule, names: dict[int, str]) -> list[tuple[str, _Use]]:
    """The weights that the modules inside ``node`` own and use."""
    called = called_module(node)
    if called is None:
        return []
    found: list[tuple[str, _Use]] = []
    for layer in layers_in(gm.get_submodule(called)):
        kind = kind_of(layer)
        for name in kind.weights_of(layer) if kind is not None else ():
            # The weight of a module under torch.nn.utils.weight_norm is computed, and no parameter.
            known = names.get(id(getattr(layer, name)))
            if known is not None:
                axis = input_axis(layer)
                mixed = axis == 0 and getattr(layer, "groups", 1) != 1
                found.append((known, _Use(node.name, "", _MIXED, None if mixed else axis)))
    return found


def _barred(gm: fx.GraphModule, names: dict[int, str], inputs: Inputs | None) -> dict[str, str]:
    """Parameters that stay, with the reasons.

    They are not real numbers, or modules kept whole use them other than as weights of known layers, or other
    than by calling these.
    """
    found = {
        name: f"its numbers are {parameter.dtype}, and only real ones can be ranked"
        for name, parameter in gm.named_parameters()
        if not parameter.is_floating_point()
    }
    called = {target: gm.get_submodule(target) for target in called_modules(gm.graph)}
    wholes = {target: module for target, module in called.items() if kind_of(module) is None}
    for target, module in wholes.items():
        for layer in module.modules():
            kind = kind_of(layer)
            known = kind.weights_of(layer) if kind is not None else ()
            for name, tensor in layer.named_parameters(recurse=False):
                if name not in known:
                    why = f"{target} uses it inside itself, too, out of reach of a mask"
                    found.setdefault(names[id(tensor)], why)
    inside = [layer for module in wholes.values() for layer in layers_in(module)]
    if inside and inputs is not None:
        args, kwargs = fresh(inputs)
        raw = RawReads(wholes.values(), inside).run(lambda: gm(*args, **kwargs))
        why = "a module that is kept whole reads it without calling its layer, out of reach of a mask"
        found = {names[parameter]: why for parameter in raw} | found
    return found


_MIXED = "it is a transposed convolution in groups, whose weight has the input channels of all on one axis"


@dataclass
class _Computed:
    """Finds the parameters behind the weights that functions are given.

    Attributes:
        outdated: parameters whose masked values would not be up to date.
        inputs: example inputs, where there are some.
        used: the weights that meet data.
    """

    gm: fx.GraphModule
    names: dict[int, str]
    outdated: set[str]
    inputs: Inputs | None
    known: dict[tuple[fx.Node, int | None], dict[str, Effect]] = field(default_factory=dict)
    used: set[fx.Node] = field(default_factory=set[fx.Node])

    def weights_of(self, node: fx.Node) -> list[tuple[str, _Use]]:
        """The parameters that ``node`` uses as its weight, or in its weight."""
        if node.op not in ("call_function", "call_method"):
            return []
        inner, operands = self._is_stored(node), weight_operands(node)
        if not inner:
            self.used.update(weight for weight, _ in operands)
        return [
            (self.names[id(attribute(self.gm, target))], _use(node, weight, axis, effect, inner))
            for weight, axis in operands
            if self._is_stored(weight) or (has_weight(node) and weight in self._cut)
            for target, effect in self._effects(weight, axis).items()
        ]

    def stand_ins(self) -> tuple[StandIn, ...]:
        """The computed weights that have been met and can stand for a parameter."""
        met: dict[fx.Node, bool] = {}
        for (weight, _), found in self.known.items():
            if weight in self.used and self._is_stored(weight):
                met[weight] = met.get(weight, False) or any(
                    effect.keeps_zeros and self.names[id(attribute(self.gm, target))] not in self.outdated
                    for target, effect in found.items()
                )
        if not met:
            return ()
        standing = Standing(self.gm, self.names)
        possible = [standing.stand_in(weight, not fit) for weight, fit in met.items()]
        return tuple(by for by in possible if by is not None)

    def _is_stored(self, node: fx.Node) -> bool:
        return node in self._stored

    @cached_property
    def _stored(self) -> set[fx.Node]:
        return stored_nodes(self.gm)

    @cached_property
    def _cut(self) -> set[fx.Node]:
        """What depends on sizes of data besides, as the parts of a weight that they divide."""
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
            return {str(weight.target): Effect(True, axis)} if own else {}
        key = (weight, axis)
        if key not in self.known:
            sizes = self._sizes if weight in self._cut else {}
            reads = dict.fromkeys(str(n.target) for n in sources_of(weight, sizes) if n.op == "get_attr")
            matrices = [target for target in reads if _is_matrix(attribute(self.gm, target))]
            self.known[key] = effects(self.gm, weight, matrices, axis, sizes)
        return self.known[key]


def _use(node: fx.Node, weight: fx.Node, axis: int | None, effect: Effect, inner: bool) -> _Use:
    where = f"%{weight.name} ({weight.meta.get('source', '')})".replace(" ()", "")
    unfit = f"a zero in it is no zero of the weight that {where} computes for %{node.name}"
    unfit_for_groups = f"no axis of it runs along the input channels of %{node.name}"
    return _Use(
        node.name, "" if effect.keeps_zeros else unfit, unfit_for_groups, effect.input_axis, inner, axis
    )


def _is_matrix(tensor: object) -> bool:
    """Whether a tensor is a parameter that is more than a scale for every row."""
    return isinstance(tensor, nn.Parameter) and sum(size > 1 for size in tensor.shape) > 1


def layers_in(called: nn.Module) -> list[nn.Module]:
    """The known layers that a module runs: itself, or those inside one that is kept whole."""
    return [layer for layer in called.modules() if kind_of(layer) is not None]


def _given_to(node: fx.Node, gm: fx.GraphModule) -> fx.Node | None:
    """The function that the module ``node`` is handed to, other than to be called or asked."""
    if node.op != "get_attr" or not isinstance(attribute(gm, node.target), nn.Module):
        return None
    return next((u for u in node.users if u.target is not getattr and called_module(u) != node.target), None)


def _used_inside(gm: fx.GraphModule, names: dict[int, str]) -> dict[str, str]:
    """Parameters that something which is kept whole uses, or may use, with the reasons."""
    found: dict[str, str] = {}
    for node in gm.graph.nodes:
        user, called = _given_to(node, gm), called_module(node)
        if user is not None:
            inside = gm.get_submodule(str(node.target)).parameters()
            why = f"as %{user.name} is given the whole of {node.target}"
            found |= {names[id(tensor)]: why for tensor in inside}
        if called is not None:
            module = gm.get_submodule(called)
            kind = kind_of(module)
            reachable = kind.given_to(module) if kind is not None else ()
            why = f"which {called} uses inside itself"
            found |= {names[id(p)]: why for name, p in module.named_parameters() if name not in reachable}
    return found
