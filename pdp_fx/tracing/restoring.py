"""Blocks of gradient modes and of autocast, which an error that leaves them must end, too.

A graph is flat: one node enters a block, another restores what was before. Only the generated code has an
error between the two restore it, so that a failed call leaves the caller's process as it was. Where a graph
is run node by node, `blocks_ended` does so.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from pdp_fx.tracing.modes import function_of

_CASTS = torch.amp.autocast_mode._enter_autocast

_ENDED_BY: dict[Any, Any] = {
    torch.is_grad_enabled: torch._C._set_grad_enabled,
    _CASTS: torch.amp.autocast_mode._exit_autocast,
}
"""What ends a block, given the value of the node that enters it."""


_CASTING = ("cpu", "cuda")
"""The types of devices whose settings of autocast are restored."""


@contextmanager
def blocks_ended() -> Generator[None, None, None]:
    """Restore gradients and autocast at the end, as a graph leaves them that fails inside of their blocks."""
    gradients, cache, depth = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _open_casts()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _CASTING]
    try:
        yield
    finally:
        torch._C._set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        left = _open_casts() - depth
        for _ in range(left):
            torch.autocast_decrement_nesting()
        if left and not depth:
            # As at the end of the last block: torch keeps the weights that it has cast till then.
            torch.clear_autocast_cache()


def _open_casts() -> int:
    """How many blocks of autocast are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


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

    Those inside a block of their kind end, too: torch counts the open blocks of autocast, and forgets the
    weights that it has cast when there are none.
    """
    found: list[Span] = []
    entered: list[fx.Node] = []
    for node in graph.nodes:
        end = _ENDED_BY.get(node.target)
        if end is not None and any(function_of(user) is end for user in node.users):
            entered.append(node)
        elif entered and entered[-1] in node.all_input_nodes:
            found.append(Span(entered.pop(), node))
    return found


def restored_on_errors(body: Sequence[str], spans: Sequence[Span]) -> list[str]:
    """The lines of a graph's code, in which an error that leaves a block restores what was before it.

    Blocks of autocast are written as such, which every version of torch compiles.

    Args:
        body: the lines that fx generates, whose blocks of code are those of the nodes.
        spans: what `changed_settings` has found in the graph.
    """
    lines = "".join(body).splitlines(keepends=True)
    for entry, end in spans:
        first, last = (_line_of(node, lines) for node in (entry, end))
        before, *inside = lines[first : last + 1]
        margin = before[: len(before) - len(before.lstrip())]
        if entry.target is _CASTS:
            call, _, freed = before.partition("._enter_autocast(")[2].rstrip().partition(";  ")
            computes = any(line.lstrip()[:1] not in ("", "#") for line in inside[:-1])
            # fx puts comments between the nodes, which are not enough for a block.
            begun = freed or ("" if computes else "pass")
            inside = [f"{margin}{begun}\n" if begun else "", *inside[:-1]]
            lines[first : last + 1] = [f"{margin}with torch.autocast({call}:\n", *_indented(inside)]
        else:
            lines[first + 1 : last + 1] = [
                f"{margin}try:\n",
                *_indented(inside),
                f"{margin}except BaseException:\n",
                f"{margin}    torch._C._set_grad_enabled({entry!r})\n",
                f"{margin}    raise\n",
            ]
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines if line.strip()]


def _line_of(node: fx.Node, lines: Sequence[str]) -> int:
    return next(i for i, line in enumerate(lines) if line.lstrip().startswith(f"{node!r} = "))
