"""Make the parameters that will be masked values of the graph.

A module keeps its place and the names of its parameters, but gets the parameters as arguments, so that a
mask can be put between a parameter and its use. If a computed weight stands for a parameter, the node that
computes it serves as this value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import SpecError
from pdp_fx.example_inputs import trial
from pdp_fx.ops.data import data_of
from pdp_fx.ops.explicit import reclass
from pdp_fx.ops.kinds import attribute, kind_of, named_modules, owned_names
from pdp_fx.passes.choose_targets import Plan
from pdp_fx.passes.find_sites import Sites
from pdp_fx.pruner import CHILD, Pruner
from pdp_fx.tracing.functions import only_marks
from pdp_fx.tracing.modes import called_module
from pdp_fx.tracing.objects import join_methods
from pdp_fx.tracing.relinking import relink
from pdp_fx.weights.sources import sources_of, stored_nodes
from pdp_fx.weights.without_gradients import part_to_leave, switches_off
from pdp_fx.weights.writes import Writes, idle_in_eval, read_to_write, reads_layout, writes


@dataclass
class Exposed:
    """The node that holds the value of each exposed parameter; a masking pass replaces it by the masked one.

    Attributes:
        nodes: by the name of the parameter, the node that the next mask is applied to.
        computed: by the name of the parameter, the node of a computed weight that stands for it, unmasked.
    """

    nodes: dict[str, fx.Node]
    computed: dict[str, fx.Node]

    def wrap(self, name: str, wrapper: fx.Node) -> None:
        """Let all layers read ``wrapper``, a node computed from that of parameter ``name``, in its place.

        Whether the parameter is trained is for the parameter itself to say.
        """

        def is_layer(user: fx.Node) -> bool:
            asks = user.target is getattr and user.args[1] == "requires_grad"
            return not asks and user is not wrapper and not str(user.target).startswith(f"{CHILD}.")

        self.nodes[name].replace_all_uses_with(wrapper, delete_user_cb=is_layer)
        self.nodes[name] = wrapper


def masked_slots(ctx: Context) -> list[Slot]:
    """The parameter axes on which the plan's channel masks have to sit, in graph order."""
    groups = ctx.get(Plan).groups
    if not groups:
        return []
    masked = ctx.get(ChannelMap).masked
    members = dict.fromkeys(slot for group, _ in groups for slot in group.members)
    return [slot for slot in members if slot in masked]


@dataclass(frozen=True)
class ExposeParameters(Pass):
    """Gives every parameter of the plan one ``get_attr`` node, and puts an `Exposed` into the context."""

    name: ClassVar[str] = "expose-parameters"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        wanted = {site.parameter for site, _ in ctx.get(Plan).weights}
        wanted |= {slot.tensor for slot in masked_slots(ctx)}
        names = owned_names(gm)
        swaps: dict[nn.Module, nn.Module] = {}
        for node in list(gm.graph.nodes):
            called = called_module(node)
            if called is not None:
                _expose(gm, node, called, wanted, names, swaps)
        swap_modules(gm, swaps)
        computed = _computed_weights(gm, ctx)
        reads = _merge_reads(gm, wanted - computed.keys(), names, ctx.get(Sites).element_by_element)
        ctx.put(Exposed(reads | computed, computed))
        ctx.get(Pruner).computed = {name: node.name for name, node in computed.items()}
        return bool(wanted)


def _computed_weights(gm: fx.GraphModule, ctx: Context) -> dict[str, fx.Node]:
    """The nodes of computed weights that the plan prunes, by the name of the parameter they stand for."""
    plan, found = ctx.get(Plan), ctx.find(ChannelMap)
    pruned = {site.parameter for site, _ in plan.weights}
    cut = {slot.tensor for group, _ in plan.groups for slot in group.members}
    nodes = {node.name: node for node in gm.graph.nodes}
    through = {} if found is None else found.stand_ins
    alone = {by.parameter: by for by in ctx.get(Sites).stand_ins if by.alone}
    return {
        name: nodes[by.node]
        for name, by in (alone | through).items()
        if (name in cut and name in through) or (name in pruned and name in alone)
    }


