"""Find the weights that can be pruned, and the parameters that a mask can be put on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import SpecError
from pdp_fx.ops.kinds import WEIGHT_ARGUMENTS, kind_of, owned_names


@dataclass(frozen=True)
class Site:
    """A weight that a conv or linear uses.

    Attributes:
        parameter: its canonical qualified name.
        owner: the name of the module that owns it.
        nodes: the graph nodes that use it as their weight.
    """

    parameter: str
    owner: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Sites:
    """All prunable weights in graph order, and the names of all parameters that can be masked."""

    weights: tuple[Site, ...]
    maskable: frozenset[str]


@dataclass(frozen=True)
class FindSites(Pass):
    """Leaves a `Sites` in the context."""

    name: ClassVar[str] = "find-sites"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        names = owned_names(gm)
        users: dict[str, list[str]] = {}
        for node in gm.graph.nodes:
            for parameter in _weights_used(node, gm, names):
                users.setdefault(parameter, []).append(node.name)
        weights = tuple(Site(name, name.rpartition(".")[0], tuple(nodes)) for name, nodes in users.items())
        parameters = frozenset(name for name, _ in gm.named_parameters())
        ctx.put(Sites(weights, parameters - _out_of_reach(gm, names)))
        return False

    def ensures(self, gm: fx.GraphModule, ctx: Context) -> None:
        if not ctx.get(Sites).weights:
            raise SpecError("the model has no conv or linear weight that can be pruned")


def _weights_used(node: fx.Node, gm: fx.GraphModule, names: dict[int, str]) -> list[str]:
    """The parameters that ``node`` uses as the weight of a conv or linear."""
    if node.op == "call_module":
        layers = [module for module in layers_in(gm, node) if getattr(kind_of(module), "prunable", False)]
        # The weight of a module under torch.nn.utils.weight_norm is computed, and no parameter.
        return [names[id(layer.weight)] for layer in layers if id(layer.weight) in names]
    if node.op in ("call_function", "call_method") and node.target in WEIGHT_ARGUMENTS:
        position = WEIGHT_ARGUMENTS[node.target]
        weight = node.args[position] if position < len(node.args) else node.kwargs.get("weight")
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            tensor = _attribute(gm, str(weight.target))
            return [names[id(tensor)]] if isinstance(tensor, nn.Parameter) else []
    return []


def layers_in(gm: fx.GraphModule, node: fx.Node) -> list[nn.Module]:
    """The known layers that a ``call_module`` node runs: the module, or those inside one kept whole."""
    module = gm.get_submodule(str(node.target))
    return [layer for layer in module.modules() if kind_of(layer) is not None]


def _attribute(gm: fx.GraphModule, target: str) -> object:
    owner, _, name = target.rpartition(".")
    return getattr(gm.get_submodule(owner), name)


def _out_of_reach(gm: fx.GraphModule, names: dict[int, str]) -> set[str]:
    """Parameters that a module uses inside itself, where no mask can be put."""
    found: set[str] = set()
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        module = gm.get_submodule(str(node.target))
        kind = kind_of(module)
        reachable = kind.parameters if kind is not None else ()
        found |= {names[id(tensor)] for name, tensor in module.named_parameters() if name not in reachable}
    return found
