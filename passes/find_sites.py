"""Find the weights that can be pruned one by one or N:M, and the parameters that no mask can be put on.

A *site* is such a weight with the nodes that use it. The first pass of `prepare`; later passes read `Sites`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx, nn

from pdp_fx.channels.record import StandIn
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import SpecError
from pdp_fx.example_inputs import fresh, trial
from pdp_fx.ops.kinds import PRUNABLE, attribute, input_axis, kind_of, owned_names
from pdp_fx.raw_reads import READS_RAW, RawReads, named_in_code
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.leaves import has_hooks
from pdp_fx.tracing.modes import called_module, called_modules
from pdp_fx.tracing.objects import MethodOf
from pdp_fx.weights.uses import ComputedUses, Use
from pdp_fx.weights.writes import idle_in_eval, read_before_written, writes, written_by_element


@dataclass(frozen=True)
class Site:
    """A parameter that a conv, linear or matmul uses as its weight, directly or after some computation.

    Attributes:
        parameter: its canonical qualified name.
        owner: the name of the module that owns it.
        nodes: the names of the graph nodes that use it as their weight.
        unfit: why its weights cannot be pruned one by one, or the empty string.
        unfit_for_groups: why they cannot be pruned N:M, or the empty string.
        axis: the axis of the parameter along the input channels; 1 if that is not known.
    """

    parameter: str
    owner: str
    nodes: tuple[str, ...]
    unfit: str = ""
    unfit_for_groups: str = ""
    axis: int = 1


@dataclass(frozen=True)
class Sites:
    """What is known of the model's weights.

    Attributes:
        weights: all sites, in graph order.
        out_of_reach: parameters that no mask can be put on, with the reason as a relative clause.
        stand_ins: computed weights that can be pruned in the place of a parameter.
        trained: parameters that the model's own training steps write to.
        element_by_element: parameters that it writes to in eval mode, too, so that masks do not matter.
        read_raw: parameters that modules kept whole, or hooks, read without calling the layers that own them.
    """

    weights: tuple[Site, ...]
    out_of_reach: dict[str, str]
    stand_ins: tuple[StandIn, ...]
    trained: frozenset[str]
    element_by_element: frozenset[str]
    read_raw: frozenset[str]


@dataclass(frozen=True)
class FindSites(Pass):
    """Puts a `Sites` into the context, unless there is one."""

    name: ClassVar[str] = "find-sites"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        if ctx.find(Sites) is None:
            with trial(gm):
                ctx.put(_sites(gm, ctx.example_inputs))
        return False

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        sites = ctx.get(Sites)
        if not sites.weights:
            matrices = [name for name, tensor in gm.named_parameters() if tensor.ndim > 1]
            missed = given_to_unknown(gm, ctx) | sites.out_of_reach
            reasons = [
                f"\n  no mask can be put on {name}, {missed[name]}" for name in matrices if name in missed
            ]
            vectors = ", ".join(name for name, _ in gm.named_parameters())
            if vectors and not matrices:
                reasons = [f"\n  its parameters have one axis at most: {vectors}"]
            raise SpecError(f"the model has no conv or linear weight that can be pruned{''.join(reasons)}")


def given_to_unknown(gm: fx.GraphModule, ctx: Context) -> dict[str, str]:
    """Weights that the graph reads and gives to no product, as layers of the user's own classes may do.

    Returns:
        The reasons why they are no sites, as relative clauses, by the names of the parameters.
    """
    sites, names = ctx.get(Sites), owned_names(gm)
    read = {id(attribute(gm, node.target)) for node in gm.graph.find_nodes(op="get_attr") if node.users}
    used = {site.parameter for site in sites.weights}.union(*(by.sources for by in sites.stand_ins))
    weights = (
        names[id(parameter)]
        for module in ctx.modules.values()
        if isinstance(module, PRUNABLE)
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight") and id(parameter) in read and names[id(parameter)] not in used
    )
    why = "which no conv, linear or matmul is seen to use, nor what is computed of parameters alone"
    return {name: sites.out_of_reach.get(name, why) for name in weights}


OUTDATED = "the model writes to it after it has read it"
"""Why a parameter stays whose masked value would not follow the write."""

WRITTEN = "the model writes to it in eval mode, too, by numbers that a mask would change"
"""Why a parameter stays that is not the same whether it is masked before it is written or after."""


def _sites(gm: fx.GraphModule, inputs: Inputs | None) -> Sites:
    names = owned_names(gm)
    uses: dict[str, list[Use]] = {}
    written, trains = writes(gm, names), idle_in_eval(gm.graph)
    element_by_element = written_by_element(gm, written, trains)
    outdated = read_before_written(gm, names, written, trains, element_by_element)
    computed = ComputedUses(gm, names, outdated, inputs)
    for node in gm.graph.nodes:
        for parameter, use in (*_own_weights(node, gm, names), *computed.weights_of(node)):
            uses.setdefault(parameter, []).append(use)
    stand_ins = computed.stand_ins()
    instead = {name: by for by in stand_ins if by.alone for name in by.sources}
    standing = {by.parameter for by in instead.values()}
    changed = {
        name: f"which %{node.name} writes to"
        for node, found in written.items()
        if node not in trains
        for name in found - element_by_element
    }
    raw = _read_raw(gm, names, inputs)
    barred = dict.fromkeys(raw, _RAW) | _barred(gm, names) | dict.fromkeys(outdated - standing, OUTDATED)
    barred |= dict.fromkeys(changed, WRITTEN)
    weights = tuple(
        _site(name, gm.get_parameter(name).ndim, found, instead.get(name), barred.get(name))
        for name, found in uses.items()
    )
    trained = frozenset(name for node, found in written.items() if node in trains for name in found)
    late = dict.fromkeys(outdated, f"as {OUTDATED}")
    out_of_reach = late | changed | dict.fromkeys(raw, f"as {_RAW}") | _used_inside(gm, names)
    return Sites(weights, out_of_reach, stand_ins, trained, element_by_element, raw)


def _site(parameter: str, axes: int, uses: list[Use], instead: StandIn | None, barred: str | None) -> Site:
    """The site of a parameter. It can be pruned if one of its uses allows it.

    Args:
        parameter: its name.
        axes: its number of axes.
        uses: all its uses. Those that multiply it with other parameters only do not count if there are
            others.
        instead: the computed weight that is pruned in the place of all parameters behind it, or None.
        barred: why no weight of this parameter can be pruned, whatever uses it, or None.
    """
    if barred is not None:
        uses = [replace(use, unfit=barred) for use in uses]
        instead = None
    uses = [use for use in uses if not use.inner] or uses
    nodes = tuple(dict.fromkeys(use.node for use in uses))
    if instead is not None and parameter == instead.parameter:
        uses = [replace(use, unfit="", axis=use.computed_axis) for use in uses]
    elif instead is not None:
        why = f"the weight that %{instead.node} computes from it is pruned instead, as {instead.parameter}"
        uses = [replace(use, unfit=use.unfit and why) for use in uses]
    unfit = min((use.unfit for use in uses), key=bool)
    along = {use.axis % axes for use in uses if use.axis is not None and not use.unfit}
    axis = 1 if 1 in along or not along else min(along)
    unfit_for_groups = "" if along else next(use.unfit or use.unfit_for_groups for use in uses)
    unfit_for_groups = unfit_for_groups or (_VECTOR if axes < 2 else "")
    return Site(parameter, parameter.rpartition(".")[0], nodes, unfit, unfit_for_groups, axis)


def _own_weights(node: fx.Node, gm: fx.GraphModule, names: dict[int, str]) -> list[tuple[str, Use]]:
    """The weights of the layers that ``node`` runs, each with this use."""
    called = called_module(node)
    if called is None:
        return []
    found: list[tuple[str, Use]] = []
    for layer in layers_in(gm, gm.get_submodule(called)):
        kind = kind_of(layer)
        for name in kind.weights_of(layer) if kind is not None else ():
            # Under torch.nn.utils.weight_norm the attribute is a computed tensor, which has no name.
            known = names.get(id(getattr(layer, name)))
            if known is not None:
                axis = input_axis(layer)
                mixed = axis == 0 and getattr(layer, "groups", 1) != 1
                found.append((known, Use(node.name, "", _MIXED, None if mixed else axis)))
    return found


def _barred(gm: fx.GraphModule, names: dict[int, str]) -> dict[str, str]:
    """Parameters whose weights cannot be pruned, whatever uses them, with the reasons."""
    kept_whole = {target: module for target, module in _called(gm).items() if kind_of(module) is None}
    not_real = {
        name: f"its numbers are {parameter.dtype}, and only real ones can be ranked"
        for name, parameter in gm.named_parameters()
        if not parameter.is_floating_point()
    }
    in_methods = {
        name: _OUT_OF_REACH.format(target)
        for target, module in kept_whole.items()
        for name in set(_used_by_method(module, gm, names)) - _of_own_layers(module, gm, names)
    }
    # Of several reasons for one parameter, that of the last operand is kept.
    return _used_otherwise(kept_whole, names) | in_methods | not_real


def _called(gm: fx.GraphModule) -> dict[str, nn.Module]:
    return {target: gm.get_submodule(target) for target in called_modules(gm.graph)}


_OUT_OF_REACH = "{} uses it inside itself, too, out of reach of a mask"


def _used_by_method(module: nn.Module, gm: fx.GraphModule, names: dict[int, str]) -> list[str]:
    """The parameters that a method that is kept whole uses, if the module is one."""
    if not isinstance(module, MethodOf):
        return []
    parameters = dict(gm.named_parameters(remove_duplicate=False))
    return [names[id(parameters[name])] for name in module.uses if name in parameters]


def _of_own_layers(module: nn.Module, gm: fx.GraphModule, names: dict[int, str]) -> set[str | None]:
    """The weights of the layers that run in a method only, where masks reach them."""
    if not isinstance(module, MethodOf):
        return set()
    layers = [(layer, kind_of(layer)) for layer in layers_in(gm, module)]
    return {
        names.get(id(getattr(layer, name)))
        for layer, kind in layers
        if kind is not None
        for name in kind.weights_of(layer)
    }


def _used_otherwise(kept_whole: Mapping[str, nn.Module], names: dict[int, str]) -> dict[str, str]:
    """The parameters in modules kept whole that are not weights of known layers, with the reasons."""
    found: dict[str, str] = {}
    for target, module in kept_whole.items():
        why = _OUT_OF_REACH.format(target)
        for layer in module.modules():
            kind = kind_of(layer)
            known = kind.weights_of(layer) if kind is not None else ()
            others = [p for name, p in layer.named_parameters(recurse=False) if name not in known]
            found = dict.fromkeys((names[id(parameter)] for parameter in others), why) | found
    return found


def _read_raw(gm: fx.GraphModule, names: dict[int, str], inputs: Inputs | None) -> frozenset[str]:
    """The parameters that modules kept whole, or hooks, read without calling the layers that own them."""
    called = _called(gm).values()
    wholes = [module for module in called if kind_of(module) is None]
    layers = [layer for module in wholes for layer in layers_in(gm, module)]
    layers += [layer for layer in called if kind_of(layer) is not None and has_hooks(layer)]
    named = [parameter for module in wholes for parameter in _named_in_code(gm, module)]
    found = {id(parameter) for parameter in named}
    if inputs is not None and layers:
        args, kwargs = fresh(inputs)
        found |= RawReads(wholes, layers, gm.parameters()).run(lambda: gm(*args, **kwargs)).keys()
    return frozenset(names[parameter] for parameter in found)


def _named_in_code(gm: fx.GraphModule, whole: nn.Module) -> list[nn.Parameter]:
    """The parameters of layers that the code of a module or method that is kept whole names."""
    layers = layers_in(gm, whole)
    if isinstance(whole, MethodOf):
        return named_in_code(whole.owner, layers, whole.method)
    return named_in_code(whole, layers)


_RAW = f"{READS_RAW.format('it')}, out of reach of a mask"


_VECTOR = "it is a vector, which has no rows of groups along input channels"
_MIXED = "it is a transposed convolution in groups, whose weight has the input channels of all on one axis"


def layers_in(gm: nn.Module, called: nn.Module) -> list[nn.Module]:
    """The known layers that a module of ``gm`` runs: itself, or those inside one that is kept whole.

    Of a method that is kept whole, those that run nowhere else.
    """
    run = [gm.get_submodule(path) for path in called.layers] if isinstance(called, MethodOf) else [called]
    return [layer for module in run for layer in module.modules() if kind_of(layer) is not None]


def _given_to(node: fx.Node, gm: fx.GraphModule) -> fx.Node | None:
    """The node that is given the module ``node`` for more than to call it or read an attribute, or None."""
    if node.op != "get_attr" or not isinstance(attribute(gm, node.target), nn.Module):
        return None
    return next((u for u in node.users if u.target is not getattr and called_module(u) != node.target), None)


def _used_inside(gm: fx.GraphModule, names: dict[int, str]) -> dict[str, str]:
    """Parameters that a function or module that is kept whole uses, or may use, with the reasons."""
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
            found |= dict.fromkeys(_used_by_method(module, gm, names), why)
            found |= {names[id(p)]: why for name, p in module.named_parameters() if name not in reachable}
    return found
