"""Labels, which identify channels, and the ties between them.

A `Layer` says for every element of a tensor to which channel it belongs along one or more axes. An axis along
which the label does not change has size 1 in it. A tensor can carry several layers: a weight has one for its
rows and one for its columns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


def from_front(axis: int, rank: int) -> int:
    """An axis, counted from the front; a single number is taken to have one, as in `number.sum(-1)`."""
    return int(axis) % max(rank, 1)


@dataclass(frozen=True)
class Slot:
    """One axis of one parameter or buffer, by its qualified name, or of a constant.

    A constant is a tensor that the graph makes of nothing but fixed numbers, such as a range. It goes by the
    name of its node, with a percent sign before it.
    """

    tensor: str
    axis: int

    @property
    def constant(self) -> str:
        """The node that makes the constant; empty for a parameter or buffer."""
        return self.tensor[1:] if self.tensor.startswith("%") else ""


@dataclass(frozen=True)
class Reason:
    """Why channels stay.

    Attributes:
        node: the name of the graph node that needs them.
        source: the line of the model's code that the node comes from, or the empty string.
        why: the reason, a sentence.
        remedy: what the user can do about it, or the empty string.
    """

    node: str
    source: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"%{self.node}{where}: {self.why}{remedy}"


@dataclass(frozen=True, eq=False)
class Layer:
    """Labels of a tensor along some of its axes.

    Attributes:
        ids: the labels, int64, with as many axes as the tensor, each of the tensor's size or 1.
        zero: bool, same shape: whether the element is exactly 0 once its channel is masked with 0.
        needs: the layers, of operands, whose elements must be 0 for the elements of this one to be 0.
        slot: the parameter axis that these labels were made for, if only layout operations lie between.
        free: whether all indices hold the same values (a broadcast axis, a constant), so that any can go.
    """

    ids: Tensor
    zero: Tensor
    needs: tuple[Layer, ...] = ()
    slot: Slot | None = None
    free: bool = False

    @cached_property
    def support(self) -> frozenset[int]:
        """The axes along which the labels change."""
        return frozenset(axis for axis, size in enumerate(self.ids.shape) if size > 1)

    @property
    def all_zero(self) -> bool:
        """Whether every element is 0 once its channel is masked with 0."""
        return bool(self.zero.all())


def origins(*layers: Layer) -> tuple[Slot, ...]:
    """The parameter axes that make the elements of these layers 0, found by following ``needs``.

    For a layer of a computed weight these are the parameter axes that it comes from.
    """
    found: dict[Slot, None] = {}
    todo, seen = deque(layers), set[int]()
    while todo:
        layer = todo.popleft()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if layer.slot is not None:
            found[layer.slot] = None
        else:
            todo.extend(layer.needs)
    return tuple(found)


def compress(ids: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Shrink every axis along which both tensors are constant to size 1."""
    # Expanded axes, which have stride 0, need no comparison of values.
    for axis, strides in enumerate(zip(ids.stride(), zero.stride(), strict=True)):
        if ids.shape[axis] > 1 and strides == (0, 0):
            ids, zero = ids.narrow(axis, 0, 1), zero.narrow(axis, 0, 1)
    for axis, size in enumerate(ids.shape):
        if size > 1 and _is_constant(ids, axis) and _is_constant(zero, axis):
            ids, zero = ids.narrow(axis, 0, 1), zero.narrow(axis, 0, 1)
    return ids.contiguous(), zero.contiguous()


def _is_constant(tensor: Tensor, axis: int) -> bool:
    first = tensor.narrow(axis, 0, 1)
    return torch.equal(first, tensor.narrow(axis, 1, 1)) and bool((tensor == first).all())


def shaped(vector: Tensor, axis: int, ndim: int) -> Tensor:
    """Reshape ``vector`` to ``ndim`` axes, of which all but ``axis`` have size 1."""
    shape = [1] * ndim
    shape[axis] = -1
    return vector.reshape(shape)


