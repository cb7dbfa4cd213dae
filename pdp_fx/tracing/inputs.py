"""The placeholders of a traced graph: how the arguments of a call become inputs, defaults and checks."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from pdp_fx.tracing.attribute_reads import AttributeReads, is_attribute, path_of
from pdp_fx.tracing.examples import ExampleCall, Inputs, is_followed
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.given import (
    NUMBERS_HAVE,
    TAKE_ONCE,
    Tensors,
    Uses,
    all_apart,
    batch_sizes,
    check_inputs,
    plain_parts,
    said,
    sizes_held,
    tensors_given,
    tensors_in,
)
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.shapes import Facts, by_depth, check_step
from pdp_fx.tracing.steps import Expr, Recording, Scope, Step, Value
from pdp_fx.tracing.structure import as_base, has_tensors

_PLAIN = (str, int, float, bool, type(None))


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
        """Whether it can be left out, and has a plain value then."""
        return self.parameter.default is not self.parameter.empty and isinstance(
            self.parameter.default, _PLAIN
        )

    @property
    def default(self) -> Any:
        """Its value when it is left out."""
        return self.parameter.default if self.has_default else None


def bind(recorder: Recorder, model: nn.Module, call: ExampleCall) -> ExampleCall:
    """Add the placeholders for a call, and return the call to make.

    The value of an argument without tensors, from the example or its default, becomes a default in the
    graph's signature. Floats are followed where the code of the model shows what it computes with them; of
    all else the graph checks that it gets no other value.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    fixed: Facts = []
    optional = False
    for argument in _arguments(model, call):
        example = as_base(argument.value)
        plain = isinstance(example, _PLAIN)
        if not argument.given and not plain:
            continue
        left_out = not model.training and argument.name in recorder.findings.left_out
        optional = optional or plain or argument.has_default
        default = (example if plain else argument.default,) if optional else ()
        step, value = recorder.placeholder(argument.name, None if left_out else example, default)
        recorder.reads.watch(step, value)
        recorder.leavings.watch(step, value)
        if is_followed(example) and recorder.follows_given(argument.name):
            value = recorder.given_number(step, example)
            fixed.append((Expr(hasattr, (step, NUMBERS_HAVE)), True))
        elif plain:
            fixed.append((step, value))
        elif not left_out:
            fixed += (
                [] if optional and has_tensors(value) else plain_parts(step, value, recorder.findings.ordered)
            )
        if argument.given and argument.keyword:
            kwargs[argument.name] = value
        elif argument.given:
            args.append(value)
    for facts in by_depth(fixed):
        recorder.steps.append(check_inputs(facts, recorder.scope))
    return ExampleCall(tuple(args), kwargs)


def with_default_numbers(model: nn.Module, call: ExampleCall) -> ExampleCall:
    """The call with the floats given that are the defaults of arguments, so that they are followed, too."""
    left_out = {
        argument.name: argument.value
        for argument in _arguments(model, call)
        if not argument.given
        and is_followed(argument.value)
        and argument.parameter.kind is not argument.parameter.POSITIONAL_ONLY
    }
    return replace(call, kwargs={**call.kwargs, **left_out}) if left_out else call


def _checks_of_tensors(given: Tensors, call: ExampleCall, findings: Findings, scope: Scope) -> list[Step]:
    """The checks of the batch size, of other sizes, and of different tensors that the graph insists on."""
    checks: list[Step] = []
    batches = batch_sizes(given, findings.sizes.batch)
    if batches:
        message = (
            f"this graph holds for a batch of {batches[0][1]} only: another makes the model do something "
            "else; trace with example_inputs of the size you need"
        )
        checks.append(check_step(batches, message, scope, ""))
    sizes = sizes_held(given, call, findings.sizes.held)
    if sizes:
        found = " and ".join(str(size) for size in sorted({size for _, size in sizes}))
        message = (
            f"this graph holds for inputs of size {found} only: at others the model computes another thing "
            "by a number that it makes of the size, as by ratios[0] * size (but not size * ratios[0]); else "
            "trace with example_inputs of the size you need"
        )
        checks.append(check_step(sizes, message, scope, ""))
    if findings.apart:
        message = (
            "this graph is that of inputs that are different tensors, and the model does something else "
            f"where two are one; {TAKE_ONCE}"
        )
        checks.append(check_step(all_apart(given), message, scope, ""))
    return checks


def _checks_of_ranks(given: Tensors, line: str, scope: Scope) -> list[Step]:
    """The checks of how many axes tensors have, for which the model has asked in this line."""
    checks: list[Step] = []
    for value, tensor in given:
        message = (
            f"{line} asks how many axes a tensor has, and {said(value)} has {tensor.ndim} in this graph; "
            "trace with example_inputs of the kind that you need"
        )
        checks.append(check_step([(Expr("dim", (value,)), tensor.ndim)], message, scope, line))
    return checks


