"""Computing once what a model computes of parameters at each of several calls in the same way.

A layer whose weight is normalised computes it whenever it is called, as a discriminator's layers do that is
called on real and on made-up data. In a graph both calls may read one weight, which can then be masked.
"""

from collections.abc import Container, Hashable

import torch
from torch import fx, nn

from pdp_fx.ops.kinds import attribute
from pdp_fx.tracing.blocks import MAY_WAIT, SKIPPED
from pdp_fx.tracing.functions import acts_in_place, written_by
from pdp_fx.tracing.modes import When, function_of
from pdp_fx.tracing.recomputing import RECOMPUTED
from pdp_fx.tracing.restoring import changed_settings

_APART = (SKIPPED, MAY_WAIT, RECOMPUTED, "opaque")
"""The entries in the `meta` of nodes that need not run, or of which it is not known what they do."""


def share_repeats(gm: fx.GraphModule, graph: fx.Graph, protected: Container[fx.Node]) -> None:
    """Let nodes that compute the same of parameters alone be one node, unless something is written to any.

    Args:
        gm: holds what the graph uses.
        graph: the graph; changed.
        protected: the nodes that do more than to compute something.
    """
    made = set[fx.Node]()
    for node in graph.nodes:
        computes = (
            node not in protected and _only_computes(gm, node) and made.issuperset(node.all_input_nodes)
        )
        if computes or (node.op == "get_attr" and isinstance(attribute(gm, node.target), nn.Parameter)):
            made.add(node)
    if any(acts_in_place(node) and not made.isdisjoint(written_by(node)) for node in graph.nodes):
        return
    settings = {node for span in changed_settings(graph) for node in span}
    known: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if node in settings or function_of(node) is torch._C._set_grad_enabled:
            # Gradients or dtypes may be others from here on.
            known.clear()
        if node not in made or node.op == "get_attr" or any(map(_may_write, node.users)):
            continue
        try:
            key = (node.op, node.target, node.args, tuple(sorted(node.kwargs.items())))
            first = known.setdefault(key, node)
        except TypeError:
            continue  # A slice, for one, has no hash.
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _only_computes(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node computes something of other nodes, and does nothing else."""
    if not node.all_input_nodes or node.is_impure() or acts_in_place(node) or isinstance(node.target, When):
        return False
    if node.op == "call_module":
        # The functions of parametrizations are modules.
        called = gm.get_submodule(str(node.target))
        return type(called).__module__.startswith("torch.nn.utils.") and not any(
            True for _ in called.buffers()
        )
    return node.op in ("call_function", "call_method") and not any(entry in node.meta for entry in _APART)


def _may_write(user: fx.Node) -> bool:
    """Whether a node, or whoever gets what the graph returns, may write to what it is given."""
    return user.op == "output" or "opaque" in user.meta