def first_line(ids: Tensor, axis: int) -> Tensor:
    """The labels along one axis at the first place of all others, shape (size of the axis,)."""
    return ids.movedim(axis, 0).reshape(ids.shape[axis], -1)[:, 0]


def is_between_others(line: Tensor) -> bool:
    """Whether labels repeat one by one and as a whole: what lies before and behind them is on their axis."""
    values, counts = torch.unique_consecutive(line, return_counts=True)
    count = len(values.unique())
    again = values.reshape(-1, count) if len(values) % count == 0 else values[None]
    return len(again) > 1 and bool(
        (counts == counts[0]).all() & (counts > 1).all() & (again == again[0]).all()
    )


class Ties:
    """All labels of a run, the pairs that are tied, and the labels that must stay.

    `tie` and `bind` only collect pairs; `classes` solves them all at once.

    Attributes:
        frozen: labels that must stay, with the reasons, in the order in which they were found.
    """

    def __init__(self) -> None:
        self._next = 0
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self.frozen: list[tuple[np.ndarray, Reason]] = []
        self._roots = np.arange(0)
        self._joined: list[np.ndarray] = []

    @property
    def count(self) -> int:
        """How many labels there are."""
        return self._next

    def fresh(self, count: int) -> Tensor:
        """Return ``count`` new labels; all labels are on the CPU, wherever the model is."""
        self._next += count
        return torch.arange(self._next - count, self._next, device="cpu")

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Tie labels whose elements meet in an operation, such as a sum; operands are broadcast.

        `pdp_fx.passes.check_order` compares which labels have met before and after channels are removed.
        """
        pairs = self._add(left, right)
        if pairs.size:
            self._joined.append(pairs)

    def bind(self, left: Tensor, right: Tensor) -> None:
        """Tie labels that must be kept or dropped together without having met; operands are broadcast."""
        self._add(left, right)

    def _add(self, left: Tensor, right: Tensor) -> np.ndarray:
        left, right = torch.broadcast_tensors(left, right)
        pairs = torch.stack([left.reshape(-1), right.reshape(-1)])
        found = pairs[:, pairs[0] != pairs[1]].numpy()
        if found.shape[1] > 4096:
            # Each pair as one number, of which far fewer are left.
            found = np.stack(np.divmod(np.unique(found[0] * self._next + found[1]), self._next))
        if found.size:
            self._pairs.append((found[0], found[1]))
        return found

    def joined(self) -> np.ndarray:
        """All pairs of labels that have met (`tie`), shape (2, pairs)."""
        return np.concatenate(self._joined, axis=1) if self._joined else np.empty((2, 0), dtype=np.int64)

    def freeze(self, ids: Tensor, reason: Reason) -> None:
        """Say that these labels must stay."""
        self.frozen.append((ids.reshape(-1).numpy(), reason))

    def classes(self) -> np.ndarray:
        """Return for every label the smallest label that it is tied to, shape (labels,)."""
        parent = np.concatenate([self._roots, np.arange(len(self._roots), self._next)])
        if self._pairs:
            left = np.concatenate([pair[0] for pair in self._pairs])
            right = np.concatenate([pair[1] for pair in self._pairs])
            parent = _joined(parent, left, right)
            self._pairs = []
        self._roots = parent
        return parent


def _joined(parent: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Union-find on arrays: ``parent`` changed so that each pair of labels has the same root."""
    while True:
        roots_left, roots_right = parent[left], parent[right]
        apart = roots_left != roots_right
        if not apart.any():
            return parent
        low = np.minimum(roots_left[apart], roots_right[apart])
        high = np.maximum(roots_left[apart], roots_right[apart])
        parent = parent.copy()
        np.minimum.at(parent, high, low)
        parent = _shortcut(parent)


def _shortcut(parent: np.ndarray) -> np.ndarray:
    """Point every label straight at its root."""
    while True:
        above = parent[parent]
        if np.array_equal(above, parent):
            return parent
        parent = above
