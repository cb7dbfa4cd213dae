"""Nodes that write to parameters and buffers, such as training steps of spectral norm (power iterations)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdp_fx.ops.kinds import attribute
from pdp_fx.tracing.functions import acts_in_place, changes_numbers, written_by
from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.tracing.modes import When, asks_mode, called_module
from pdp_fx.tracing.steps import LAYOUT
from pdp_fx.tracing.structure import tensors
from pdp_fx.tracing.watch import storage_of
from pdp_fx.weights.sources import run_through, sources_of, stored_nodes

Writes = dict[fx.Node, set[str]]
"""Nodes that write to parameters, with the parameters' names."""


def idle_in_eval(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that do nothing in eval mode: training steps, and what only serves these."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        serves = bool(node.users) and found.issuperset(node.users)
        if _only_trains(node) or (serves and not node.is_impure() and not acts_in_place(node)):
            found.add(node)
    return found


def unused_in_eval(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph in the form that it has in eval mode whose results nobody reads there.

    Those of an auxiliary head are, which the graph runs in training only.
    """
    found = idle_in_eval(graph)
    for node in reversed(graph.nodes):
        acts = node.is_impure(impure_random=False) or not all(
            each.op not in ("placeholder", "get_attr") and found.issuperset(each.users.keys() - {node})
            for each in (written_by(node) if acts_in_place(node) else ())
        )
        if not acts and found.issuperset(node.users):
            found.add(node)
    return found


def read_to_write(
    graph: fx.Graph, written: Writes, trains: set[fx.Node], element_by_element: Collection[str]
) -> set[fx.Node]:
    """The nodes that write to a parameter itself, and not to its masked value, and what serves nothing else.

    Args:
        graph: the graph.
        written: what its `writes` are.
        trains: what is `idle_in_eval` in it.
        element_by_element: the parameters that eval mode writes to so that masks do not matter
            (`written_by_element`).
    """
    found = {node for node, names in written.items() if node in trains or names.issubset(element_by_element)}
    for node in reversed(graph.nodes) if found else ():
        pure = node in trains or not (node.is_impure() or acts_in_place(node))
        if pure and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def written_by_element(gm: fx.GraphModule, written: Writes, trains: set[fx.Node]) -> frozenset[str]:
    """The parameters that eval mode writes to so that it makes no difference whether a mask comes before.

    That is tried with other numbers in the parameter. A convolution that multiplies its weight by a mask of
    its own, as in PixelCNN, does so; a norm of the weight, or a mean with another weight, does not.

    Args:
        gm: the graph module, inside a `trial` of it.
        written: what its `writes` are.
        trains: what is `idle_in_eval` in its graph.
    """
    steps = _steps_writing(gm, written, trains)
    return frozenset(name for name, own in steps.items() if _ignores_masks(gm, gm.get_parameter(name), own))


def left_by_eval(gm: fx.GraphModule, names: Mapping[int, str]) -> dict[str, Tensor]:
    """What parameters hold after a call in eval mode that writes to them, as by `clamp_`, by their names.

    Only where masks do not matter for that (`written_by_element`), and a second call changes nothing more.

    Args:
        gm: the graph module, inside a `trial` of it.
        names: the name of every parameter and buffer by its id.
    """
    found: dict[str, Tensor] = {}
    written, trains = writes(gm, names), idle_in_eval(gm.graph)
    steps_of = _steps_writing(gm, written, trains)
    for name in sorted(written_by_element(gm, written, trains)):
        parameter, steps = gm.get_parameter(name), steps_of[name]
        once, twice = (_run_on(gm, parameter, steps) for _ in range(2))
        if torch.allclose(once, twice, rtol=0, atol=0, equal_nan=True):
            found[name] = once
    return found


def _steps_writing(gm: fx.GraphModule, written: Writes, trains: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """The steps by which eval mode writes to parameters from stored values alone, by the names of these."""
    acting = [node for node in gm.graph.nodes if node in written and node not in trains]
    stored = stored_nodes(gm) if acting else set[fx.Node]()
    found: dict[str, list[fx.Node]] = {}
    for name in sorted(set[str]().union(*(written[node] for node in acting))):
        writing = [node for node in acting if name in written[node]]
        steps = sorted({source for node in writing for source in sources_of(node)})
        if stored.issuperset(steps):
            found[name] = steps
    return found


def _ignores_masks(gm: fx.GraphModule, parameter: nn.Parameter, steps: list[fx.Node]) -> bool:
    """Whether steps that write to a parameter write the masked numbers if it is masked before."""
    kept, draw = parameter.detach().clone(), torch.Generator(parameter.device).manual_seed(0)
    options: dict[str, Any] = {"generator": draw, "device": parameter.device}
    numbers = torch.randn(parameter.shape, **options).to(parameter.dtype) * 10
    mask = (torch.rand(parameter.shape, **options) < 0.5).to(parameter.dtype)

    def written(before: Tensor) -> Tensor:
        with torch.no_grad():
            parameter.copy_(before)
        return _run_on(gm, parameter, steps)

    try:
        return torch.allclose(written(mask * numbers), mask * written(numbers), equal_nan=True)
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def _run_on(gm: fx.GraphModule, parameter: nn.Parameter, steps: list[fx.Node]) -> Tensor:
    """What a parameter holds after some steps; a copy."""
    with torch.no_grad():
        run_through(Interpreter(gm, garbage_collect_values=False), steps)
    return parameter.detach().clone()


def _only_trains(node: fx.Node) -> bool:
    flag: Any = node.args[0] if isinstance(node.target, When) else None
    return isinstance(flag, fx.Node) and asks_mode(flag)


def writes(gm: fx.GraphModule, names: Mapping[int, str]) -> Writes:
    """The nodes that write to parameters, be it through a view or in training mode only, with their names.

    Args:
        gm: the graph module, inside a `trial` of it.
        names: the name of every parameter and buffer by its id.
    """
    acting = [node for node in gm.graph.nodes if changes_numbers(node)]
    memory: dict[int, set[str]] = {}
    for parameter in gm.parameters() if acting else ():
        memory.setdefault(storage_of(parameter), set()).add(names[id(parameter)])
    places = memory_written(gm, acting, stored_nodes(gm)) if acting else {}
    found = {node: set[str]().union(*(memory.get(place, ()) for place in places[node])) for node in acting}
    return {node: written for node, written in found.items() if written}


def memory_written(
    gm: fx.GraphModule, acting: Iterable[fx.Node], stored: set[fx.Node]
) -> dict[fx.Node, set[int]]:
    """Where in memory each node that acts in place writes, as far as that are ``stored`` values.

    Args:
        gm: the graph module, inside a `trial` of it.
        acting: the nodes.
        stored: what is `stored_nodes` in it.
    """
    run = Interpreter(gm, garbage_collect_values=False)
    found: dict[fx.Node, set[int]] = {}
    for node in acting:
        targets = [written for written in written_by(node) if written in stored]
        for target in targets:
            run_through(run, [source for source in sources_of(target) if source not in run.env])
        found[node] = {storage_of(value) for value in tensors([run.env[target] for target in targets])}
    return found


def read_before_written(
    gm: fx.GraphModule,
    names: Mapping[int, str],
    written: Writes,
    trains: set[fx.Node],
    element_by_element: Collection[str],
) -> set[str]:
    """The parameters that the model writes to itself (`read_to_write`) after something else has read them.

    A masked value that was computed before the write would be outdated, and its gradient needs old values.

    Args:
        gm: the graph module, inside a `trial` of it.
        names: the name of every parameter and buffer by its id.
        written: what its `writes` are.
        trains: what is `idle_in_eval` in its graph.
        element_by_element: what is `written_by_element`.
    """
    writing = read_to_write(gm.graph, written, trains, element_by_element)
    stored, read, found = stored_nodes(gm), set[str](), set[str]()
    for node in gm.graph.nodes if writing else ():
        if node in writing:
            found |= read.intersection(written.get(node, ()))
        else:
            read |= _used_by(gm, node, names, stored)
    return found


def reads_layout(node: fx.Node) -> bool:
    """Whether a node reads only the shape, type or the like of its operands."""
    return node.target is getattr or node.target in LAYOUT


def _used_by(gm: fx.GraphModule, node: fx.Node, names: Mapping[int, str], stored: set[fx.Node]) -> set[str]:
    """The parameters that a node reads directly; one without gradients counts only if the node is stored."""
    if reads_layout(node):
        return set()
    called = called_module(node)
    inside = [] if called is None else [*gm.get_submodule(called).parameters()]
    given = [attribute(gm, source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    used = [each for each in (*inside, *given) if isinstance(each, nn.Parameter)]
    return {names[id(each)] for each in used if each.requires_grad or node in stored}
