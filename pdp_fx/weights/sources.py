"""Which nodes a weight is computed from, and running only these."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, fx, nn

from pdp_fx.channels.running import evaluating
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.functions import SIZES, acts_in_place
from pdp_fx.tracing.inputs import place_arguments
from pdp_fx.tracing.interpreting import Interpreter

NOTHING: Mapping[fx.Node, Any] = {}


def stored_nodes(gm: fx.GraphModule, known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes whose values depend on parameters, buffers and constants only, and on the nodes ``known``."""
    found: set[fx.Node] = set(known)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and all(n in found for n in _computed_from(node)):
            found.add(node)
    return found


def sources_of(node: fx.Node, known: Collection[fx.Node] = ()) -> list[fx.Node]:
    """``node`` and all that it is computed from, in graph order; nothing that the nodes ``known`` are."""
    found, todo = {node}, [node]
    while todo:
        last = todo.pop()
        made_of = [] if last in known else _computed_from(last)
        new = [source for source in made_of if source not in found]
        found.update(new)
        todo += new
    return sorted(found)


def computed_with(weight: fx.Node, trains: set[fx.Node]) -> list[fx.Node]:
    """The nodes to move if a weight is computed elsewhere, in graph order: its sources and training steps.

    Training steps belong to it if they write to what it reads, as power iterations do.

    Args:
        weight: a node that depends on parameters, buffers and constants only.
        trains: the nodes that do nothing in eval mode.
    """
    sources = sources_of(weight)
    span = [sources[0]]
    while span[-1] is not weight:
        span.append(span[-1].next)
    while span[0].prev in trains and not acts_in_place(span[0].prev):
        span.insert(0, span[0].prev)  # such as the node that turns gradients off for a training step
    if not any(node in trains and acts_in_place(node) for node in span):
        return sources
    return sorted({source for node in span for source in sources_of(node)})


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """The nodes whose numbers a node reads: not what lends its dtype, as in ``weight.to(x.dtype)``."""
    return [] if asks_kind(node) else node.all_input_nodes


def asks_kind(node: fx.Node) -> bool:
    """Whether a node reads the dtype or the device of another."""
    return node.target is getattr and node.args[1] in ("dtype", "device")


def asks_size(node: fx.Node) -> bool:
    """Whether a node reads how large a tensor is, and nothing of what is in it."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.op == "call_method" and (node.target in SIZES or node.target == "dim")


class _Sizes(Interpreter):
    """Notes what nodes that read sizes give."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if asks_size(n):
            self.found[n] = value
        return value


def sizes_read(gm: fx.GraphModule, inputs: Inputs) -> dict[fx.Node, Any]:
    """What the nodes that read sizes give on the example inputs; used inside a `trial` of ``gm``."""
    run = _Sizes(gm)
    run.run(*place_arguments(gm, inputs))
    return run.found


def run_through(run: Interpreter, nodes: list[fx.Node], known: Mapping[fx.Node, Any] = NOTHING) -> None:
    """Run the sources of a weight.

    A node that reads the dtype or device of a tensor outside the sources gets that of the parameters.

    Args:
        run: runs each node.
        nodes: the sources, in graph order.
        known: the results of some of them.
    """
    for node in nodes:
        if node in known:
            run.env[node] = known[node]
        elif asks_kind(node) and node.args[0] not in run.env:
            lender = next(p for p in run.module.parameters() if p.is_floating_point())
            run.env[node] = getattr(lender, str(node.args[1]))
        else:
            run.env[node] = run.run_node(node)


def computed(gm: fx.GraphModule, weight: fx.Node) -> Tensor:
    """The value in eval mode of a node that depends on no input, differentiable in its parameters."""
    reached = [node for node in sources_of(weight) if node.op in ("call_module", "get_attr")]
    found = (operator.attrgetter(str(node.target))(gm) for node in reached)
    with evaluating(*(part for part in found if isinstance(part, nn.Module))):
        return value_of(gm, weight)


def value_of(gm: fx.GraphModule, weight: fx.Node) -> Tensor:
    """The value of a node that depends on no input, in the mode that the module is in."""
    run = Interpreter(gm, garbage_collect_values=False)
    run_through(run, sources_of(weight))
    return run.env[weight]
