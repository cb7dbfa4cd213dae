"""The checks of a graph's inputs: that what the graph relies on is as in the example."""

import enum
import operator
from collections.abc import Hashable, Mapping
from itertools import combinations
from typing import Any, cast

import torch

from pdp_fx.tracing.examples import ExampleCall, is_batch
from pdp_fx.tracing.objects import Held
from pdp_fx.tracing.shapes import Facts, check_step, length_of, reached
from pdp_fx.tracing.steps import CHECKS, Expr, Recording, Scope, Step, Value, identity, parts_of
from pdp_fx.tracing.structure import (
    BASE_TYPES,
    as_base,
    attributes,
    defaults,
    has_tensors,
    is_object,
    is_opaque,
    is_record,
    kind_of_tensor,
)

Tensors = list[tuple[Value, torch.Tensor]]
"""Tensors among the inputs, with how to reach each."""

NUMBERS_HAVE = "as_integer_ratio"
"""An attribute of all numbers, but of no tensor."""

TAKE_ONCE = "for one, trace a module of your own that takes it once and calls the model with it"
"""What to do with a model that goes by whether two of its inputs are one tensor."""


class Uses:
    """Which inputs and parts of inputs a recording uses, and for which of them None would fail by itself."""

    def __init__(self, recording: Recording) -> None:
        self.used: set[Hashable] = set()
        self.needed: set[Hashable] = set()
        for step in recording.steps:
            if step.target not in CHECKS:
                self._note((step.args, step.kwargs))
                self.needed |= {place_of(value) for value in step.args[:1] if not step.reason}
        self._note(recording.output)

    def needs(self, value: Value | None) -> bool:
        """Whether the recording fails by itself where an input or a part of one is None."""
        return value is not None and place_of(value) in self.needed

    def has(self, value: Value) -> bool:
        """Whether the recording uses an input or a part of one."""
        return place_of(value) in self.used

    def _note(self, tree: Any) -> None:
        for value in parts_of(tree):
            self.used.add(place_of(value))
            if isinstance(value, Expr) and isinstance(value.call, str):
                self.needed.add(place_of(value.args[0]))


def place_of(value: Any) -> Hashable:
    """A key for an input or a part of an input; None for any other value."""
    if isinstance(value, Expr) and value.call in (operator.getitem, getattr):
        return place_of(value.args[0]), identity(value.args[1])
    return value if isinstance(value, Step) else None


def tensors_given(step: Step, example: Any, uses: Uses, ordered: bool) -> Facts:
    """The facts to check of an input with tensors that the graph uses."""
    if place_of(step) not in uses.used or not has_tensors(example):
        return []
    optional = bool(step.args)
    return [
        *_present(step, example, uses, optional),
        *(plain_parts(step, example, ordered) if optional else []),
    ]


def _present(value: Value, example: Any, uses: Uses, optional: bool) -> Facts:
    """For each tensor that is used and could be something else, that it is a tensor."""
    places = [(inner, place_of(inner)) for inner, _ in tensors_in(value, example)]
    return [
        (Expr(torch.is_tensor, (inner,)), True)
        for inner, place in places
        if place in uses.used and (optional or place not in uses.needed)
    ]


def check_inputs(facts: Facts, scope: Scope) -> Step:
    """A step that fails where these facts do not hold, and says which inputs the graph was traced with."""
    wanted = ", ".join(_fact_said(value, fact) for value, fact in facts)
    message = (
        f"this graph was traced with {wanted}; for anything else, trace with example_inputs that have it"
    )
    kinds = [kind for value, fact in facts for kind in _kind(value, fact)]
    return check_step([*facts, *kinds], message, scope, "")


def _kind(value: Value, fact: Any) -> Facts:
    """What tells an input from those that equal it: True, 1, 1.0 and members of an `IntEnum`."""
    if place_of(value) is None:
        return []
    if isinstance(fact, bool):
        return [(Expr(operator.is_, (value, fact)), True)]
    is_truth: Facts = [(Expr(operator.is_, (value, bool(fact))), False)] if fact in (0, 1) else []
    return is_truth + [(Expr(hasattr, (value, has)), True) for kind, has in _HAVE if isinstance(fact, kind)]


# What is not there `torch.compile` cannot ask of a number.
_HAVE = ((enum.Enum, "_name_"), (int, "bit_count"), (float, "hex"))
"""Attributes that numbers of these types have, also those of NumPy, and others have not."""


