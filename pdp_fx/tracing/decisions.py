"""What a model decides by the dtypes and devices of tensors, as in ``if x.dtype == torch.float16:``.

The graph goes the way of the example. A model that was cast or moved, or is given other inputs, may go
another, so the graph insists on what such a line has found. Under autocast results have other dtypes than
elsewhere; there the graph is compared with the model first, and does not insist if they agree.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from pdp_fx.tracing.dtypes import is_read, names_given, reading_frame
from pdp_fx.tracing.expressions import (
    Located,
    attribute_read,
    attributes_in,
    definition,
    expression_at,
    names_in,
    only_says,
    root_name,
    says,
    syntax_tree,
)
from pdp_fx.tracing.settings import CASTING, HELD, Question
from pdp_fx.tracing.source import is_users, source_line, user_frame
from pdp_fx.tracing.steps import Attribute, Constant, Expr, Value, is_input

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

_autocasts = torch.is_autocast_enabled
"""Kept here because torch's name stands for another function while a model is recorded."""

_ANSWERS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: operator.contains,
    ast.NotIn: operator.contains,
    ast.Call: torch.promote_types,
}
"""What the graph asks for each comparison; of a container, and then of what may be in it."""

_DEEPEST = 4
"""Through so many variables a dtype or device is followed, those of functions that it is passed to too."""


@dataclass(frozen=True)
class _Operand:
    """A side of a comparison: in the graph, now, and whether autocast may change it."""

    value: Any
    found: Any
    is_cast: bool = False

    def property(self, name: str) -> _Operand:
        """A property of it, such as the type of a device."""
        return replace(self, value=Expr(getattr, (self.value, name)), found=getattr(self.found, name))


@dataclass(frozen=True)
class _Use:
    """An expression that gives what the model has read, or a property of it.

    Attributes:
        name: the attribute of a tensor that was read, or ``type`` of `x.type()`.
        located: the expression.
        names: what names stand for where it is computed.
        frame: the frame that computes it; None if none does yet.
        mine: what it gives.
        depth: through how many variables it got there.
        held: whether the expression is something that holds it, such as a list.
    """

    name: str
    located: Located
    names: Mapping[str, Any]
    frame: FrameType | None
    mine: _Operand
    depth: int = 0
    held: bool = False

    @property
    def node(self) -> ast.AST:
        """The expression without what is around it."""
        return self.located.node

    @property
    def parent(self) -> ast.AST:
        """What the expression is a part of."""
        return next(each for each in reversed(self.located.parents) if not isinstance(each, _AROUND))


_AROUND = ast.Tuple | ast.List | ast.Set | ast.Dict | ast.ListComp | ast.SetComp | ast.DictComp | ast.keyword
"""What may lie between an expression and what uses it."""


