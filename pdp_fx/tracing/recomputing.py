"""Activation checkpointing that a model does inside its own forward, kept by the code of its graph.

A graph is flat: a node carries in its `meta` the number of the call of `torch.utils.checkpoint.checkpoint`
that it was recorded in, and passes need not know of it. Only the generated code puts the nodes from the first
to the last of one call into a function, and calls it through `checkpoint`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

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
    """Tell the recorder when the model enters and leaves `checkpoint(..., use_reentrant=False)`."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter, leave = hooks.__enter__, hooks.__exit__
    within: dict[int, Any] = {}

    def hooks_enter(self: Any) -> Any:
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


def recomputed_parts(graph: fx.Graph) -> list[range]:
    """The positions of the nodes of each part that is recomputed in backward; the parts do not overlap."""
    parts: dict[int, range] = {}
    for place, node in enumerate(graph.nodes):
        number = node.meta.get(RECOMPUTED)
        if number is not None:
            parts[number] = range(parts[number].start if number in parts else place, place + 1)
    joined: list[range] = []
    for part in sorted(parts.values(), key=lambda part: part.start):
        if joined and part.start < joined[-1].stop:
            part = range(joined.pop().start, max(part.stop, joined[-1].stop))
        joined.append(part)
    return joined


def in_functions(graph: fx.Graph, parts: Sequence[range]) -> Callable[[list[str]], list[str]]:
    """What turns the lines that fx generates for the graph into lines with a function for each part."""
    nodes = list(graph.nodes)

    def rewritten(body: list[str]) -> list[str]:
        starts = [i for i, text in enumerate(body) if text.startswith(_MARK)]
        before, lines = body[: starts[0]], _by_node(body, starts)
        done = 0
        for number, part in enumerate(parts, 1):
            before += [text for place in range(done, part.start) for text in lines[place]]
            before += _function(f"recomputed_{number}", nodes, part, lines)
            done = part.stop
        return before + [text for place in range(done, len(nodes)) for text in lines[place]]

    return rewritten


def _by_node(body: list[str], starts: list[int]) -> list[list[str]]:
    return [body[start:stop] for start, stop in zip(starts, [*starts[1:], len(body)], strict=True)]


def _function(name: str, nodes: list[fx.Node], part: range, lines: list[list[str]]) -> list[str]:
    """The definition of a function of some nodes, and its call.

    What the nodes read becomes its arguments, what later nodes read is what it returns.
    """
    inside = set(nodes[part.start : part.stop])
    rest = nodes[part.stop :]
    given = list(dict.fromkeys(n for node in nodes[part.start : part.stop] for n in node.all_input_nodes))
    given = [node for node in given if node not in inside]
    used = {n for node in rest for n in node.all_input_nodes}
    made = [repr(node) for node in nodes[part.start : part.stop] if node in used]
    freed = [repr(node) for node in given if node not in used]
    text = "".join(line for place in part for line in lines[place])
    arguments, results = [repr(node) for node in given], ", ".join(made)
    call = f"torch.utils.checkpoint.checkpoint({', '.join([name, *arguments])}, use_reentrant = False)"
    return [
        f"def {name}({', '.join(arguments)}):\n",
        *(f"    {line}\n" for line in text.split("\n") if line),
        f"    return {results}\n",
        f"{results} = {call}" if made else call,
        f";  {' = '.join([*freed, 'None'])}\n" if freed else "\n",
    ]
