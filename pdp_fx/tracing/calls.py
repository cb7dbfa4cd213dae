"""Calls of modules, of their methods, and of users' functions.

Most modules are looked into. Leaves, and what has to stay whole, are one step each; the graph then checks
what such a step returns, and a function that reaches for what the graph would not give it is refused.
"""

import operator
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.arguments import leaves
from pdp_fx.tracing.leaves import is_whole
from pdp_fx.tracing.recorder import Args, Call, Kwargs, Recorder, version_of
from pdp_fx.tracing.shapes import Facts, check_step, structure_of
from pdp_fx.tracing.steps import (
    DIFFERS_BY_MODE,
    Attribute,
    Expr,
    Step,
    UnrecordableError,
    Whole,
    is_ragged,
)
from pdp_fx.tracing.structure import is_record, plain_leaves, tensors
from pdp_fx.tracing.watch import storage_of


def run_module(recorder: Recorder, module: nn.Module, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a module: a leaf or an opaque one becomes one step, any other is traced through."""
    path = recorder.paths.get(id(module), "")
    if not path:
        return call(module, *args, **kwargs)
    whole = Whole(path)
    recorder.check_drawn()
    lent = recorder.origins.lends(module)
    if lent and whole in recorder.findings.opaque:
        why = f"lends tensors to {path}, which cannot be looked into"
        raise UnrecordableError(why, Whole(recorder.scope.path), instead_of=whole)
    if whole in recorder.findings.opaque or (is_whole(module) and not lent):
        with recorder.silent():
            step = recorder.step("call_module", path, args, kwargs)
            step.reason = recorder.findings.opaque.get(whole, "")
            return _whole(recorder, step, call, (module, *args), kwargs)
    with recorder.entered(path, module):
        return call(module, *args, **kwargs)


def run_method(recorder: Recorder, whole: Whole, method: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a method of a module as one step."""
    with recorder.silent():
        step = recorder.step("call_module", whole, args, kwargs)
        if whole.path:
            step.op, step.target = "call_method", whole.method
            step.args = (Attribute(whole.path), *step.args)
        step.reason = recorder.findings.opaque[whole]
        result = _whole(recorder, step, method, args, kwargs)
    if recorder.watch.read_weights and recorder.scope.path:
        raise UnrecordableError(step.reason, Whole(recorder.scope.path), instead_of=whole)
    return result


def run_function(recorder: Recorder, whole: Whole, function: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a function that is none of the model's methods, or a method of another object, as one step."""
    if isinstance(whole.holder, type):
        # What it holds may be used in a branch that is not taken now.
        if any(
            recorder.watch.is_ours(tensor)
            for tensor in tensors(list(getattr(args[0], "__dict__", {}).values()))
        ):
            raise UnrecordableError(
                recorder.findings.opaque[whole], Whole(recorder.scope.path), instead_of=whole
            )
        function, args = recorder.findings.bound(args[0], whole.method), args[1:]
    with recorder.silent():
        try:
            step = recorder.step("call_function", function, args, kwargs)
        except UnrecordableError as err:
            why = f"{recorder.findings.opaque[whole]}, in a function to which it {err.reason}"
            raise UnrecordableError(why, Whole(recorder.scope.path), instead_of=whole) from err
        step.reason = recorder.findings.opaque[whole]
        return _whole(recorder, step, function, args, kwargs, whole)


def _check_given(
    recorder: Recorder,
    whole: Whole,
    step: Step,
    operands: list[torch.Tensor],
    result: Any,
    owned: frozenset[int],
) -> None:
    """Refuse a function that uses weights, or anything of this run that the graph would not give it.

    It may have that from the object whose method it is, or from a global variable.
    """
    given = {storage_of(tensor) for tensor in operands}
    used = recorder.watch.touched | {storage_of(tensor) for tensor in tensors(result)}
    if recorder.watch.read_weights or not given.issuperset(used & owned):
        raise UnrecordableError(step.reason, Whole(recorder.scope.path), instead_of=whole)


def _whole(
    recorder: Recorder, step: Step, call: Call, args: Args, kwargs: Kwargs, alone: Whole | None = None
) -> Any:
    """Run a step that nobody looks into; ``alone`` says that it may use nothing but its arguments."""
    recorder.check_drawn()
    owned = frozenset[int]() if alone is None else recorder.watch.owned()
    given = plain_leaves((args, kwargs)) if step.reason else []
    operands = list(tensors((args, kwargs)))
    buffers = list(args[0].buffers()) if args and isinstance(args[0], nn.Module) else []
    versions = [version_of(buffer) for buffer in buffers]
    result, changed = recorder.run_and_compare(call, args, kwargs, step, operands)
    if alone is not None:
        _check_given(recorder, alone, step, operands, result, owned)
    step.updates |= versions != [version_of(buffer) for buffer in buffers]
    if step.reason:
        recorder.watch.allow_drawn()
    if recorder.watch.read_numbers:
        step.reads_numbers = bool(step.reason)
        _check_numbers(step, result)
        if step.reason and given != plain_leaves((args, kwargs)):
            why = f"gives {step.called} something to change that is no tensor"
            raise UnrecordableError(why, Whole(recorder.scope.path))
    sizes = _sizes_given(recorder, step, result, operands)
    result = recorder.commit(step, result, changed)
    if step.reason and step.reason != DIFFERS_BY_MODE:
        _check_structure(recorder, step, result, sizes)
    return result


def _check_numbers(step: Step, result: Any) -> None:
    """Refuse numbers in the result of a step that has read numbers in tensors: they would be constants."""
    # A record's number may be its default by chance.
    found = plain_leaves(result) if is_record(result) else leaves(result)
    if any(isinstance(leaf, bool | int | float) for leaf in found):
        raise UnrecordableError(f"gets a number from {step.called} that depends on numbers in a tensor")


def _sizes_given(recorder: Recorder, step: Step, result: Any, operands: list[torch.Tensor]) -> Facts:
    """That a tensor has the size of one that was given, where nothing but the numbers in it says so.

    Then the size depends on them no longer.
    """
    if not step.ragged or not isinstance(result, torch.Tensor) or recorder.watch.makes_ragged(result):
        return []
    for operand in operands:
        value = recorder.origins.value(operand)
        if operand.shape == result.shape and not is_ragged(value):
            step.ragged = False
            return [(Expr(operator.eq, (Expr("size", (step,)), Expr("size", (value,)))), True)]
    return []


def _check_structure(recorder: Recorder, step: Step, result: Any, sizes: Facts) -> None:
    """Let the graph fail if something opaque returns another structure, such as no tensor at all."""
    facts = structure_of(step, result) + sizes
    if facts:
        message = f"{step.called} returned something else than when it was traced"
        recorder.steps.append(check_step(facts, message, step.scope, step.source))
