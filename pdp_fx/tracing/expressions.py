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
    located = _by_span(frame.f_code.co_filename).get(_span(frame))
    return located if located is not None and isinstance(located.node, ast.expr) else None


def _span(frame: FrameType) -> Span:
    spans = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(spans, (None, None, None, None))
    return line, end_line, column, end_column


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
        if isinstance(node, ast.expr | ast.If | ast.Assert):
            found[node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] = Located(node, parents)
        pending += [(child, (*parents, node)) for child in ast.iter_child_nodes(node)]
    return found


def only_checks(frame: FrameType, value: bool) -> bool:
    """Whether the truth of a tensor, asked for by the frame, decides about nothing but an error.

    True for `assert ok`, `if bad: raise ...` and the like, if the check passes with this value.
    """
    located = _by_span(frame.f_code.co_filename).get(_span(frame))
    if located is None:
        return False
    # Which of the two Python names as the place of a branch, the statement or its test, depends on its version.
    child, above = located.node, located.parents
    if isinstance(child, ast.If | ast.Assert):
        outcome = _truth(child.test, value)
        return outcome is not None and _passes(child, outcome)
    truth: bool | None = value
    for parent in reversed(above):
        if truth is None:
            return False
        if isinstance(parent, ast.If | ast.Assert):
            return child is parent.test and _passes(parent, truth)
        truth = _truth(parent, truth) if isinstance(parent, ast.UnaryOp | ast.BoolOp) else None
        child = parent
    return False


def _truth(test: ast.expr, value: bool) -> bool | None:
    """The truth of a condition, one operand of which has this value; None if the others matter."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, value) if isinstance(test.operand, ast.BoolOp | ast.UnaryOp) else value
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        return value if value is isinstance(test.op, ast.Or) else None
    return value


def _passes(statement: ast.If | ast.Assert, outcome: bool) -> bool:
    if isinstance(statement, ast.Assert):
        return outcome
    return _fails(statement.orelse if outcome else statement.body)


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
