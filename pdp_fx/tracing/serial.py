"""Writing a graph as plain data and reading it back, node by node and without tracing anything."""

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name, map_aggregate

from pdp_fx.errors import TraceError
from pdp_fx.tracing.modes import When
from pdp_fx.tracing.objects import Bound, Held


@dataclass(frozen=True)
class NodeRef:
    """A node by its position in the graph."""

    index: int


@dataclass(frozen=True)
class Named:
    """Something of a module that pickle cannot name, by the dotted name that generated code uses for it."""

    name: str


@dataclass(frozen=True)
class NodeText:
    """All that is kept of one node."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


GraphText = tuple[NodeText, ...]
_PLAIN = (str, int, float, bool, type(None))


def graph_to_text(graph: fx.Graph) -> GraphText:
    """The graph as picklable data; `node.meta` keeps its plain entries.

    Raises:
        TraceError: a node calls a function that cannot be found again by its name.
    """
    index = {node: NodeRef(i) for i, node in enumerate(graph.nodes)}

    def encode_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.memory_format):
            # The protocol of torch.save has no way to store it.
            return Named(str(leaf))
        return index[leaf] if isinstance(leaf, fx.Node) else leaf

    def encode(value: Any) -> Any:
        return map_aggregate(value, encode_leaf)

    return tuple(
        NodeText(n.op, n.name, _name(n.target), encode(n.args), encode(n.kwargs), _plain(n.meta))
        for n in graph.nodes
    )


def graph_from_text(text: GraphText) -> fx.Graph:
    """The inverse of `graph_to_text`."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def decode_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Named):
            return _find(leaf.name)
        return nodes[leaf.index] if isinstance(leaf, NodeRef) else leaf

    def decode(value: Any) -> Any:
        return map_aggregate(value, decode_leaf)

    for item in text:
        node = graph.create_node(
            item.op, _named(item.target), decode(item.args), decode(item.kwargs), item.name
        )
        node.meta.update(item.meta)
        nodes.append(node)
    return graph


def _plain(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if isinstance(value, _PLAIN)}


def _name(target: str | Callable[..., Any]) -> Any:
    if isinstance(target, str | Bound | Held):
        return target
    if isinstance(target, When):
        return When(_name(target.function))
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        try:
            if pickle.loads(pickle.dumps(target)) == target:
                return target
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    name = _get_qualified_name(target)
    if _find(name) is not target:
        raise TraceError(f"cannot pickle a call of {name}: importing that name gives something else")
    return Named(name)


def _named(target: Any) -> Any:
    if isinstance(target, When):
        return When(_named(target.function))
    return _find(target.name) if isinstance(target, Named) else target


def _find(name: str) -> Callable[..., Any]:
    module, _, rest = name.partition(".")
    found: Any = importlib.import_module(module)
    for part in rest.split("."):
        if not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
            continue
        found = getattr(found, part)
    return found
