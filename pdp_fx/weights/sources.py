"""What a weight is computed from."""

from torch import Tensor, fx

from pdp_fx.channels.running import evaluating
from pdp_fx.tracing.functions import acts_in_place


def stored_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values depend on parameters, buffers and constants only."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and all(n in found for n in _computed_from(node)):
            found.add(node)
    return found


def sources_of(node: fx.Node) -> list[fx.Node]:
    """``node`` and all that it is computed from, in graph order."""
    found, todo = {node}, [node]
    while todo:
        new = [source for source in _computed_from(todo.pop()) if source not in found]
        found.update(new)
        todo += new
    return sorted(found)


def computed_with(weight: fx.Node, trains: set[fx.Node]) -> list[fx.Node]:
    """What goes along if a weight is computed elsewhere, in graph order: its sources, and steps of training.

    Those are among its sources if they write to what it reads, as power iterations do.

    Args:
        weight: a node that depends on parameters, buffers and constants only.
        trains: the nodes that do nothing in eval mode.
    """
    sources = sources_of(weight)
    span = [sources[0]]
    while span[-1] is not weight:
        span.append(span[-1].next)
    while span[0].prev in trains and not acts_in_place(span[0].prev):
        span.insert(0, span[0].prev)  # as what turns gradients off for a step
    if not any(node in trains and acts_in_place(node) for node in span):
        return sources
    return sorted({source for node in span for source in sources_of(node)})


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """The nodes whose numbers a node reads: not what lends its dtype, as in ``weight.to(x.dtype)``."""
    return [] if asks_kind(node) else node.all_input_nodes


def asks_kind(node: fx.Node) -> bool:
    """Whether a node reads the dtype or the device of another."""
    return node.target is getattr and node.args[1] in ("dtype", "device")


def run_through(run: fx.Interpreter, nodes: list[fx.Node]) -> None:
    """Run the sources of a weight; what lends a dtype and is none of them has that of the parameters."""
    for node in nodes:
        if asks_kind(node) and node.args[0] not in run.env:
            lender = next(p for p in run.module.parameters() if p.is_floating_point())
            run.env[node] = getattr(lender, str(node.args[1]))
        else:
            run.env[node] = run.run_node(node)


def computed(gm: fx.GraphModule, weight: fx.Node) -> Tensor:
    """What a node that depends on nothing given gives in eval mode, differentiable in its parameters."""
    with evaluating(gm):
        return value_of(gm, weight)


def value_of(gm: fx.GraphModule, weight: fx.Node) -> Tensor:
    """What a node that depends on nothing given gives in the mode that the module is in."""
    run = fx.Interpreter(gm, garbage_collect_values=False)
    run_through(run, sources_of(weight))
    return run.env[weight]