class Decisions:
    """What is read of dtypes and devices in a recording, and checks of what is decided by them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._number = recorder.frames.number
        self._last: dict[int, _Operand] = {}
        self._assigned: dict[tuple[int, str], _Operand] = {}

    def note(self, name: str, found: Any, value: Value) -> bool:
        """Note what the model decides by what it reads now.

        Args:
            name: the attribute of a tensor that it reads: ``dtype``, ``device`` or ``type``.
            found: what it finds there.
            value: the tensor in the graph.

        Returns:
            Whether that is all that becomes of it.
        """
        frame = reading_frame()
        if frame is not None and not syntax_tree(frame.f_code).body and _may_change(found, value):
            self._insist(f"a {name} in code whose source is not known", value, _read(name, found, value))
            return True
        located = None if frame is None else expression_at(frame)
        if frame is None or located is None or not _reads(user_frame(), name):
            return False
        settled = only_says(frame)
        use = _Use(name, located, _names_in(frame), frame, _read(name, found, value))
        if _may_change(found, value) and not only_says(frame):
            for one in _decisions(_inside(use)):
                settled = True
                if not _waits(one):
                    self._insist(_shown(one.parent), value, self._decision(one))
        self._last[self._number(frame)] = use.mine
        while (outer := _of_property(use)) is not None:
            use = outer
        call = self._number(frame)
        self._assigned |= {(call, variable): use.mine for variable in names_given(use.located)}
        return settled

    def note_result(self, dtype: torch.dtype, tensor: Value, other: Any) -> None:
        """Note that the model asks which dtype the result of a tensor and another, or a number, has."""
        answer = _Operand(Expr(torch.result_type, (tensor, other)), dtype, is_cast=True)
        self._insist("torch.result_type", tensor, answer)

    def note_kept(self, reads: Iterable[tuple[torch.dtype, Value]]) -> None:
        """Note that a call is given a dtype that may be that of one of these tensors, and has been kept."""
        for dtype, value in reads:
            self._insist(f"a dtype that was kept, {dtype}", value, _read("dtype", dtype, value))

    def hold_unfollowed(self, reads: Iterable[tuple[str, torch.dtype, Value]]) -> None:
        """Insist on dtypes of which it is not known what became."""
        for line, dtype, value in reads:
            self._insist("a dtype that it reads", value, _read("dtype", dtype, value), line)

    def _insist(self, said: str, tensor: Value, decision: _Operand, line: str = "") -> None:
        """Add a check that a decision is what it is now, or else that autocast is on, if that is the same."""
        findings, value, found = self._recorder.findings, decision.value, decision.found
        line = line or source_line()
        if decision.is_cast:
            findings.asks |= {Question(setting): line for setting in CASTING}
        if decision.is_cast and findings.holds.isdisjoint(CASTING):
            device = Expr(getattr, (Expr(getattr, (tensor, "device")), "type"))
            value = Expr(operator.or_, (Expr(_autocasts, (device,)), Expr(operator.eq, (value, found))))
            found = True
        message = f"{line} decides by {said}, {HELD}; cast and move the model before"
        self._recorder.checks.hold(value, found, message)

    def _decision(self, use: _Use) -> _Operand:
        """The answer of a comparison, or what is read itself if it is used in another way."""
        sides, kind = _sides(use), _kind(use.parent)
        if use.held or sides is None or kind not in _ANSWERS:
            return use.mine
        is_left = sides[0] is use.node
        other = self._other(sides[is_left], use)
        if other is None:
            return use.mine
        operands = [use.mine, other] if is_left is (kind not in (ast.In, ast.NotIn)) else [other, use.mine]
        ask = _ANSWERS[kind]
        value = Expr(ask, tuple(operand.value for operand in operands))
        found = ask(*(operand.found for operand in operands))
        return _Operand(value, found, any(operand.is_cast for operand in operands))

    def _other(self, expression: ast.expr, use: _Use) -> _Operand | None:
        """Another side of a comparison; None if it cannot be told."""
        if isinstance(expression, ast.Attribute) and expression.attr in _PROPERTIES:
            whole = self._other(expression.value, use)
            return None if whole is None else whole.property(expression.attr)
        found = _looked_up(expression, use.names)
        if isinstance(expression, ast.Name):
            assigned = self._assigned.get((self._number(use.frame), expression.id))
            if assigned is not None:
                return assigned
        elif _is_read(expression, use.names):
            read = attribute_read(expression)
            owner = None if read is None else _looked_up(read[0], use.names)
            if isinstance(owner, torch.Tensor):
                return _read(use.name, _now(owner, use.name), self._recorder.origins.value(owner))
            return self._last.get(self._number(use.frame))
        several = tuple(found) if isinstance(found, tuple | list | set | frozenset) else (found,)
        if not all(isinstance(each, torch.dtype | torch.device | str | int) for each in several):
            return None
        value = found if several == (found,) else several
        return _Operand(value, value)


def _reads(frame: FrameType | None, name: str) -> bool:
    """Whether the model's code reads an attribute in a frame of its own, and not torch in what that calls."""
    located = None if frame is None else expression_at(frame)
    read = None if located is None else attribute_read(located.node)
    return read is not None and read[1] == name


def _shown(parent: ast.AST) -> str:
    """The code of what decides, on one line."""
    return ast.unparse(parent.subject if isinstance(parent, ast.Match) else parent)


def _inside(use: _Use) -> _Use:
    """The use in the innermost frame of the model's code, which may be that of a property or a generator."""
    frame = user_frame()
    located = None if frame is None else expression_at(frame)
    if frame is None or located is None:
        return use
    return replace(use, located=located, names=_names_in(frame), frame=frame)


def _names_in(frame: FrameType) -> Mapping[str, Any]:
    return ChainMap(frame.f_locals, frame.f_globals)


def _decisions(use: _Use) -> Iterator[_Use]:
    """Where something is decided by what an expression gives: there, by the caller, or by a variable."""
    parent, names, frame = use.parent, names_given(use.located), use.frame
    gives = isinstance(parent, ast.Return | ast.GeneratorExp)
    caller = user_frame(frame.f_back) if frame is not None and gives else None
    if caller is not None:
        located = expression_at(caller)
        if located is not None:
            yield from _decisions(replace(use, located=located, names=_names_in(caller), frame=caller))
    elif names:
        yield from _named(use, names, use.located.function)
    else:
        yield from _deciding(use, parent)
        yield from _held(use)


