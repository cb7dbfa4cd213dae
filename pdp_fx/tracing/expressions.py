"""Reading the source expression that a running frame is evaluating.

Python keeps for every instruction the exact span of source it came from; looked up in the file's syntax tree,
that span is an expression, and its parents say what the value is for.
"""

import ast
import inspect
import linecache
import os
import time
import warnings
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import TypeGuard

from pdp_fx.tracing.source import is_users, under_way

Span = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True)
class Located:
    """An expression in the syntax tree of its file, with the way up to the root."""

    node: ast.expr
    parents: tuple[ast.AST, ...]

    @property
    def function(self) -> ast.FunctionDef | None:
        """The innermost function that it is in, or None."""
        return next((each for each in reversed(self.parents) if isinstance(each, ast.FunctionDef)), None)


def expression_at(frame: FrameType) -> Located | None:
    """The innermost expression that the frame computes or branches on, or None if there is no source.

    Some versions of Python give a branch the span of its whole statement; the instruction before it, which
    computes the condition, has the span of the condition.
    """
    spans = _by_span(syntax_tree(frame.f_code))
    at = frame.f_lasti // 2
    for line, end_line, column, end_column in (_span(frame, at), _span(frame, at - 1)):
        located = spans.get((line, end_line, column, end_column))
        if located is not None:
            return located
    return None


def _span(frame: FrameType, at: int) -> Span:
    return next(islice(frame.f_code.co_positions(), max(at, 0), None), (None, None, None, None))


class _Text:
    """What a file said when it was read."""

    def __init__(self, filename: str, lines: list[str]) -> None:
        self.filename, self.lines = filename, lines

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree; empty if there is none."""
        try:
            return ast.parse("".join(self.lines))
        except SyntaxError:
            return ast.Module([], [])

    @cached_property
    def codes(self) -> frozenset[Hashable]:
        """What tells the code objects apart that Python makes of it (`_identity`)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pending = [compile(self.tree, self.filename, "exec", dont_inherit=True)]
        found = set[Hashable]()
        while pending:
            code = pending.pop()
            found.add(_identity(code))
            pending += [each for each in code.co_consts if isinstance(each, CodeType)]
        return frozenset(found)


@lru_cache(maxsize=1024)
def _identity(code: CodeType) -> Hashable:
    """What a code object is in its file: where its instructions come from, and their names and constants.

    The floats may be of another class, as those of a model are while it is recorded (`yielding`).
    """
    constants = tuple(
        repr(float(each)) if isinstance(each, float) else (type(each), each)
        for each in code.co_consts
        if not isinstance(each, CodeType)
    )
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_name, code.co_firstlineno, code.co_code, code.co_linetable, names, constants


_TEXTS: dict[str, list[_Text]] = {}
"""What the files read so far say, and have said before."""

_STARTED = time.time()
_NO_TREE = ast.Module([], [])


def syntax_tree(code: CodeType) -> ast.Module:
    """The syntax tree of the file that a code object was made from; empty if there is none.

    The file may have changed since Python read it; then it is what it said then, if that is known.
    """
    filename = code.co_filename
    texts = _TEXTS.get(filename)
    if texts is None:
        texts = _TEXTS[filename] = [_Text(filename, linecache.getlines(filename))]
    if len(texts) == 1 and not _is_new(filename):
        return texts[0].tree
    return next((text.tree for text in reversed(texts) if _identity(code) in text.codes), _NO_TREE)


def reread() -> None:
    """Read the files again that have changed since they were read."""
    for filename, texts in _TEXTS.items():
        linecache.checkcache(filename)
        lines = linecache.getlines(filename)
        if lines != texts[-1].lines:
            texts.append(_Text(filename, lines))
            _is_new.cache_clear()


@cache
def _is_new(filename: str) -> bool:
    """Whether a file has been written since this process began, maybe after Python has read it."""
    try:
        return os.path.getmtime(filename) > _STARTED
    except OSError:
        return False