def _expose(
    gm: fx.GraphModule,
    node: fx.Node,
    target: str,
    wanted: set[str],
    names: dict[int, str],
    swaps: dict[nn.Module, nn.Module],
) -> None:
    """Pass the wanted parameters of a called module as arguments.

    Args:
        gm: the graph module.
        node: the node that calls the module.
        target: the module's name.
        wanted: names of the parameters to expose.
        names: the name of every parameter and buffer by its id.
        swaps: collects the module's replacement, whose ``forward`` takes the parameters.
    """
    module = gm.get_submodule(target)
    kind = kind_of(module)
    if kind is None:
        return
    for parameter in kind.given_to(module):
        tensor = getattr(module, parameter)
        if tensor is None or names.get(id(tensor)) not in wanted:
            continue
        with gm.graph.inserting_before(node):
            read = gm.graph.get_attr(names[id(tensor)])
        read.meta = {"source": node.meta.get("source", "")}
        node.update_kwarg(parameter, read)
        if type(module) is kind.plain and module not in swaps:
            swaps[module] = reclass(module, kind.explicit)


def swap_modules(root: nn.Module, swaps: Mapping[nn.Module, nn.Module]) -> None:
    """Replace every key by its value everywhere in ``root``, under all its names."""
    for name, module in named_modules(root) if swaps else ():
        if module in swaps:
            root.set_submodule(name, swaps[module])
    if swaps:
        relink(root.modules(), swaps)
        join_methods(root)


def _merge_reads(
    gm: fx.GraphModule, wanted: set[str], names: dict[int, str], element_by_element: frozenset[str]
) -> dict[str, fx.Node]:
    """Let all uses of a wanted parameter share one read, and return these reads by the parameters' names.

    Nodes that write to parameters, or freeze them, keep reads of their own: they need the raw
    parameter. So do those that only read its layout if it is written to, as they may come before it is.
    """
    with trial(gm):
        written = writes(gm, names)
        writing = read_to_write(gm.graph, written, idle_in_eval(gm.graph), element_by_element)

    def uses(user: fx.Node) -> bool:
        return user not in writing and not only_marks(user) and not (writing and reads_layout(user))

    found: dict[str, fx.Node] = {}
    _show_writes(gm, wanted, names)
    for node in gm.graph.find_nodes(op="get_attr"):
        name = names.get(id(attribute(gm, node.target)), "")
        users = [user for user in node.users if uses(user)]
        if name not in wanted or (node.users and not users):
            continue
        if name in found:
            node.replace_all_uses_with(found[name], delete_user_cb=uses)
        elif len(users) == len(node.users):
            found[name] = node
        else:
            with gm.graph.inserting_before(min(users)):
                found[name] = gm.graph.get_attr(str(node.target))
            found[name].meta = dict(node.meta)
            node.replace_all_uses_with(found[name], delete_user_cb=uses)
    _give_gradients(gm.graph, found, written)
    return found


def _show_writes(gm: fx.GraphModule, wanted: set[str], names: dict[int, str]) -> None:
    """Let masks, which look at a parameter's version, see what is written to it through `Tensor.data`."""
    views = [*gm.graph.find_nodes(op="call_function", target=data_of)]
    stored = stored_nodes(gm) if views else set[fx.Node]()
    for view in stored.intersection(views):
        reads = [node for node in sources_of(view) if node.op == "get_attr"]
        if any(names.get(id(attribute(gm, read.target)), "") in wanted for read in reads):
            view.op, view.target = "call_method", "detach"


def _give_gradients(graph: fx.Graph, reads: Mapping[str, fx.Node], written: Writes) -> None:
    """Move reads that are used with gradients ahead of parts without them, for what is made of them follows.

    Raises:
        SpecError: the parameter is written to in between.
    """
    parts = switches_off(graph)
    for name, read in reads.items():
        start = part_to_leave(read, read.users, parts)
        if start is None:
            continue
        if any(start < node < read and name in names for node, names in written.items()):
            raise SpecError(
                f"{name} is written to and used under torch.no_grad(), and then used with gradients, which "
                "masks of it would not pass on; leave its layer out by an override"
            )
        start.prepend(read)