def _held(use: _Use) -> Iterator[_Use]:
    """Where something is decided by what an expression is put into, or by the attribute that has it."""
    statement = next((each for each in reversed(use.located.parents) if isinstance(each, ast.stmt)), None)
    if not isinstance(statement, ast.Assign) or not _only_holds(use.node, statement.value):
        return
    if use.depth >= _DEEPEST:
        return
    for target in statement.targets:
        kept = replace(use, held=use.held or not isinstance(target, ast.Attribute))
        if root_name(target):
            yield from _named(kept, frozenset([root_name(target)]), use.located.function)
        elif isinstance(target, ast.Attribute) and target.attr != "dtype" and use.frame is not None:
            for located in attributes_in(syntax_tree(use.frame.f_code)).get(target.attr, ()):
                yield from _decisions(replace(kept, located=located, depth=use.depth + 1))


def _taken(located: Located) -> Located:
    """The expression that takes something out of a container, as `kept[0]` or `kept.get("a")`."""
    taken = next(each for each in reversed(located.parents) if isinstance(each, ast.Subscript | ast.Call))
    return Located(taken, located.parents[: located.parents.index(taken)])


def _only_holds(node: ast.AST, value: ast.expr) -> bool:
    """Whether a value is an expression, or a list, a dict or the like with it."""
    if node is value:
        return True
    match value:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
            pass
        case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.DictComp(value=part):
            parts = [part]
        case ast.Call(func=ast.Name(id="dict" | "list" | "set" | "tuple")):
            parts = [*value.args, *(keyword.value for keyword in value.keywords)]
        case _:
            parts = []
    return any(_only_holds(node, part) for part in parts)


def _deciding(use: _Use, parent: ast.AST) -> Iterator[_Use]:
    """Where something is decided by an expression as a part of another; None is no dtype and no device."""
    match parent:
        case ast.Subscript(value=whole) | ast.Attribute(value=whole, attr="get") if (
            use.held and whole is use.node
        ):
            yield from _decisions(replace(use, located=_taken(use.located)))
        case ast.Attribute() if use.name == "type":
            yield use
        case ast.Attribute():
            outer = _of_property(use)
            if outer is not None:
                yield from [outer] if parent.attr == "itemsize" else _decisions(outer)
        case ast.Call() if use.node is not parent.func:
            yield from _in_call(use, parent)
        case ast.Subscript() if use.node is not parent.value:
            yield use
        case ast.FormattedValue() | ast.BinOp(op=ast.Mod()) if not says(use.located):
            yield use
        case ast.Match():
            yield use
        case ast.Compare() if not any(map(_is_none, parent.comparators)):
            yield use
        case _:
            pass


def _of_property(use: _Use) -> _Use | None:
    """The use of a property, such as the type of a device, if an expression is used for that."""
    parent = use.parent
    if not isinstance(parent, ast.Attribute) or parent.attr not in _PROPERTIES:
        return None
    parents = use.located.parents[: use.located.parents.index(parent)]
    return replace(use, located=Located(parent, parents), mine=use.mine.property(parent.attr))


_PROPERTIES = ("itemsize", "type", "index")
"""Whether a dtype is one of floating-point numbers does not change."""


def _named(use: _Use, names: frozenset[str], function: ast.FunctionDef | None) -> Iterator[_Use]:
    """Where something is decided by variables of a function."""
    places = names_in(function) if function is not None else {}
    for located in (each for name in names for each in places.get(name, ())):
        if use.depth < _DEEPEST:
            yield from _decisions(replace(use, located=located, depth=use.depth + 1))


def _in_call(use: _Use, call: ast.Call) -> Iterator[_Use]:
    """Where a function of the model's code decides by an argument, or a method looks it up."""
    found = _looked_up(call.func, use.names)
    function = found.forward if isinstance(found, nn.Module) else found
    plain = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    named = getattr(call.func, "attr", "")
    if named in _LOOKS_UP or found is getattr or _promotes(call):
        yield use
    elif named == "format" or any(found is each for each in _SPELT):
        if not says(use.located):
            yield use
    elif isinstance(plain, FunctionType) and callable(function) and is_users(plain.__code__.co_filename):
        names = ChainMap(dict(inspect.getclosurevars(plain).nonlocals), plain.__globals__)
        inside = replace(use, names=names, frame=None)
        yield from _named(inside, _parameters(function, call, use.node), definition(plain.__code__))


