"""Functions that multiply data with a weight: which operand is the weight, on which axis it has inputs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

_MATMUL = (torch.matmul, torch.mm, torch.bmm, operator.matmul, "matmul", "mm", "bmm")
_ADDMM = (torch.addmm, torch.baddbmm, "addmm", "baddbmm")
_GROUPED = tuple(
    getattr(home, name)
    for home, name in ((torch, "_grouped_mm"), (functional, "grouped_mm"))
    if hasattr(home, name)
)
"""Rows of data times the matrix of their group, as in a mixture of experts; its name differs by version."""
_CONV = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)
GROUPS = 6
"""The place of ``groups`` in the arguments of a transposed convolution."""

_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_WEIGHTS: dict[Any, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(_CONV, ((1, 1),)),
    **dict.fromkeys(_TRANSPOSED, ((1, 0),)),
    **dict.fromkeys(_MATMUL, ((0, -1), (1, -2))),
    **dict.fromkeys(_ADDMM, ((1, -1), (2, -2))),
    **dict.fromkeys(_GROUPED, ((1, -2),)),
    **dict.fromkeys((torch.mv, "mv"), ((0, -1),)),
    **dict.fromkeys((torch.inner, "inner"), ((0, -1), (1, -1))),
    "torchvision::deform_conv2d": ((1, 1),),
    "transformers::grouped_mm_fallback": ((1, -2),),
}
"""For each function, method or operation: the positions of operands that may be the weight, each with the
axis of its input channels."""

_NAMES = {0: ("input",), 1: ("weight", "mat1", "batch1", "mat2", "other"), 2: ("mat2", "batch2")}


def has_weight(node: fx.Node) -> bool:
    """Whether a call has an operand that is always its weight, such as a convolution."""
    return node.target in (*_CONV, *_TRANSPOSED, *_GROUPED)


def operation_name(target: object) -> str:
    """The name of a registered operation, such as ``torchvision::nms`` of a library that may be absent."""
    return getattr(getattr(target, "overloadpacket", target), "_qualified_op_name", "")


def weight_operands(node: fx.Node) -> list[tuple[fx.Node, int | None]]:
    """The operands of a call that may be its weight, each with the axis of its input channels or None."""
    if node.target is torch.einsum:
        return _einsum_operands(node)
    found: list[tuple[fx.Node, int | None]] = []
    for position, axis in _WEIGHTS.get(node.target, _WEIGHTS.get(operation_name(node.target), ())):
        named = (node.kwargs[name] for name in _NAMES[position] if name in node.kwargs)
        operand = node.args[position] if position < len(node.args) else next(named, None)
        if isinstance(operand, fx.Node):
            found.append((_uncast(operand), None if _in_groups(node) else axis))
    return found


def _in_groups(node: fx.Node) -> bool:
    """Whether it is a transposed convolution in groups, whose weight has the channels of all on one axis."""
    groups = node.args[GROUPS] if len(node.args) > GROUPS else node.kwargs.get("groups", 1)
    return node.target in _TRANSPOSED and bool(groups != 1)


def _uncast(operand: fx.Node) -> fx.Node:
    """The operand before casts to another dtype, as in ``weight.to(x.dtype)``."""
    while operand.target == "to" and len(operand.args) == 2 and not operand.kwargs:
        source, kind = operand.args
        asks = isinstance(kind, fx.Node) and kind.target is getattr and kind.args[1] == "dtype"
        if not isinstance(source, fx.Node) or not (asks or isinstance(kind, torch.dtype)):
            return operand
        operand = source
    return operand


def _einsum_operands(node: fx.Node) -> list[tuple[fx.Node, int | None]]:
    """The operands of an einsum that may be a weight; its input channels are its first index that is summed.

    An operand without summed indices is a scale, not a weight.
    """
    equation, *rest = node.args
    operands: Any = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    if not isinstance(equation, str):
        return []
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        output = "".join(index for index in inputs if inputs.count(index) == 1)
    found: list[tuple[fx.Node, int | None]] = []
    for operand, indices in zip(operands, inputs.split(","), strict=False):
        summed = [axis for axis, index in enumerate(indices) if index.isalpha() and index not in output]
        if summed and isinstance(operand, fx.Node):
            found.append((operand, summed[0] if arrow and "." not in indices else None))
    return found