def _is_there(value: Value, uses: Uses) -> bool:
    """Whether a graph can ask something of a tensor: it is an input that must be given, or it is used."""
    return (isinstance(value, Step) and not value.args) or uses.has(value)


def held_to_given(
    recording: Recording,
    model: nn.Module,
    call: ExampleCall,
    place: int,
    reads: AttributeReads,
    findings: Findings,
) -> Recording:
    """The recording with checks that the inputs it uses contain tensors where the example does.

    A model may ask whether an input is None and act differently then. There is no check for an input that a
    mode does not use, or where anything but a tensor fails by itself. Of objects with tensors, the checks
    are also of what else the model has read.

    Args:
        recording: of a run of the model.
        model: the model.
        call: the example, as it was before the run.
        place: behind how many steps the checks come, which are those of `bind`.
        reads: what the run has read of objects.
        findings: what is known of the model, such as the tensors that it does not use, but asks for.
    """
    left_out = () if model.training else findings.left_out
    inputs = [step for step in _inputs(recording) if step.target not in left_out]
    given = {argument.name: argument.value for argument in _arguments(model, call)}
    uses = Uses(recording)
    facts = [
        fact
        for step in inputs
        for fact in tensors_given(step, given[str(step.target)], uses, findings.ordered)
    ]
    tensors = [found for step in inputs for found in tensors_in(step, given[str(step.target)])]
    asked_for = [
        value for number, (value, _) in enumerate(tensors) if (model.training, number) in findings.asked_for
    ]
    facts += [(Expr(torch.is_tensor, (value,)), True) for value in asked_for]
    scope = inputs[0].scope if inputs else Scope("")
    facts += reads.facts(given, uses)
    once = list({path_of(value): (value, fact) for value, fact in facts}.values())
    checks = [check_inputs(each, scope) for each in by_depth(once)]
    read = [(value, tensor) for value, tensor in tensors if reads.may_have_read(value)]
    checks += _checks_of_tensors(read, call, findings, scope)
    if recording.asks_rank:
        there = [pair for pair in read if _is_there(pair[0], uses) or pair[0] in asked_for]
        checks += _checks_of_ranks(there, recording.asks_rank, scope)
    steps = list(recording.steps)
    steps[place:place] = checks
    draws = tuple(replace(draw, place=draw.place + len(checks)) for draw in recording.draws)
    asked = tuple(replace(asked, place=asked.place + len(checks)) for asked in recording.asked)
    return replace(recording, steps=tuple(steps), draws=draws, asked=asked, added=tuple(checks))


def optional(model: nn.Module, call: ExampleCall) -> dict[str, Any]:
    """The arguments of a call that contain tensors, and may be None instead."""
    return {
        argument.name: argument.value
        for argument in _arguments(model, call)
        if argument.given and argument.parameter.default is None and has_tensors(argument.value)
    }


def with_argument(model: nn.Module, call: ExampleCall, name: str, value: Any) -> ExampleCall:
    """A call with something else given for an argument."""
    if name in call.kwargs:
        return replace(call, kwargs={**call.kwargs, name: value})
    place = list(inspect.signature(model.forward).parameters).index(name)
    return replace(call, args=(*call.args[:place], value, *call.args[place + 1 :]))


def with_needed(model: nn.Module, call: ExampleCall, left_out: Iterable[str]) -> ExampleCall:
    """A call with None for each of the arguments without which the model does the same."""
    for name in sorted(left_out):
        call = with_argument(model, call, name, None)
    return call


def maybe_unused(
    recording: Recording | None, model: nn.Module, call: ExampleCall, left_out: frozenset[str]
) -> dict[int, torch.Tensor]:
    """The tensors of an example that a recording does not use, by their places among all.

    Those in objects are not among them: if they are read, that is checked. Nor are those in arguments that
    are ``left_out``. Without a recording all others are.
    """
    arguments = [each for each in _arguments(model, call) if each.given and each.name not in left_out]
    given = {argument.name: argument.value for argument in arguments}
    if recording is None:
        inputs = [Step("placeholder", name, (), {}, Scope(""), "") for name in given]
    else:
        inputs = [step for step in _inputs(recording) if step.target in given]
    uses = None if recording is None else Uses(recording)
    found = enumerate(each for step in inputs for each in tensors_in(step, given[str(step.target)]))
    return {
        place: tensor
        for place, (value, tensor) in found
        if not is_attribute(value) and (uses is None or not uses.has(value))
    }


def _inputs(recording: Recording) -> list[Step]:
    return [step for step in recording.steps if step.op == "placeholder"]


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
