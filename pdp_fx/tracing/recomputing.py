"""Activation checkpointing that a model does inside its own forward, kept by the code of its graph.

A graph is flat: a node carries in its `meta` the number of the call of `torch.utils.checkpoint.checkpoint`
that it was recorded in, and passes need not know of it. Only the generated code puts the nodes from the first
to the last of one call into a function, and calls it through `checkpoint`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import _checkpoint_hook

from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import replaced

RECOMPUTED = "recomputed"
"""The entry of a node's `meta` with the number, from 1, of the call of `checkpoint` that it belongs to."""
_MARK = "# COUNTER: "
"""How fx begins the line in front of the code of each node, before it takes these lines out."""


@contextmanager
def noting_recomputed(recorder: Recorder) -> Generator[None, None, None]:
    """Tell the recorder when the model enters and leaves `checkpoint(..., use_reentrant=False)`.

    Other hooks on what is saved for the backward pass are refused, for a graph does not hold them, but for
    those that only move it to another memory.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter, leave = hooks.__enter__, hooks.__exit__
    within: dict[int, Any] = {}

    def hooks_enter(self: Any) -> Any:
        if not recorder.inside and not isinstance(self, (_checkpoint_hook, torch.autograd.graph.save_on_cpu)):
            recorder.refuse("changes what is saved for the backward pass, by saved_tensors_hooks")
        if isinstance(self, _checkpoint_hook) and not recorder.inside:
            within[id(self)] = recorder.recomputing()
            within[id(self)].__enter__()
        return enter(self)

    def hooks_exit(self: Any, *error: Any) -> Any:
        if id(self) in within:
            within.pop(id(self)).__exit__(None, None, None)
        return leave(self, *error)

    with replaced(hooks, "__enter__", hooks_enter), replaced(hooks, "__exit__", hooks_exit):
        yield


def run_recomputed(recorder: Recorder, args: Sequence[Any]) -> Any:
    """Run what `checkpoint(..., use_reentrant=True)` hands to its autograd function."""
    with recorder.recomputing():
        return args[0](*args[2:])


class Part(NamedTuple):
    """What one call of `checkpoint` recomputes.

    Attributes:
        places: the positions of all nodes from its first to its last.
        first: those of these nodes that are computed before it and kept.
        inside: those that are recomputed.
    """

    places: range
    first: list[fx.Node]
    inside: list[fx.Node]


def recomputed_parts(graph: fx.Graph) -> list[Part]:
    """The parts of a graph that are recomputed in backward, in order; they do not overlap."""
    nodes, found = list(graph.nodes), dict[int, range]()
    for place, node in enumerate(nodes):
        number = node.meta.get(RECOMPUTED)
        if number is not None:
            found[number] = range(found[number].start if number in found else place, place + 1)
    joined: list[range] = []
    for places in sorted(found.values(), key=lambda places: places.start):
        if joined and places.start < joined[-1].stop:
            last = joined.pop()
            places = range(last.start, max(places.stop, last.stop))
        joined.append(places)
    of_parameters = _of_parameters(nodes) if joined else set[fx.Node]()
    return [Part(places, *_divided(nodes[places.start : places.stop], of_parameters)) for places in joined]


def in_functions(graph: fx.Graph, parts: Sequence[Part]) -> Callable[[list[str]], list[str]]:
    """What turns the lines that fx generates for the graph into lines with a function for each part."""
    nodes = list(graph.nodes)

    def rewritten(body: list[str]) -> list[str]:
        written, lines = lines_of(body, nodes)
        done = 0
        for number, (places, first, inside) in enumerate(parts, 1):
            written += [text for node in [*nodes[done : places.start], *first] for text in lines[node]]
            written += _function(f"recomputed_{number}", inside, lines)
            done = places.stop
        return written + [text for node in nodes[done:] for text in lines[node]]

    return rewritten


def lines_of(body: list[str], nodes: Sequence[fx.Node]) -> tuple[list[str], dict[fx.Node, list[str]]]:
    """The lines that fx generates before the first node of a graph, and those of each node."""
    starts = [i for i, text in enumerate(body) if text.startswith(_MARK)]
    texts = [body[start:stop] for start, stop in zip(starts, [*starts[1:], len(body)], strict=True)]
    return body[: starts[0]], dict(zip(nodes, texts, strict=True))


def _of_parameters(nodes: list[fx.Node]) -> set[fx.Node]:
    """The reads of parameters and buffers, and what is computed from them alone, but for recomputed steps."""
    found = set[fx.Node]()
    for node in nodes:
        sources, calls = node.all_input_nodes, node.op in ("call_module", "call_function")
        computed = calls and RECOMPUTED not in node.meta and bool(sources) and found.issuperset(sources)
        if node.op == "get_attr" or computed:
            found.add(node)
    return found


def _divided(part: list[fx.Node], of_parameters: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a part that are computed before it and kept, and the others.

    What passes have added for parameters alone is not recomputed: masks are found once in a step, and what
    `pdp_fx.step` changes before the backward pass does not reach it. A node stays behind one that is
    recomputed and reads the same, for it may change that.
    """
    first, others, read = list[fx.Node](), list[fx.Node](), set[object]()
    for node in part:
        sources = {one.target if one.op == "get_attr" else one for one in node.all_input_nodes}
        if node in of_parameters and read.isdisjoint(sources):
            first.append(node)
        else:
            others.append(node)
            read |= sources
    return first, others


def _function(name: str, inside: list[fx.Node], lines: dict[fx.Node, list[str]]) -> list[str]:
    """The definition of a function of some nodes, and its call.

    What the nodes read becomes its arguments, what later nodes read is what it returns.
    """
    own = set(inside)
    given = list(dict.fromkeys(read for node in inside for read in node.all_input_nodes if read not in own))
    arguments = [repr(node) for node in given]
    made = ", ".join(repr(node) for node in inside if not own.issuperset(node.users))
    freed = [repr(node) for node in given if max(node.users) in own]
    text = "".join(line for node in inside for line in lines[node])
    call = f"torch.utils.checkpoint.checkpoint({', '.join([name, *arguments])}, use_reentrant = False)"
    return [
        f"def {name}({', '.join(arguments)}):\n",
        *(f"    {line}\n" for line in text.split("\n") if line),
        f"    return {made}\n",
        f"{made} = {call}" if made else call,
        f";  {' = '.join([*freed, 'None'])}\n" if freed else "\n",
    ]