@lru_cache(maxsize=256)
def definition(code: CodeType) -> ast.FunctionDef | None:
    """The definition of the function that a code object belongs to, or None if there is no source."""
    for node in ast.walk(syntax_tree(code)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            lines = (each.lineno for each in (node, *node.decorator_list))
            if code.co_firstlineno in lines:
                return node
    return None


@lru_cache(maxsize=256)
def names_in(function: ast.FunctionDef) -> dict[str, list[Located]]:
    """Where a function reads each of its variables."""
    found: dict[str, list[Located]] = {}
    for located in _expressions(function):
        if isinstance(located.node, ast.Name) and isinstance(located.node.ctx, ast.Load):
            found.setdefault(located.node.id, []).append(located)
    return found


@lru_cache(maxsize=64)
def attributes_in(tree: ast.Module) -> dict[str, list[Located]]:
    """Where the code of a file reads attributes, by their names."""
    found: dict[str, list[Located]] = {}
    for located in _expressions(tree):
        if isinstance(located.node, ast.Attribute) and isinstance(located.node.ctx, ast.Load):
            found.setdefault(located.node.attr, []).append(located)
    return found


@lru_cache(maxsize=64)
def _by_span(tree: ast.Module) -> dict[Span, Located]:
    found: dict[Span, Located] = {}
    for located in _expressions(tree):
        found[span_of(located.node)] = located
    return found


def span_of(node: ast.expr) -> Span:
    """Where an expression stands in its file."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _expressions(tree: ast.AST) -> Iterator[Located]:
    """The expressions in a syntax tree, outer ones first."""
    pending: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while pending:
        node, parents = pending.pop()
        if isinstance(node, ast.expr):
            yield Located(node, parents)
        pending += [(child, (*parents, node)) for child in ast.iter_child_nodes(node)]


def arguments_of(located: Located | None) -> list[ast.expr]:
    """The arguments of a call, without their names; none if there is no call."""
    if located is None or not isinstance(located.node, ast.Call):
        return []
    return [*located.node.args, *(keyword.value for keyword in located.node.keywords)]


def parameters_of(code: CodeType) -> tuple[str, ...]:
    """The variables in which a function has what it was given, also by ``*args`` and ``**kwargs``."""
    several = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + several]


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with the value; none if a node is something else."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        return [(node.target, node.value)]
    return []


def attribute_read(expression: ast.AST | None) -> tuple[ast.expr, str] | None:
    """Whose attribute an expression reads, and which one: of `x.dtype`, `getattr(x, "dtype")` and `x.type()`.

    None if it does something else.
    """
    match expression:
        case ast.Attribute(value=owner, attr=name):
            return owner, name
        case ast.Call(func=ast.Attribute(value=owner, attr="type" as name), args=[], keywords=[]):
            return owner, name
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            return owner, name
        case _:
            return None


def only_unpacks(frame: FrameType) -> bool:
    """Whether the frame assigns the parts of a value to as many names, or takes one from the front."""
    located = expression_at(frame)
    return located is not None and _unpacks(located)


def _unpacks(located: Located) -> bool:
    parent = located.parents[-1]
    if isinstance(parent, ast.Assign):
        return all(_is_tuple(target) for target in parent.targets)
    return isinstance(parent, ast.Subscript) and located.node is parent.value and _is_whole(parent.slice)


def goes_by_rank(frame: FrameType) -> bool:
    """Whether what the frame does with the shape that it reads depends on how many axes there are.

    It does not where it takes sizes counted from the first, gives each a name, which fails for any other
    number of them, or writes a message.
    """
    located = expression_at(frame)
    if located is None or any(isinstance(parent, ast.Try) for parent in located.parents):
        return True
    return not (_unpacks(located) or _takes_the_first(located) or says(located))


def _takes_the_first(located: Located) -> bool:
    """Whether a part of a value is taken that begins and ends at places counted from the first."""
    parent = located.parents[-1]
    if not (isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Slice)):
        return False
    start, stop = parent.slice.lower, parent.slice.upper
    return located.node is parent.value and (start is None or _is_whole(start)) and _is_whole(stop)


def _is_whole(place: ast.expr | None) -> bool:
    """Whether a place is written as a number that is not negative."""
    return isinstance(place, ast.Constant) and isinstance(place.value, int)


def _is_tuple(target: ast.expr) -> bool:
    return isinstance(target, ast.Tuple | ast.List) and not any(
        isinstance(t, ast.Starred) for t in target.elts
    )


def multiplies_sizes(frame: FrameType) -> bool:
    """Whether the product of the shape that the frame reads is taken, as in `x.shape[1:].numel()`.

    It may be taken there, or of the name that the function gives to the shape.
    """
    located = expression_at(frame) if "numel" in frame.f_code.co_names else None
    if located is None:
        return False
    child, parents = located.node, [*located.parents]
    while isinstance(parents[-1], ast.Subscript) and parents[-1].value is child:
        child = parents.pop()
    parent = parents[-1]
    if isinstance(parent, ast.Attribute):
        return parent.attr == "numel"
    targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    scope = located.function or parents[0]
    return bool(names) and any(
        isinstance(each, ast.Attribute) and each.attr == "numel" and root_name(each.value) in names
        for each in ast.walk(scope)
    )


def root_name(value: ast.expr) -> str:
    """The variable that an expression is or is a part of, as in `shape[1:][0]`; empty if it is neither."""
    while isinstance(value, ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def uses_beyond(frame: FrameType, method: str, attributes: Container[str]) -> bool:
    """Whether the frame calls this method and uses the result otherwise than by one of these attributes."""
    located = expression_at(frame)
    if located is None or not isinstance(located.node, ast.Call) or _name(located.node) != method:
        return False
    user = located.parents[-1] if located.parents else None
    return not (isinstance(user, ast.Attribute) and user.attr in attributes)


def only_says(frame: FrameType) -> bool:
    """Whether what the frame computes ends in a message, as in `print(...)` or `raise ...`.

    An f-string that is given to a check, as in `torch._assert(ok, f"...")`, is a message, too, and so is a
    variable that is used in messages only.
    """
    located = expression_at(frame)
    return located is not None and says(located)


def says(located: Located, variables: frozenset[str] = frozenset()) -> bool:
    """Whether an expression ends in a message; these variables are known to, if it does."""
    statement = next((parent for parent in reversed(located.parents) if isinstance(parent, ast.stmt)), None)
    match statement:
        case ast.Raise():
            return True
        case ast.Expr(value=ast.Call() as call):
            if any(keyword.arg == "file" for keyword in call.keywords) or not _is_shown(call):
                return False
            written = any(isinstance(parent, ast.JoinedStr) for parent in located.parents)
            return _name(call) in _SAYING or (written and any(word in _name(call) for word in _CHECKING))
        case ast.Assign(targets=[ast.Name(id=name)]) if located.function is not None:
            if name in variables:
                return True
            uses = () if _is_lent(name, located.function) else names_in(located.function).get(name, ())
            return bool(uses) and all(says(use, variables | {name}) for use in uses)
        case _:
            return False


def _is_lent(name: str, function: ast.FunctionDef) -> bool:
    """Whether a variable of a function is that of another one, or a global."""
    lent = (part.names for part in ast.walk(function) if isinstance(part, ast.Global | ast.Nonlocal))
    return any(name in names for names in lent)


def _is_shown(call: ast.Call) -> bool:
    """Whether what a call of `write` is given goes to the terminal."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return _name(call) != "write" or getattr(owner, "attr", "") in ("stdout", "stderr")


_CHECKING = ("check", "assert")
_SAYING = frozenset("print critical debug error exception info log warn warning write".split())


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def only_checks(frame: FrameType, value: bool) -> bool:
    """Whether the truth of a tensor, asked for by the frame, decides about nothing but an error.

    True for `assert ok`, `if bad: raise ...` and the like, if the check passes with this value.
    """
    located = expression_at(frame)
    if located is None:
        return False
    child, truth = located.node, value
    for parent in reversed(located.parents):
        if isinstance(parent, ast.If | ast.Assert):
            return child is parent.test and _passes(parent, truth)
        outcome = _truth(parent, child, truth)
        if outcome is None:
            return False
        child, truth = parent, outcome
    return False


def only_judged(frame: FrameType) -> bool:
    """Whether the number that the frame takes from a tensor decides and is nothing else.

    True for `assert x.item() <= n`, `if x.item(): ...` and the like: there the tensor does in its place.
    """
    located = expression_at(frame)
    if located is None:
        return False
    child: ast.AST = located.node
    for parent in reversed(located.parents):
        if isinstance(parent, ast.If | ast.Assert):
            return child is parent.test
        compares = isinstance(parent, ast.Compare) and all(isinstance(op, _ORDERS) for op in parent.ops)
        negates = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
        if not (compares or negates or isinstance(parent, ast.BoolOp)):
            return False
        child = parent
    return False


_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


def only_assigns(frame: FrameType) -> bool:
    """Whether the truth of a tensor, asked for by the frame, decides about nothing but what names stand for.

    True for `if bad: x = ...`, also where `not` or `and` lie between.
    """
    located = expression_at(frame)
    if located is None:
        return False
    child: ast.AST = located.node
    for parent in reversed(located.parents):
        if isinstance(parent, ast.If):
            return child is parent.test and not parent.orelse and all(map(_names_something, parent.body))
        if not isinstance(parent, ast.UnaryOp) and not (
            isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And)
        ):
            return False
        child = parent
    return False


