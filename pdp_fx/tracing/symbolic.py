"""Tracing without example inputs: `fx` symbolic tracing with our leaf rule."""

from typing import Any

from torch import fx, nn

from pdp_fx.errors import TraceError
from pdp_fx.tracing.leaves import is_leaf
from pdp_fx.tracing.source import source_line


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


def symbolic_graph(model: nn.Module) -> fx.Graph:
    """Trace a model without running it.

    Raises:
        TraceError: the model does something that only a run on example inputs can show.
    """
    tracer = SymbolicTracer()
    try:
        return tracer.trace(model)
    except Exception as err:
        where = source_line_of(err)
        raise TraceError(
            f"cannot trace {type(model).__name__} without example inputs ({where}: {err}); "
            "pass example_inputs, a tensor, a tuple of positional or a dict of keyword arguments"
        ) from err


def source_line_of(err: BaseException) -> str:
    """The innermost line outside torch and pdp_fx that an error came through, as `file.py:line`."""
    from pdp_fx.tracing import source

    found = ""
    step = err.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if not source._is_skipped(name):
            found = f"{name.rpartition('/')[2]}:{step.tb_lineno}"
        step = step.tb_next
    return found
