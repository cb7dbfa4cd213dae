"""Axes of one index that have one index on inputs of every size, because the model's code says so."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from pdp_fx.channels.given_sizes import SHAPE, VIEWS, sizes_given
from pdp_fx.channels.record import Record

KEEPING = frozenset({nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity})
"""Layers whose results have the axes of their inputs, though the last may have another size."""

SPLITS = frozenset({"split", "chunk", "split_with_sizes", torch.split, torch.functional.split, torch.chunk})
"""Operations whose parts have the axes of what is split."""


def lone_axes(tensor: fx.Node, record: Record) -> frozenset[int]:
    """The axes that a view or an `unsqueeze` has given one index, or that a parameter has, from the first.

    Args:
        tensor: a node that returned one tensor. Layers and splits are seen through on the way to the view.
        record: what is known of the nodes up to it.
    """
    before = _seen_through(tensor)
    while before is not None:
        tensor, before = before, _seen_through(before)
    values = record.values_of(tensor)
    if len(values) != 1:
        return frozenset()
    rank = len(values[0].shape)
    if tensor.op == "get_attr":
        return frozenset(axis for axis, size in enumerate(values[0].shape) if size == 1)
    if tensor.target in VIEWS:
        _, _, sizes = sizes_given(tensor, 1, SHAPE)
        told = isinstance(sizes, (tuple, list)) and len(sizes) == rank
        return frozenset(axis for axis, size in enumerate(sizes) if size == 1) if told else frozenset()
    if tensor.target in ("unsqueeze", torch.unsqueeze):
        axis: Any = tensor.args[1] if len(tensor.args) > 1 else tensor.kwargs.get("dim")
        return frozenset({axis % rank}) if isinstance(axis, int) else frozenset()
    return frozenset()


def _seen_through(node: fx.Node) -> fx.Node | None:
    """What a layer or split was given, if its results have the same axes; else None."""
    if node.op == "call_module":
        layer: Any = node.graph.owning_module.get_submodule(str(node.target))  # pyright: ignore[reportOptionalMemberAccess]
        return node.all_input_nodes[0] if type(layer) in KEEPING else None
    source: Any = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and source.target in SPLITS:
        return source.all_input_nodes[0]
    return None
