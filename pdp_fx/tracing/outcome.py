"""`Outcome`: the results of one run of a model, to compare with those of another run bit for bit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pdp_fx.tracing.generators import random_state
from pdp_fx.tracing.preserve import written_now
from pdp_fx.tracing.structure import LiveShape, are_equal, as_base, children, plain_leaves, tensors

NEAR = 1e-5
"""What returned floats may differ by, relative to them, where tensors may differ by rounding."""


@dataclass(frozen=True)
class Layout:
    """How a structure is made.

    Attributes:
        kind: the type of the whole, of numbers and texts `object`.
        parts: the keys of a container, and how what it holds is made.
    """

    kind: type
    parts: tuple[tuple[Any, "Layout"], ...] = ()

    def difference(self, other: "Layout", place: str = "") -> str:
        """How the layout of something returned differs from this one, as the end of a sentence, or nothing.

        Args:
            other: that layout.
            place: where in the whole the two are.
        """
        where = f" at {place}" if place else ""
        if self.kind is not other.kind:
            return f"returns a {other.kind.__name__}{where}, not a {self.kind.__name__}"
        if [key for key, _ in self.parts] != [key for key, _ in other.parts]:
            return f"returns a {self.kind.__name__} with other keys{where}"
        pairs = zip(self.parts, other.parts, strict=True)
        found = (mine.difference(theirs, f"{place}[{key!r}]") for (key, mine), (_, theirs) in pairs)
        return next(filter(None, found), "")


@dataclass(frozen=True)
class Contents:
    """What there is in a structure.

    Attributes:
        layout: how it is made.
        tensors: copies of the tensors.
        numbers: the numbers and texts.
    """

    layout: Layout = Layout(tuple)
    tensors: tuple[torch.Tensor, ...] = ()
    numbers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What is compared of one run.

    Attributes:
        results: what the model returned.
        buffers: the buffers afterwards, by name.
        generators: the states of all random number generators afterwards.
        left: what is in the arguments afterwards; nothing if the run has changed none of it.
        written: the parameters that runs write to afterwards, by their ids, as far as runs before have shown
            which these are.
    """

    results: Contents
    buffers: Mapping[str, torch.Tensor]
    generators: tuple[Any, ...]
    left: Contents = Contents()
    written: Mapping[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def is_near(self, other: "Outcome", tolerance: float | None = None) -> bool:
        """Whether another run's results differ by rounding at most.

        Args:
            other: what that run gave.
            tolerance: what a result may differ by, relative to its scale; None for 1000 roundings of tensors,
                and `NEAR` for numbers.
        """
        share = NEAR if tolerance is None else tolerance
        alike = partial(near, tolerance=tolerance)
        given = _are_alike(self.results, other.results, alike, share)
        return given and _are_alike(self.left, other.left, alike, share)

    def is_begun_by(self, other: "Outcome", size: int, other_size: int) -> bool:
        """Whether a run on another batch gives the same results for the examples that both begin with.

        Args:
            other: what that run gave.
            size: how many examples this run had.
            other_size: how many that one had.
        """
        if self.results.layout != other.results.layout:
            return False
        for mine, theirs in zip(self.results.tensors, other.results.tensors, strict=True):
            if not mine.ndim or not theirs.ndim or len(mine) * other_size != len(theirs) * size:
                return False
            rows = min(len(mine), len(theirs))
            if not near(mine[:rows], theirs[:rows]):
                return False
        return True

    def difference(self, other: "Outcome") -> str:
        """How another run differs from this one, as the end of a sentence; empty if it does not."""
        wanted, got = self.results, other.results
        laid_out = wanted.layout.difference(got.layout)
        if laid_out:
            return laid_out
        if len(wanted.tensors) != len(got.tensors):
            return f"returns {len(got.tensors)} tensors, not {len(wanted.tensors)}"
        for index, (mine, theirs) in enumerate(zip(wanted.tensors, got.tensors, strict=True)):
            if not _identical(mine, theirs):
                return f"returns another tensor at position {index}"
        if not _same_numbers(wanted.numbers, got.numbers):
            return f"returns the numbers {got.numbers}, not {wanted.numbers}"
        for name, buffer in self.buffers.items():
            if name not in other.buffers or not _identical(buffer, other.buffers[name]):
                return f"leaves another value in the buffer {name}"
        if not all(
            _identical(self.written[key], other.written[key]) for key in self.written.keys() & other.written
        ):
            return "leaves another value in a parameter"
        if not _are_alike(self.left, other.left):
            return "leaves something else in what it is given"
        return "" if self.generators == other.generators else "draws other random numbers"


class Given:
    """The arguments of a run that is about to begin, which may change them.

    Args:
        arguments: all that the model is given.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments, self._before = arguments, _contents(arguments)

    def left(self) -> Contents:
        """As in `Outcome`, when the run is over."""
        after = _contents(self._arguments)
        return Contents() if _are_alike(self._before, after) else after


def outcome(model: nn.Module, output: Any, given: Given) -> Outcome:
    """The outcome of a run of ``model`` on what it was given that has just ended and returned ``output``."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    left, written = given.left(), written_now()
    return Outcome(_contents(output), buffers, random_state(), left, written)


def _contents(structure: Any) -> Contents:
    leaves = [as_base(leaf) for leaf in plain_leaves(structure)]
    numbers = tuple(number for leaf in leaves for number in _as_plain(leaf))
    copies = tuple(tensor.detach().clone() for tensor in tensors(structure))
    return Contents(_layout(structure), copies, numbers)


def _layout(structure: Any, around: frozenset[int] = frozenset()) -> Layout:
    """How a structure is made; objects that are no containers are not looked into."""
    if not isinstance(structure, tuple | list | Mapping):
        return Layout(object if _kinds(as_base(structure)) else type(structure))
    kind = next((kind for kind in _LIKE if isinstance(structure, _LIKE[kind])), type(structure))
    if id(structure) in around:
        return Layout(kind)
    around |= {id(structure)}
    return Layout(
        kind,
        tuple((*(_as_plain(key) or [key]), _layout(part, around)) for _, key, part in children(structure)),
    )


_LIKE: Mapping[type, tuple[type, ...]] = {
    tuple: (torch.Size, LiveShape),
    list: (immutable_list,),
    dict: (immutable_dict,),
}
"""Containers that stand for others: sizes are tuples, and lists and dicts in a graph are types of fx."""


def _as_plain(leaf: Any) -> list[Any]:
    """The plain number or text that a value is, if any: a live number has a type of its own."""
    return [kind(leaf) for kind in _kinds(leaf)[:1]]


def _kinds(leaf: Any) -> list[type]:
    """The types of plain numbers and texts that a value is of, the narrowest first."""
    return [kind for kind in (bool, int, float, complex, str) if isinstance(leaf, kind)]


def _same_numbers(mine: Sequence[Any], theirs: Sequence[Any], tolerance: float = 0.0) -> bool:
    """Whether numbers and texts are the same, floats up to a share of them; NaN is the same as NaN."""
    return len(mine) == len(theirs) and all(
        type(one) is type(other)
        and (one == other or (one != one and other != other) or _are_close(one, other, tolerance))
        for one, other in zip(mine, theirs, strict=True)
    )


def _are_close(one: Any, other: Any, tolerance: float) -> bool:
    return isinstance(one, float) and math.isclose(one, other, rel_tol=tolerance)


def _are_alike(
    mine: Contents,
    theirs: Contents,
    alike: Callable[[torch.Tensor, torch.Tensor], bool] | None = None,
    share: float = 0.0,
) -> bool:
    """Whether two structures hold the same.

    Args:
        mine: what one holds.
        theirs: what the other holds.
        alike: which tensors count as the same; None for those that are.
        share: what floats may differ by, relative to them.
    """
    return (
        mine.layout == theirs.layout
        and len(mine.tensors) == len(theirs.tensors)
        and all(map(alike or _identical, mine.tensors, theirs.tensors))
        and _same_numbers(mine.numbers, theirs.numbers, share)
    )


def near(one: torch.Tensor, other: torch.Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors differ by no more than ``tolerance`` of their scale, or 1000 roundings of that."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return _identical(one, other)
    scale = one.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item()
    tolerance = 1000 * torch.finfo(one.dtype).eps if tolerance is None else tolerance
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is torch.strided and (one.is_floating_point() or one.is_complex()):
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return are_equal(one, other)
