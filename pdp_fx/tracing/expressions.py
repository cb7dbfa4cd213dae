"""Reading the source expression that a running frame is evaluating.

Python keeps for every instruction the exact span of source it came from; looked up in the file's syntax tree, that
span is an expression, and its parents say what the value is for.
"""

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import FrameType

Span = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True)
class Located:
    """An expression in the syntax tree of its file, with the way up to the root."""

    node: ast.AST
    parents: tuple[ast.AST, ...]


def expression_at(frame: FrameType) -> Located | None:
    """The innermost expression whose instruction the frame is executing, or None if there is no source to read."""
    spans = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(spans, (None, None, None, None))
    return _by_span(frame.f_code.co_filename).get((line, end_line, column, end_column))


@lru_cache(maxsize=64)
def _by_span(filename: str) -> dict[Span, Located]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    found: dict[Span, Located] = {}
    pending: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while pending:
        node, parents = pending.pop()
        if isinstance(node, ast.expr):
            found[node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] = Located(node, parents)
        pending += [(child, (*parents, node)) for child in ast.iter_child_nodes(node)]
    return found


def only_checks(frame: FrameType, value: bool) -> bool:
    """Whether the truth of a tensor, asked for by the frame, decides about nothing but an error.

    True for `assert ok`, `if bad: raise ...` and the like, if the check passes with this value.
    """
    located = expression_at(frame)
    if located is None:
        return False
    child = located.node
    for parent in reversed(located.parents):
        if isinstance(parent, ast.Assert):
            return value
        if isinstance(parent, ast.If):
            return child is parent.test and _fails(parent.orelse if value else parent.body)
        outcome = _outcome(parent, child, value)
        if outcome is None:
            return False
        child, value = parent, outcome
    return False


def _outcome(parent: ast.AST, child: ast.AST, value: bool) -> bool | None:
    """The truth of a `not`, `and` or `or` around an operand that has this truth, if the operand decides it."""
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return not value
    if isinstance(parent, ast.BoolOp):
        decides = value is isinstance(parent.op, ast.Or) or child is parent.values[-1]
        return value if decides else None
    return None


def _fails(body: list[ast.stmt]) -> bool:
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Raise):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
        return False
    condition = call.args[0]
    return call.func.attr == "_assert" and isinstance(condition, ast.Constant) and condition.value is False
