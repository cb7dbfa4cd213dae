"""Parts of a graph that run without gradients, as the model's code has them under `torch.no_grad()`.

A masked weight that is made in such a part passes no gradient on, whatever uses it later. So what is used
elsewhere, too, is made ahead of the part.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from pdp_fx.weights.stand_in import SWITCH


def switches_off(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node in a part that may run without gradients, the node that begins the part.

    A part ends where gradients become again what they were before it.
    """
    found: dict[fx.Node, fx.Node] = {}
    start: fx.Node | None = None
    for node in graph.nodes:
        if node.target in (torch._C._set_grad_enabled, SWITCH):
            to = node.args[-1]
            if start is None:
                start = None if to is True else node
            elif isinstance(to, fx.Node) and to not in found:
                found[node], start = start, None
        if start is not None:
            found[node] = start
    return found


def part_to_leave(node: fx.Node, users: Iterable[fx.Node], parts: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The node that begins the part around ``node``, if some of the users are not in it; else None.

    Args:
        node: a node that can be made anywhere ahead of its users.
        users: the users.
        parts: what `switches_off` is.
    """
    start = parts.get(node)
    return start if start is not None and any(parts.get(user) is not start for user in users) else None
