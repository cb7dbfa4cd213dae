"""Example inputs, and the placeholders that they become."""

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdp_fx.errors import TraceError
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.steps import Expr, Step
from pdp_fx.tracing.structure import fresh_copy, has_tensors

ExampleInputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class ExampleCall:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self) -> "ExampleCall":
        """The same arguments with tensors of their own."""
        return ExampleCall(fresh_copy(self.args), {key: fresh_copy(arg) for key, arg in self.kwargs.items()})


def example_call(example_inputs: object) -> ExampleCall:
    """Read example inputs: a tensor is one positional argument, a tuple several, a mapping holds keyword arguments.

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


@dataclass(frozen=True)
class _Argument:
    """One argument of the model: whether the example gives it, and its value or default."""

    name: str
    given: bool
    value: Any
    keyword: bool


def bind(recorder: Recorder, model: nn.Module, call: ExampleCall) -> ExampleCall:
    """Add the placeholders for a call; returns the call to make.

    Arguments that hold no tensors keep the value of the example, or else their default, as a default in the graph's
    signature; the graph checks that it gets nothing else.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    fixed: list[tuple[Step, Any]] = []
    optional = False
    for argument in _arguments(model, call):
        is_fixed = not has_tensors(argument.value)
        plain = is_fixed and isinstance(argument.value, _PLAIN)
        if not argument.given and not plain:
            continue
        optional = optional or plain
        default = (argument.value if plain else None,) if optional else ()
        step, value = recorder.placeholder(argument.name, argument.value, default)
        if plain:
            fixed.append((step, value))
        if argument.given and argument.keyword:
            kwargs[argument.name] = value
        elif argument.given:
            args.append(value)
    if fixed:
        _check(recorder, fixed)
    return ExampleCall(tuple(args), kwargs)


def _check(recorder: Recorder, fixed: list[tuple[Step, Any]]) -> None:
    equal = Expr(operator.eq, (tuple(step for step, _ in fixed), tuple(value for _, value in fixed)))
    wanted = ", ".join(f"{step.target}={value!r}" for step, value in fixed)
    message = f"this graph was traced with {wanted}; to use other values, trace with example_inputs that have them"
    recorder.steps.append(Step("call_function", torch._assert, (equal, message), {}, recorder.scope, ""))


def _arguments(model: nn.Module, call: ExampleCall) -> list[_Argument]:
    found: list[_Argument] = []
    positional = list(call.args)
    keywords = dict(call.kwargs)
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found += [_Argument(f"{name}_{i}", True, value, False) for i, value in enumerate(positional)]
            positional = []
        elif parameter.kind is parameter.VAR_KEYWORD:
            found += [_Argument(key, True, value, True) for key, value in keywords.items()]
        elif positional and parameter.kind is not parameter.KEYWORD_ONLY:
            found.append(_Argument(name, True, positional.pop(0), False))
        elif name in keywords:
            found.append(_Argument(name, True, keywords.pop(name), True))
        elif parameter.default is not parameter.empty:
            found.append(_Argument(name, False, parameter.default, True))
    return found