def is_tried() -> bool:
    """Whether errors of what runs now are caught by the model's code, be it in a call further out."""
    frames = (frame for frame in under_way() if is_users(frame.f_code.co_filename))
    return any(frame.f_lineno in lines for frame in frames for lines in _tried(frame.f_code))


@lru_cache(maxsize=4096)
def _tried(code: CodeType) -> tuple[range, ...]:
    """The lines behind each `try` that has an `except`, and of blocks that suppress errors."""
    function = definition(code)
    bodies = [node.body for node in ast.walk(function) if _catches(node)] if function else []
    return tuple(range(body[0].lineno, (body[-1].end_lineno or 0) + 1) for body in bodies)


def _catches(node: ast.AST) -> TypeGuard[ast.Try | ast.With]:
    if isinstance(node, ast.Try):
        return bool(node.handlers)
    if not isinstance(node, ast.With):
        return False
    managers = [item.context_expr for item in node.items]
    return any("suppress" in ast.unparse(each.func) for each in managers if isinstance(each, ast.Call))


def _names_something(statement: ast.stmt) -> bool:
    """Whether a statement gives values to names, and not to attributes or parts, which others see, too."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) for target in statement.targets)
    return isinstance(statement, ast.AnnAssign | ast.AugAssign) and isinstance(statement.target, ast.Name)


def _truth(parent: ast.AST, child: ast.AST, value: bool) -> bool | None:
    """The truth of a `not`, `and` or `or` around an operand with this truth, given that nothing failed.

    None if the other truth of the operand need not have led to an error.
    """
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return not value
    if isinstance(parent, ast.BoolOp):
        return value if value is isinstance(parent.op, ast.And) or child is parent.values[-1] else None
    return None


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