_LOOKS_UP = ("get", "setdefault", "pop", "index", "count")
"""Methods of dicts and lists that go by what they are given."""

_SPELT = str, repr, hash, id, format
"""What is made of a dtype or device to go by; what only ends in a message is no decision."""


def _parameters(function: Callable[..., Any], call: ast.Call, argument: ast.AST) -> frozenset[str]:
    """The parameter of a function that an argument of a call is for; empty if it cannot be told."""
    try:
        bound = inspect.signature(function).bind(
            *call.args, **{keyword.arg or "": keyword.value for keyword in call.keywords}
        )
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(name for name, given in bound.arguments.items() if given is argument)


def _sides(use: _Use) -> tuple[ast.expr, ast.expr] | None:
    """The two sides of a comparison, or of a promotion, if an expression is one of them."""
    parent = use.parent
    sides: list[ast.expr] = []
    if isinstance(parent, ast.Compare):
        sides = [parent.left, *parent.comparators]
    elif _promotes(parent):
        sides = parent.args
    return (sides[0], sides[1]) if len(sides) == 2 and use.node in sides else None


def _kind(parent: ast.AST) -> type[ast.AST]:
    """What is asked of two sides, as a type of the syntax tree."""
    return type(parent.ops[0]) if isinstance(parent, ast.Compare) else type(parent)


def _promotes(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether an expression asks for the dtype that two promote to."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "promote_types"


def _waits(use: _Use) -> bool:
    """Whether a dtype is compared with one that is read later, when both are known."""
    sides, frame = _sides(use), use.frame
    if sides is None or frame is None:
        return False
    left, right = sides
    other = right if use.node is left else left
    if isinstance(other, ast.Name):
        return is_read(other, use.located, use.name) and other.id not in frame.f_locals
    while isinstance(other, ast.Attribute) and other.attr in _PROPERTIES:
        other = other.value
    return _is_read(other, use.names) and (isinstance(use.node, ast.Name) or sides[1] is not use.node)


def _is_read(expression: ast.AST, names: Mapping[str, Any]) -> bool:
    """Whether an expression reads the dtype or the device of a tensor, if by a property of something else."""
    read = attribute_read(expression)
    if read is None or read[1] not in ("dtype", "device", "type"):
        return False
    owner = _looked_up(read[0], names)
    if isinstance(owner, torch.Tensor):
        return True
    kept = inspect.getattr_static(owner, read[1], None)
    return read[1] != "type" and not isinstance(kept, torch.dtype | torch.device | type)


def _looked_up(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression stands for; None if it cannot be told, or is more than names and constants."""
    for node in ast.walk(expression):
        if _is_read(node, names) or not (isinstance(node, _LOOKS) or _makes_device(node)):
            return None
    code = compile(ast.Expression(expression), "<names>", "eval")
    try:
        return eval(code, {}, names)
    except Exception:  # noqa: BLE001 it need not be there yet
        return None


_LOOKS = ast.Name | ast.Attribute | ast.Constant | ast.Tuple | ast.List | ast.Set | ast.expr_context
"""What looks something up and does nothing else."""


def _is_none(expression: ast.expr) -> bool:
    """Whether an expression is None."""
    return isinstance(expression, ast.Constant) and expression.value is None


def _makes_device(node: ast.AST) -> bool:
    """Whether an expression is like `torch.device("cpu")`."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "device"


def _read(name: str, found: Any, tensor: Value) -> _Operand:
    is_result = not isinstance(tensor, Attribute) and not is_input(tensor)
    is_cast = is_result and (_is_of_floats(found) if isinstance(found, torch.dtype) else name == "type")
    return _Operand(
        Expr(name, (tensor,)) if name == "type" else Expr(getattr, (tensor, name)), found, is_cast
    )


def _now(tensor: torch.Tensor, name: str) -> Any:
    """What a tensor has as its dtype, its device or the name of its type."""
    found = getattr(tensor, name)
    return found() if name == "type" else found


def _is_of_floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _may_change(found: Any, tensor: Value) -> bool:
    """Whether another call may read something else; results of whole numbers always have one dtype."""
    if isinstance(tensor, Constant):
        return False
    return not isinstance(found, torch.dtype) or _is_of_floats(found) or is_input(tensor)
