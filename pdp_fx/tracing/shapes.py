"""Checks, as steps of a graph, of the structure of nested containers.

A graph reads the parts that were there when it was recorded. If a list is longer or a tensor is missing in
another run, the graph must fail instead of ignoring the difference.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch

from pdp_fx.tracing.steps import Expr, Scope, Step, Value
from pdp_fx.tracing.structure import children

Facts = list[tuple[Value, Any]]


def structure_of(value: Value, example: Any) -> Facts:
    """The facts about a value structured like ``example``: lengths of containers, and parts that are None.

    Texts and truth values are among them, for code may go by these.
    """
    if example is None or isinstance(example, torch.Tensor):
        return [(Expr(operator.is_, (value, None)), example is None)]
    if isinstance(example, str | bool):
        return [(Expr(operator.eq, (value, example)), True)]
    if not isinstance(example, list | tuple | Mapping):
        return []
    facts = [length_of(value, example)]
    for _, key, part in children(example):
        facts += structure_of(Expr(operator.getitem, (value, key)), part)
    return facts


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
