"""Example inputs, and the placeholders that they become."""

import inspect
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from pdp_fx.errors import TraceError
from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.shapes import Facts, check_step, length_of
from pdp_fx.tracing.steps import Expr, Recording, Scope, Step, Value
from pdp_fx.tracing.structure import (
    BASE_TYPES,
    as_base,
    children,
    fresh_copy,
    has_tensors,
    is_record,
    tensors,
)

ExampleInputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class ExampleCall:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self) -> "ExampleCall":
        """The same arguments with tensors of their own."""
        return ExampleCall(fresh_copy(self.args), {key: fresh_copy(arg) for key, arg in self.kwargs.items()})

    @property
    def batch(self) -> int:
        """How long the first axis of the first tensor is; 0 if there is none."""
        first = next(tensors((self.args, self.kwargs)), None)
        return first.shape[0] if first is not None and first.ndim else 0

    def others(self) -> "Iterator[ExampleCall]":
        """Calls with another batch size that begin with the same example, the likeliest first.

        Two examples are enough, unless that is what this call has. The last is not the same as the first:
        else a graph that mixes the two could not be told from one that does not. A model may not take one
        that is made up; then it is the same.
        """
        if not self.batch:
            return
        if self.batch > 2:
            fewer = self._changed(lambda rows: rows[:2].clone())
            if fewer.tells_apart():
                yield fewer
                return
        kept = 2 if self.batch == 2 else 1
        for another in (_another, _another_number):
            more = self._changed(lambda rows, another=another: torch.cat([rows[:kept], another(rows[:1])]))
            if more.tells_apart():
                yield more
                break
        yield self._changed(lambda rows: torch.cat([rows[:kept], rows[:1]]))

    def tells_apart(self) -> bool:
        """Whether the last example is not the same as the first."""
        batches = [leaf for leaf in tensors((self.args, self.kwargs)) if is_batch(leaf, self.batch)]
        return any(not torch.equal(rows[0], rows[-1]) for rows in batches)

    def first(self) -> "ExampleCall | None":
        """A call with the first example alone; None if this is one already."""
        return self._changed(lambda rows: rows[:1].clone()) if self.batch > 1 else None

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "ExampleCall":
        def changed(leaf: Any) -> Any:
            if not is_batch(leaf, self.batch):
                return leaf
            return change(leaf.detach()).requires_grad_(leaf.requires_grad)

        args, kwargs = tree_map(changed, (self.args, dict(self.kwargs)))
        return ExampleCall(args, kwargs)


def _another(rows: torch.Tensor) -> torch.Tensor:
    """Another example: this one read backwards, or, where that is the same, with greater numbers."""
    backwards = rows.flip(-1) if rows.ndim > 1 else rows
    return backwards + 1 if rows.is_floating_point() and torch.equal(backwards, rows) else backwards


def _another_number(rows: torch.Tensor) -> torch.Tensor:
    """Another example than one with the same whole number everywhere, which may be a place in a table."""
    if rows.is_floating_point() or rows.dtype is torch.bool:
        return rows
    return torch.where(rows > 0, rows - 1, rows + 1)


def is_batch(leaf: Any, size: int) -> bool:
    """Whether something is a tensor with a first axis of this size."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == size


def example_call(example_inputs: object) -> ExampleCall:
    """Read example inputs: a tensor is one positional argument, a tuple several, a mapping has keyword ones.

    Raises:
        TraceError: they are something else.
    """
    if isinstance(example_inputs, torch.Tensor):
        return ExampleCall((example_inputs,), {})
    if isinstance(example_inputs, tuple):
        return ExampleCall(example_inputs, {})
    if isinstance(example_inputs, Mapping):
        return ExampleCall((), {str(key): arg for key, arg in example_inputs.items()})
    raise TraceError(
        "example_inputs must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"not {type(example_inputs).__name__}"
    )


def place_arguments(gm: fx.GraphModule, inputs: Inputs) -> list[Any]:
    """Order positional and keyword arguments as the graph's placeholders want them."""
    args, kwargs = list(inputs[0]), dict(inputs[1])
    placed: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if args:
            placed.append(args.pop(0))
        elif name in kwargs:
            placed.append(kwargs.pop(name))
        elif node.args:
            placed.append(node.args[0])
    return placed


