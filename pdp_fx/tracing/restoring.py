"""Blocks of gradient modes and of autocast, which an error that leaves them must end, too.

A graph is flat: one node enters a block, another restores what was before. Only the generated code has an
error between the two restore it, so that a failed call leaves the caller's process as it was.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from pdp_fx.tracing.modes import function_of

_RESTORED_BY: dict[Any, tuple[Any, str]] = {
    torch.is_grad_enabled: (torch._C._set_grad_enabled, "torch._C._set_grad_enabled"),
    torch.amp.autocast_mode._enter_autocast: (
        torch.amp.autocast_mode._exit_autocast,
        "torch.amp.autocast_mode._exit_autocast",
    ),
}
"""What restores the setting that a node has read or changed, given its value; and how code calls it."""


class Span(NamedTuple):
    """A block that changes a setting, from one node to another.

    Attributes:
        entry: the node whose value restores the setting.
        end: the node that does so.
    """

    entry: fx.Node
    end: fx.Node


def changed_settings(graph: fx.Graph) -> list[Span]:
    """The blocks of a graph, those inside others first; each is beside or wholly inside another.

    Those inside a block of their kind end, too: torch counts the blocks of autocast that are open, and forgets
    the weights that it has cast when none is.
    """
    found: list[Span] = []
    entered: list[fx.Node] = []
    for node in graph.nodes:
        end, _ = _RESTORED_BY.get(node.target, (None, ""))
        if end is not None and any(function_of(user) is end for user in node.users):
            entered.append(node)
        elif entered and entered[-1] in node.all_input_nodes:
            found.append(Span(entered.pop(), node))
    return found


def restored_on_errors(body: Sequence[str], spans: Sequence[Span]) -> list[str]:
    """The lines of a graph's code, in which an error that leaves a block restores what was before it.

    Args:
        body: the lines that fx generates, whose blocks of code are those of the nodes.
        spans: what `changed_settings` has found in the graph.
    """
    lines = "".join(body).splitlines(keepends=True)
    for entry, end in spans:
        first, last = (_line_of(node, lines) for node in (entry, end))
        margin = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        lines[first + 1 : last + 1] = [
            f"{margin}try:\n",
            *(f"    {line}" for line in lines[first + 1 : last + 1]),
            f"{margin}except BaseException:\n",
            f"{margin}    {_RESTORED_BY[entry.target][1]}({entry!r})\n",
            f"{margin}    raise\n",
        ]
    return lines


def _line_of(node: fx.Node, lines: Sequence[str]) -> int:
    return next(i for i, line in enumerate(lines) if line.lstrip().startswith(f"{node!r} = "))
