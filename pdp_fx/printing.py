"""The texts that people read: a graph with one line a node, and what a pass changed in it."""

from __future__ import annotations

import difflib
from typing import Any

from tabulate import tabulate
from torch import Tensor, fx, nn

from pdp_fx.masks import Mask
from pdp_fx.trace import ExampleInputs, trace

HEADERS = ("node", "does", "reads", "shape", "channels", "source")


def print_graph(model: nn.Module, example_inputs: ExampleInputs = None) -> None:
    """Print the graph of ``model``, one line a node; a plain module is traced first.

    Args:
        model: a prepared or converted model, or any module.
        example_inputs: what to trace a plain module with, where that needs a run.
    """
    print(graph_text(model, example_inputs))


def graph_text(model: nn.Module, example_inputs: ExampleInputs = None) -> str:
    """The graph as a table: node, what it does, what it reads, shape, channel group, source line.

    Names and order are those of the graph. Shapes and groups are known of models that were prepared
    with example inputs; mask nodes are marked with a star.
    """
    gm = model if isinstance(model, fx.GraphModule) else trace(model, example_inputs)
    rows = [_row(gm, node) for node in gm.graph.nodes]
    used = [index for index in range(len(HEADERS)) if index < 3 or any(row[index] for row in rows)]
    return tabulate(
        [[row[index] for index in used] for row in rows],
        headers=[HEADERS[index] for index in used],
        tablefmt="simple",
        disable_numparse=True,
    )


def _row(gm: fx.GraphModule, node: fx.Node) -> tuple[str, ...]:
    shape = node.meta.get("shape") or _stored_shape(gm, node)
    return (
        node.name,
        _does(gm, node),
        _reads(node),
        "x".join(str(size) for size in shape or ()),
        str(node.meta.get("group", "")),
        str(node.meta.get("source", "")),
    )


def _does(gm: fx.GraphModule, node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "call_module":
        module = gm.get_submodule(target)
        if isinstance(module, Mask):
            return f"* {type(module).__name__}({module.extra_repr()})"
        return f"{type(module).__name__.removeprefix('Explicit')} {target}"
    if node.op == "get_attr":
        return f"parameter {target}"
    if node.op == "call_method":
        return f".{target}()"
    if node.op == "call_function":
        name = getattr(target, "__name__", str(target))
        return f"* {name}" if getattr(target, "__module__", "").startswith("pdp_fx.ops") else name
    return {"placeholder": "input", "output": "output"}[node.op]


def _reads(node: fx.Node) -> str:
    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(text(item) for item in value) + "]"
        return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else type(value).__name__

    parts = [text(value) for value in node.args]
    parts += [f"{key}={text(value)}" for key, value in node.kwargs.items() if value is not None]
    return ", ".join(parts)


def _stored_shape(gm: fx.GraphModule, node: fx.Node) -> tuple[int, ...]:
    if node.op != "get_attr":
        return ()
    owner, _, name = str(node.target).rpartition(".")
    stored = getattr(gm.get_submodule(owner), name, None)
    return tuple(stored.shape) if isinstance(stored, Tensor) else ()


def graph_diff(before: str, gm: fx.GraphModule) -> str:
    """What a pass changed: a unified diff of the graph's text before it and of ``gm`` now."""
    lines = difflib.unified_diff(before.splitlines(), str(gm.graph).splitlines(), "before", "after", lineterm="", n=1)
    return "\n".join(lines)
