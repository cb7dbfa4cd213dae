"""Tracing without example inputs: `fx` symbolic tracing with our leaf rule."""

from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg

from pdp_fx.errors import TraceError
from pdp_fx.tracing.leaves import is_leaf
from pdp_fx.tracing.source import runs_model, source_line, source_of
from pdp_fx.tracing.steps import Attribute, Recording, Scope, Step


class SymbolicTracer(fx.Tracer):
    """The `fx` tracer with our leaf rule, noting for each node its source line and its owner."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Apply the leaf rule."""
        return is_leaf(m)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make the node, then note where it comes from."""
        node = super().create_node(*args, **kwargs)
        path = self.scope.module_path
        node.meta["owner"] = path.rpartition(".")[0] if node.op == "call_module" else path
        node.meta["source"] = source_line()
        return node


@runs_model
def symbolic_recording(model: nn.Module) -> Recording:
    """What a model does in its current mode, as far as that can be told without running it.

    Raises:
        TraceError: only a run on example inputs can tell.
    """
    try:
        graph = SymbolicTracer().trace(model)
    except Exception as err:
        raise TraceError(
            f"cannot trace {type(model).__name__} without example inputs: {err} ({source_of(err)}); "
            "pass example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments"
        ) from err
    values: dict[fx.Node, Any] = {}
    scopes: dict[str, Scope] = {"": Scope("")}

    def scope(path: str) -> Scope:
        if path not in scopes:
            scopes[path] = Scope(path, 1, scope(path.rpartition(".")[0]))
        return scopes[path]

    def values_in(args: Any) -> Any:
        return map_arg(args, values.__getitem__)

    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = Attribute(str(node.target))
        elif node.op != "output":
            args, kwargs = values_in(node.args), values_in(node.kwargs)
            where = scope(node.meta["owner"])
            values[node] = Step(node.op, node.target, args, kwargs, where, node.meta["source"])
    steps = tuple(value for value in values.values() if isinstance(value, Step))
    return Recording(steps, values_in(graph.output_node().args[0]), dict.fromkeys(scopes.values(), ()))
