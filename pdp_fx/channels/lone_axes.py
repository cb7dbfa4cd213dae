"""Axes of one index that have one index on inputs of every size, because the model's code says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from pdp_fx.channels.record import Record

KEEPING = frozenset({nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity})
"""Layers whose results have the axes of their inputs, though the last may have another size."""


def lone_axes(tensor: fx.Node, record: Record) -> frozenset[int]:
    """The axes that a view or an `unsqueeze` has given one index, counted from the first.

    Args:
        tensor: a node that returned one tensor. Only layers are seen through on the way to the view.
        record: what is known of the nodes up to it.
    """
    while tensor.op == "call_module" and _keeps_axes(tensor):
        (tensor,) = tensor.all_input_nodes
    values = record.values_of(tensor)
    if len(values) != 1:
        return frozenset()
    rank = len(values[0].shape)
    if tensor.target in ("view", "reshape", torch.reshape):
        given: Any = tensor.args[1:] or tuple(tensor.kwargs.values())
        sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        return (
            frozenset(axis for axis, size in enumerate(sizes) if size == 1)
            if len(sizes) == rank
            else frozenset()
        )
    if tensor.target in ("unsqueeze", torch.unsqueeze):
        axis: Any = tensor.args[1] if len(tensor.args) > 1 else tensor.kwargs.get("dim")
        return frozenset({axis % rank}) if isinstance(axis, int) else frozenset()
    return frozenset()


def _keeps_axes(node: fx.Node) -> bool:
    layer: Any = node.graph.owning_module.get_submodule(str(node.target))  # pyright: ignore[reportOptionalMemberAccess]
    return type(layer) in KEEPING
