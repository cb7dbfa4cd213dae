"""Which graph nodes still fit after channels are removed.

A node that lays channels out by sizes written into the program would no longer fit. It is left
alone only if the sizes follow by themselves: ``flatten``, or a ``-1`` at the labelled axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from pdp_fx.channels.flow import LabelFlow

SIZE_FREE: frozenset[Any] = frozenset({
    torch.flatten, "flatten", torch.matmul, "matmul", torch.bmm, "bmm", functional.linear, functional.embedding,
    functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d, functional.conv_transpose2d,
    functional.conv_transpose3d, "reshape_as", "view_as", "expand_as", torch.permute, "permute",
})  # fmt: skip
"""Functions and methods that take no sizes."""

RESHAPES: frozenset[Any] = frozenset({"view", "reshape", torch.reshape})


def freeze_written_sizes(node: fx.Node, flow: LabelFlow, result: Any) -> None:
    """Freeze the labels that ``node`` has laid out by sizes that would no longer fit."""
    if node.op not in ("call_function", "call_method") or node.target in SIZE_FREE:
        return
    for sized in flow.sized:
        if len(sized.after.support) == 1 and node.target in RESHAPES:
            (axis,) = sized.after.support
            if _size_at(node, axis, sized.after.ids.ndim) == -1:
                continue
        flow.freeze(
            sized.before.ids,
            f"{_target_name(node)} is told sizes or positions of these channels, which would no longer fit",
            "write it with flatten or -1 at the channel axis",
        )


def _size_at(node: fx.Node, axis: int, ndim: int) -> Any:
    """The size that a reshaping node gives for ``axis`` of its result."""
    sizes: Any = node.args[1:] or (node.kwargs.get("shape"),)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return sizes[axis] if len(sizes) == ndim else None


def _target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
