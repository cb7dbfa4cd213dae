"""Telling a dtype that the code names from one that was read from a tensor and kept.

What is kept in a list, a dict, an attribute or a variable of an outer function is not followed, but it must
not pass for one that the code names, either: cast to it, a result would have the example's dtype for good.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from pdp_fx.tracing.expressions import (
    Located,
    arguments_of,
    assignments,
    attribute_read,
    expression_at,
    parameters_of,
    root_name,
    syntax_tree,
)
from pdp_fx.tracing.source import is_users


def gives_kept(dtype: torch.dtype, frame: FrameType) -> bool | None:
    """Whether the call that a frame makes is given a dtype that may have been read from a tensor before.

    Returns:
        None if it is passed on as the function was given it, so that the caller has to tell.
    """
    located = expression_at(frame)
    held = [each for each in arguments_of(located) if _holds(_value(each, frame), dtype)]
    if located is not None and any(_may_be_read(argument, located, frame) for argument in held):
        return True
    names = {node.id for each in held for node in ast.walk(each) if isinstance(node, ast.Name)}
    return False if names.isdisjoint(parameters_of(frame.f_code)) else None


def _holds(value: Any, dtype: torch.dtype) -> bool:
    """Whether a value is a dtype, or a list or dict that has it."""
    if isinstance(value, dict):
        value = list(value.values())
    return any(each is dtype for each in value) if isinstance(value, list | tuple) else value is dtype


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """What names, attributes and subscripts stand for, without calling anything; None for all else."""
    match expression:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Starred(value=inner):
            return _value(inner, frame)
        case ast.Attribute(value=inner, attr=name):
            return inspect.getattr_static(_value(inner, frame), name, None)
        case ast.Subscript(value=inner, slice=place):
            return _at(_value(inner, frame), place, frame)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
        case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[place, *_]):
            return _at(_value(inner, frame), place, frame)
        case _:
            return None


def _at(held: Any, place: ast.expr, frame: FrameType) -> Any:
    try:
        return held[_value(place, frame)] if isinstance(held, list | tuple | dict) else None
    except (LookupError, TypeError):
        return None


def _may_be_read(expression: ast.expr, located: Located, frame: FrameType) -> bool:
    """Whether a dtype of a tensor may get into an expression, be it by variables or attributes."""
    function = next(
        (each for each in located.parents if isinstance(each, ast.FunctionDef | ast.Lambda)), None
    )
    kept, pending, seen = _kept_attributes(syntax_tree(frame.f_code)), [expression], set[str]()
    while pending:
        for node in _parts(pending.pop()):
            read = attribute_read(node)
            if read is not None and (
                read[1] in kept or (read[1] == "dtype" and not _is_torch(read[0], frame))
            ):
                return True
            if isinstance(node, ast.Call) and _is_function_of_users(node.func, frame):
                return True
            if isinstance(node, ast.Name) and function is not None and node.id not in seen:
                seen.add(node.id)
                pending += _definitions(function).get(node.id, ())
    return False


def _parts(expression: ast.AST) -> Iterator[ast.AST]:
    """The expressions in one, without those that ask for a promotion, which is a decision of its own."""
    if not (isinstance(expression, ast.Call) and getattr(expression.func, "attr", "") in _PROMOTING):
        yield expression
        for part in ast.iter_child_nodes(expression):
            yield from _parts(part)


_PROMOTING = ("promote_types", "result_type")


def _is_torch(expression: ast.expr, frame: FrameType) -> bool:
    return isinstance(expression, ast.Name) and frame.f_globals.get(expression.id) is torch


def _is_function_of_users(expression: ast.expr, frame: FrameType) -> bool:
    code = getattr(_value(expression, frame), "__code__", None)
    return code is not None and is_users(code.co_filename)


@lru_cache(maxsize=256)
def _definitions(function: ast.FunctionDef | ast.Lambda) -> dict[str, list[ast.expr]]:
    """What the variables of a function and of those in it are made from, and what is put into them."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        for target, value in _bound(node):
            name = root_name(target)
            if name:
                found.setdefault(name, []).append(value)
    return found


def _bound(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets that a node binds or adds to, each with what it gets."""
    yield from ((each, value) for target, value in assignments(node) for each in _single(target))
    match node:
        case ast.AugAssign(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield from ((each, value) for each in _single(target))
        case ast.Call(func=ast.Attribute(value=target, attr=name), args=args) if name in _PUTTING:
            yield from ((target, value) for value in args)
        case ast.arguments(posonlyargs=first, args=others, kwonlyargs=named):
            given = [*[*first, *others][-len(node.defaults) or sys.maxsize :], *named]
            for parameter, value in zip(given, [*node.defaults, *node.kw_defaults], strict=True):
                if value is not None:
                    yield ast.Name(parameter.arg), value
        case _:
            pass


_PUTTING = frozenset("append appendleft add extend insert setdefault update".split())
"""The methods that put what they are given into a container."""


def _single(target: ast.expr) -> Iterator[ast.expr]:
    """The targets that a target with commas consists of."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _single(each)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


@lru_cache(maxsize=64)
def _kept_attributes(tree: ast.Module) -> frozenset[str]:
    """The attributes that get the dtype of a tensor somewhere in a file."""
    found = set[str]()
    for node in ast.walk(tree):
        pairs = [(target.attr, value) for target, value in _bound(node) if isinstance(target, ast.Attribute)]
        if isinstance(node, ast.Call):
            pairs += [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
        for name, value in pairs:
            read = attribute_read(value)
            if read is not None and read[1] == "dtype":
                found.add(name)
    return frozenset(found - {"dtype"})