def plain_parts(value: Value, example: Any, ordered: bool, around: frozenset[int] = frozenset()) -> Facts:
    """The facts to check of everything in a structure but tensors: plain values, lengths, keys, and classes.

    The model may read these without a torch function, so that the recorder does not see it. Of what objects
    with tensors hold nothing is checked.

    Args:
        value: how to reach the structure.
        example: the structure.
        ordered: whether the model goes by the order of keys.
        around: the ids of the objects that hold it.
    """
    example = as_base(example)
    if isinstance(example, (*BASE_TYPES, slice)):
        return [(value, example)]
    if is_opaque(example):
        return [(value, Expr(Held(example), ()))]
    parts = _parts(value, example)
    around |= {id(example)}
    new = [(inner, part) for inner, part in parts if id(part) not in around]
    facts = [fact for inner, part in new for fact in plain_parts(inner, part, ordered, around)]
    if is_object(example) and not isinstance(example, list | tuple | Mapping):
        facts = [(Expr(type, (value,)), Expr(Held(type(example)), ())), *facts]
    if isinstance(example, list | tuple | Mapping):
        facts = [length_of(value, example), *facts]
    plain = BASE_TYPES if ordered else str
    if isinstance(example, Mapping) and all(isinstance(key, plain) for key in example):
        keys = list if ordered else sorted
        facts = [(Expr(keys, (value,)), keys(example)), *facts[1:]]
    return facts


def _parts(value: Value, example: Any) -> list[tuple[Value, Any]]:
    """What a container, a record or an object without tensors holds, and how to reach it."""
    contained = isinstance(example, list | tuple | Mapping)
    parts = reached(value, example) if contained else []
    if is_object(example) and (not has_tensors(example) or (is_record(example) and not contained)):
        held = {**defaults(type(example)), **attributes(example)}
        parts += [(Expr(getattr, (value, name)), part) for name, part in held.items()]
    return parts


def batch_sizes(given: Tensors, size: int | None) -> Facts:
    """The facts to check of first axes that have the batch size ``size``; none if it is None."""
    if size is None:
        return []
    return [(Expr("size", (value, 0)), size) for value, tensor in given if is_batch(tensor, size)]


def sizes_held(given: Tensors, call: ExampleCall, held: frozenset[int]) -> Facts:
    """The facts to check of axes, other than the batch, that have one of the sizes ``held``."""
    return [
        (Expr("size", (value, axis)), size)
        for value, tensor in given
        for axis, size in call.other_axes(tensor)
        if size in held
    ]


def tensors_in(value: Value, example: Any, around: frozenset[int] = frozenset()) -> Tensors:
    """How to reach the tensors in a structure, and these.

    Args:
        value: how to reach the structure.
        example: the structure.
        around: the ids of the objects that hold it.
    """
    if isinstance(example, torch.Tensor):
        return [(value, example)]
    if isinstance(example, BASE_TYPES) or id(example) in around:
        return []
    around |= {id(example)}
    return [found for inner, part in reached(value, example) for found in tensors_in(inner, part, around)]


def all_apart(given: Tensors) -> Facts:
    """The facts to check of tensors of one kind, that no two are one."""
    return [
        (Expr(operator.is_, (one, other)), False)
        for (one, first), (other, second) in combinations(given, 2)
        if kind_of_tensor(first) == kind_of_tensor(second)
    ]


def _fact_said(value: Value, fact: Any) -> str:
    if isinstance(value, Expr) and value.call is torch.is_tensor:
        return f"{said(value.args[0])}=a tensor"
    if isinstance(fact, Expr):
        thing = cast(Held, fact.call).thing
        return f"{said(value)}={getattr(thing, '__name__', thing)}"
    if isinstance(value, Expr) and value.call is operator.contains:
        return f"{value.args[1]!r} {'in' if fact else 'not in'} {said(value.args[0])}"
    if isinstance(value, Expr) and value.call is hasattr:
        thing, name = said(value.args[0]), value.args[1]
        return f"{thing}=a number" if name == NUMBERS_HAVE else f"no {thing}.{name}"
    return f"{said(value)}={fact!r}"


def said(value: Value) -> str:
    """An input or a part of one as its caller would write it."""
    if isinstance(value, Expr):
        inner = said(value.args[0])
        if value.call is operator.getitem:
            return f"{inner}[{value.args[1]!r}]"
        return f"{inner}.{value.args[1]}" if value.call is getattr else f"{_SAID[value.call]}({inner})"
    return str(value.target) if isinstance(value, Step) else "?"


_SAID: dict[Any, str] = {operator.length_hint: "len", list: "list", sorted: "sorted", type: "type"}
