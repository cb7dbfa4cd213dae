"""Graphs as text: a table with one line for each node, and the difference that a pass makes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, cast

from tabulate import tabulate
from torch import Tensor, fx, nn

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.errors import SpecError
from pdp_fx.example_inputs import matching, normalised, shapes
from pdp_fx.field_checks import described
from pdp_fx.masks import MaskLayout
from pdp_fx.ops.explicit import mask_axis
from pdp_fx.ops.kinds import attribute
from pdp_fx.policy import MILLION, MaskPolicy, NMPolicy
from pdp_fx.pruner import find_all, find_one, refuse_empty, units_pruned
from pdp_fx.trace import trace
from pdp_fx.tracing.examples import ExampleInputs
from pdp_fx.tracing.recomputing import recomputed_parts

HEADERS = ("node", "does", "reads", "shape", "channels", "mask", "recomputed", "source")
NEEDED = 3
"""How many of the first columns are always shown; the others are shown if they are not empty."""

Shape = tuple[int, ...]


def print_graph(model: nn.Module, example_inputs: ExampleInputs | None = None) -> None:
    """Print the graph of ``model``, one line for each node; a plain module is traced first.

    Args:
        model: a prepared model, also inside a wrapper, a converted one, or any module.
        example_inputs: inputs to run the model on; needed for the shapes of a model that was prepared without
            example inputs, and for a plain module that cannot be traced without a run.

    Raises:
        StateError: the model holds several prepared models, or a prepared one on the meta device.
        TraceError: a model that was never prepared cannot be traced.
    """
    print(graph_text(model, example_inputs))


def graph_text(model: nn.Module, example_inputs: ExampleInputs | None = None) -> str:
    """The graph as a table: node, what it does, what it reads, shape, channel group, mask, source line.

    Names and order are those of the graph. The nodes that compute or apply a mask are marked with a star,
    and the mask column says how much they prune now; of other nodes it says what they read masked. Nodes that
    are recomputed in backward have the number of their part.
    """
    if find_all(model):
        model = find_one(model, "print_graph")[0]
        refuse_empty(model, "print_graph")
    gm = model if isinstance(model, fx.GraphModule) else trace(model, example_inputs)
    inputs = normalised(example_inputs)
    measured = {} if inputs is None else shapes(gm, matching(inputs, gm))
    parts = dict[fx.Node, str]()
    for number, part in enumerate(recomputed_parts(gm.graph), 1):
        parts |= dict.fromkeys(part.inside, str(number))
    rows = [_row(gm, node, measured, parts.get(node, "")) for node in gm.graph.nodes]
    used = [index for index in range(len(HEADERS)) if index < NEEDED or any(row[index] for row in rows)]
    return tabulate(
        [[row[index] for index in used] for row in rows],
        headers=[HEADERS[index] for index in used],
        tablefmt="simple",
        disable_numparse=True,
    )


def _row(gm: fx.GraphModule, node: fx.Node, measured: dict[str, Shape], part: str) -> tuple[str, ...]:
    shape = measured.get(node.name) or _shape(gm, node)
    return (
        node.name,
        _does(gm, node),
        _reads(node),
        "x".join(str(size) for size in shape),
        str(node.meta.get("group", "")),
        _mask_text(gm, node),
        part,
        "" if node.op == "placeholder" else str(node.meta.get("source", "")),
    )


def _shape(gm: fx.GraphModule, node: fx.Node) -> Shape:
    """The shape that is known without a run."""
    known = node.meta.get("shape")
    if known:
        return tuple(known)
    if node.op == "get_attr":
        stored = attribute(gm, node.target)
        return tuple(stored.shape) if isinstance(stored, Tensor) else ()
    module = _module(gm, node)
    if isinstance(module, ChannelPolicy):
        return (module.width,)
    if isinstance(module, MaskLayout):
        return tuple(module.index.shape)
    sources = node.all_input_nodes
    return _shape(gm, sources[0]) if _is_mask(gm, node) and sources else ()


def _module(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_mask(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node computes a mask, lays it out, or multiplies a parameter by it."""
    return isinstance(_module(gm, node), (MaskPolicy, MaskLayout)) or node.target is mask_axis


def _mask_text(gm: fx.GraphModule, node: fx.Node) -> str:
    """How much a mask prunes now; of any other node, which of its inputs are masked."""
    module = _module(gm, node)
    if isinstance(module, MaskPolicy):
        return _pruned_now(gm, module)
    if _is_mask(gm, node):
        return ""
    given = [(f"input {place}", value) for place, value in enumerate(node.args)]
    given += list(node.kwargs.items())
    return ", ".join(name for name, value in given if isinstance(value, fx.Node) and _is_mask(gm, value))


def _pruned_now(gm: fx.GraphModule, mask: MaskPolicy) -> str:
    if isinstance(mask, NMPolicy):
        return f"{mask.keep}:{mask.of}, {int(mask.count) / MILLION:g} of {mask.of} pruned"
    if isinstance(mask, ChannelPolicy):
        return f"channels, {units_pruned(gm, mask)} of {mask.width} pruned"
    units = gm.get_parameter(mask.parameters_read[0]).numel()
    return f"weights, {units_pruned(gm, mask)} of {units} pruned"


def _does(gm: fx.GraphModule, node: fx.Node) -> str:
    target: Any = node.target
    module = _module(gm, node)
    if module is not None:
        name = type(module).__name__
        return f"* {name}" if _is_mask(gm, node) else f"{name.removeprefix('Explicit')} {target}"
    if node.op == "get_attr":
        return f"parameter {target}"
    if node.op == "call_method":
        return f".{target}()"
    if node.op == "call_function":
        name = getattr(target, "__name__", type(target).__name__)
        return f"* {name}" if getattr(target, "__module__", "").startswith("pdp_fx.ops") else name
    return {"placeholder": "input", "output": "output"}[node.op]


def _reads(node: fx.Node) -> str:
    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(text(item) for item in cast(Sequence[Any], value)) + "]"
        return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else type(value).__name__

    parts = [text(value) for value in node.args]
    shown = {key: value for key, value in node.kwargs.items() if value is not None and key != "inplace"}
    parts += [f"{key}={text(value)}" for key, value in shown.items()]
    return ", ".join(parts)


def graph_diff(before: str, gm: fx.GraphModule) -> str:
    """What a pass changed: a unified diff of the graph's text before it and of ``gm`` now; empty if nothing.

    Example:
        >>> from pdp_fx import PruneSpec, Unstructured, prepare
        >>> net = nn.Sequential(nn.Linear(4, 2))
        >>> diffs = {}
        >>> def note(before, step, gm):
        ...     diffs[step.name] = graph_diff(before, gm)
        >>> prepared = prepare(net, PruneSpec(Unstructured(0.5)), on_pass=note)
        >>> [name for name, diff in diffs.items() if diff]
        ['expose-parameters', 'mask-weights']
    """
    if not isinstance(before, str) or not isinstance(gm, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(
            "graph_diff needs the text of a graph and a graph module, as on_pass gets them; got "
            f"{described(before)} and {described(gm)}"
        )
    lines = difflib.unified_diff(
        before.splitlines(), str(gm.graph).splitlines(), "before", "after", lineterm="", n=1
    )
    return "\n".join(lines)
