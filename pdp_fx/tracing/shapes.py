"""Checks, as steps of a graph, of what nested containers and objects hold besides tensors.

A graph reads the parts that were there when it was recorded, and a number or text among them is a constant in
it. If a list is longer, a tensor is missing or a number is another one in another run, the graph must fail
instead of ignoring the difference.
"""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pdp_fx.tracing.objects import Held
from pdp_fx.tracing.sizes import Live
from pdp_fx.tracing.steps import Expr, Scope, Step, Value
from pdp_fx.tracing.structure import BASE_TYPES, as_base, children, has_tensors, is_opaque, tags

Facts = list[tuple[Value, Any]]


def structure_of(value: Value, example: Any, numbers: bool, around: frozenset[int] = frozenset()) -> Facts:
    """The facts about a value structured like ``example``: all in it but what is in its tensors.

    That is how long containers are, which parts are None, and numbers, texts, dtypes and the like, for code
    may go by these.

    Args:
        value: the value.
        example: what it is in the run that is recorded.
        numbers: whether numbers are among the facts; those that depend on data are no facts.
        around: the containers and objects that the example is in.
    """
    example = as_base(example)
    if isinstance(example, Live):
        return []
    if example is None:
        return [(Expr(operator.is_, (value, None)), True)]
    if isinstance(example, int | float | complex) and not isinstance(example, bool) and not numbers:
        return []
    if isinstance(example, (*BASE_TYPES, slice)):
        return [(Expr(operator.eq, (value, example)), True)]
    if isinstance(example, np.ndarray):
        # Its comparison gives an array, which has no truth.
        return [(Expr(operator.eq, (Expr("tolist", (value,)), example.tolist())), True)]
    if is_opaque(example) or _has_odd_keys(example):
        return [(Expr(operator.eq, (value, Expr(Held(example), ()))), True)]
    if id(example) in around:
        return []
    facts: Facts = []
    parts = reached(value, example)
    if isinstance(example, list | tuple | Mapping):
        facts.append(length_of(value, example))
    elif isinstance(example, torch.Tensor):
        facts.append((Expr(operator.is_, (value, None)), False))
        parts = [(Expr(getattr, (value, name)), part) for name, part in tags(example).items()]
    for inner, part in parts:
        facts += structure_of(inner, part, numbers, around | {id(example)})
    return facts


def reached(value: Value, example: Any) -> list[tuple[Value, Any]]:
    """The parts of a container or object, and how to reach them."""
    reach = {"item": operator.getitem, "attribute": getattr}
    return [(Expr(reach[kind], (value, key)), part) for kind, key, part in children(example)]


def _has_odd_keys(example: Any) -> bool:
    """Whether this is a mapping without tensors whose keys cannot be written down in code."""
    if not isinstance(example, Mapping) or has_tensors(example):
        return False
    return not all(isinstance(key, BASE_TYPES) for key in example)


def by_depth(facts: Facts) -> list[Facts]:
    """The facts about containers ahead of those about their parts, which may be missing."""
    found: dict[int, Facts] = {}
    for fact in facts:
        found.setdefault(_depth(fact[0]), []).append(fact)
    return [found[depth] for depth in sorted(found)]


def _depth(value: Any) -> int:
    """How many containers and objects a part of a value is in."""
    if not isinstance(value, Expr):
        return 0
    return (value.call in (operator.getitem, getattr)) + _depth(value.args[0])


def length_of(value: Value, example: Any) -> tuple[Value, int]:
    """How long a container is; None counts as 0."""
    return Expr(operator.length_hint, (value, 0)), len(example)


def check_step(facts: Facts, message: str, scope: Scope, source: str) -> Step:
    """A step that fails, with the message, unless all values are what they were."""
    equal = Expr(operator.eq, (tuple(value for value, _ in facts), tuple(fact for _, fact in facts)))
    return Step("call_function", torch._assert, (equal, message), {}, scope, source)