@dataclass(frozen=True)
class _Argument:
    """One argument of the model: whether and how the example gives it, its value, and its default."""

    name: str
    given: bool
    value: Any
    keyword: bool
    parameter: inspect.Parameter

    @property
    def has_default(self) -> bool:
        """Whether it can be left out, and then is something plain."""
        return self.parameter.default is not self.parameter.empty and isinstance(
            self.parameter.default, _PLAIN
        )

    @property
    def default(self) -> Any:
        """What it is when left out."""
        return self.parameter.default if self.has_default else None


def bind(recorder: Recorder, model: nn.Module, call: ExampleCall) -> ExampleCall:
    """Add the placeholders for a call; returns the call to make.

    Arguments that hold no tensors keep the value of the example, or else their default, as a default in the
    graph's signature; the graph checks that it gets nothing else.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    fixed: Facts = []
    batches: Facts = []
    optional = False
    for argument in _arguments(model, call):
        example = as_base(argument.value)
        plain = isinstance(example, _PLAIN)
        if not argument.given and not plain:
            continue
        optional = optional or plain or argument.has_default
        default = (example if plain else argument.default,) if optional else ()
        step, value = recorder.placeholder(argument.name, example, default)
        if plain:
            fixed.append((step, value))
        else:
            fixed += [] if optional and has_tensors(value) else _fixed(step, value)
            batches += _batches(step, value, recorder.findings.sizes.batch)
        if argument.given and argument.keyword:
            kwargs[argument.name] = value
        elif argument.given:
            args.append(value)
    if fixed:
        recorder.steps.append(_check(fixed, recorder.scope))
    if batches:
        message = (
            f"this graph holds for a batch of {batches[0][1]} only: another makes the model do something "
            "else; trace with example_inputs of the size you need"
        )
        recorder.steps.append(check_step(batches, message, recorder.scope, ""))
    return ExampleCall(tuple(args), kwargs)


def held_to_given(recording: Recording, model: nn.Module, call: ExampleCall) -> Recording:
    """The recording with checks that there are tensors where it uses those of the example.

    A model may ask whether something is None, and do something else then. What a mode does not use may be
    left out there, and what fails by itself without a tensor needs no check.
    """
    inputs = [step for step in recording.steps if step.op == "placeholder"]
    given = {argument.name: argument.value for argument in _arguments(model, call)}
    used = _Uses(recording)
    facts = [fact for step in inputs for fact in _tensors_given(step, given[str(step.target)], used)]
    if not facts:
        return recording
    steps = list(recording.steps)
    steps.insert(len(inputs), _check(facts, inputs[0].scope))
    return replace(recording, steps=tuple(steps))


class _Uses:
    """Which inputs, and which of their parts, a recording uses, and where None would not do."""

    def __init__(self, recording: Recording) -> None:
        self.used: set[Hashable] = set()
        self.needed: set[Hashable] = set()
        for step in recording.steps:
            if step.target is not torch._assert:
                self._note((step.args, step.kwargs))
                self.needed |= {_place(value) for value in step.args[:1] if not step.reason}
        self._note(recording.output)

    def _note(self, tree: Any) -> None:
        for value in all_values(tree):
            self.used.add(_place(value))
            if isinstance(value, Expr):
                self._note((value.args, value.kwargs))
                self.needed |= {_place(value.args[0])} if isinstance(value.call, str) else set()


def _place(value: Any) -> Hashable:
    """What a value is: an input, or how to reach a part of it."""
    if isinstance(value, Expr) and value.call in (operator.getitem, getattr):
        return _place(value.args[0]), repr(value.args[1])
    return value if isinstance(value, Step) else None


def _tensors_given(step: Step, example: Any, uses: _Uses) -> Facts:
    """What holds of an argument that is used, besides what is checked whether it is used or not."""
    if _place(step) not in uses.used or not has_tensors(example):
        return []
    optional = bool(step.args)
    return [*_present(step, example, uses, optional), *(_fixed(step, example) if optional else [])]


def _present(value: Value, example: Any, uses: _Uses, optional: bool) -> Facts:
    """Of each tensor that is used, that it is one, if it may be something else."""
    if isinstance(example, torch.Tensor):
        place = _place(value)
        may_miss = place in uses.used and (optional or place not in uses.needed)
        return [(Expr(torch.is_tensor, (value,)), True)] if may_miss else []
    return [fact for inner, part in _parts(value, example) for fact in _present(inner, part, uses, optional)]


def _check(facts: Facts, scope: Scope) -> Step:
    wanted = ", ".join(_said(value, fact) for value, fact in facts)
    message = (
        f"this graph was traced with {wanted}; for anything else, trace with example_inputs that have it"
    )
    return check_step(facts, message, scope, "")


def _fixed(value: Value, example: Any) -> Facts:
    """All of a structure that is no tensor: its plain parts, how long its containers are, their keys.

    The model may read it without anybody seeing it.
    """
    example = as_base(example)
    if isinstance(example, (*BASE_TYPES, slice)):
        return [(value, example)]
    facts = [fact for inner, part in _parts(value, example) for fact in _fixed(inner, part)]
    if isinstance(example, list | tuple | Mapping):
        facts = [length_of(value, example), *facts]
    if isinstance(example, Mapping) and all(isinstance(key, str) for key in example):
        facts = [(Expr(sorted, (value,)), sorted(example)), *facts[1:]]
    return facts


def _parts(value: Value, example: Any) -> list[tuple[Value, Any]]:
    """The parts of a container or record, and how to reach them."""
    if not isinstance(example, list | tuple | Mapping) and not is_record(example):
        return []
    reach = {"item": operator.getitem, "attribute": getattr}
    return [(Expr(reach[kind], (value, key)), part) for kind, key, part in children(example)]


def _batches(value: Value, example: Any, size: int | None) -> Facts:
    """How long the first axes are that have the size of the batch."""
    if size is None:
        return []
    if isinstance(example, list | tuple | Mapping):
        parts = [(Expr(operator.getitem, (value, key)), part) for _, key, part in children(example)]
        return [fact for inner, part in parts for fact in _batches(inner, part, size)]
    return [(Expr("size", (value, 0)), size)] if is_batch(example, size) else []


def _said(value: Value, fact: Any) -> str:
    if isinstance(value, Expr) and value.call is torch.is_tensor:
        return f"{_shown(value.args[0])}=a tensor"
    return f"{_shown(value)}={fact!r}"


def _shown(value: Value) -> str:
    if isinstance(value, Expr):
        inner = _shown(value.args[0])
        if value.call is operator.getitem:
            return f"{inner}[{value.args[1]!r}]"
        return f"{inner}.{value.args[1]}" if value.call is getattr else f"{_SHOWN[value.call]}({inner})"
    return str(value.target) if isinstance(value, Step) else "?"


_SHOWN: dict[Any, str] = {operator.length_hint: "len", sorted: "sorted"}


def _arguments(model: nn.Module, call: ExampleCall) -> list[_Argument]:
    found: list[_Argument] = []
    positional = list(call.args)
    keywords = dict(call.kwargs)
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = enumerate(positional)
            found += [_Argument(f"{name}_{i}", True, value, False, parameter) for i, value in rest]
            positional = []
        elif parameter.kind is parameter.VAR_KEYWORD:
            found += [_Argument(key, True, value, True, parameter) for key, value in keywords.items()]
        elif positional and parameter.kind is not parameter.KEYWORD_ONLY:
            found.append(_Argument(name, True, positional.pop(0), False, parameter))
        elif name in keywords:
            found.append(_Argument(name, True, keywords.pop(name), True, parameter))
        elif parameter.default is not parameter.empty:
            found.append(_Argument(name, False, parameter.default, True, parameter))
    return found
