"""How calls of modules, of their methods, and of users' functions are recorded.

Most modules are traced through. A leaf module, or a part that is kept whole, becomes one step. For a part
that is kept whole, the graph will check the structure of its result; a function that uses tensors which the
graph would not pass to it is refused.
"""

import ast
import inspect
import operator
import textwrap
import traceback
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.arguments import all_values
from pdp_fx.tracing.leaves import has_backward_hooks, has_hooks, is_whole, why_compiled
from pdp_fx.tracing.recorder import Args, Call, Kwargs, Recorder
from pdp_fx.tracing.returned import followed
from pdp_fx.tracing.shapes import Facts
from pdp_fx.tracing.steps import (
    Expr,
    Step,
    UnrecordableError,
    Whole,
    is_ragged,
)
from pdp_fx.tracing.structure import attributes, plain_leaves, tensors
from pdp_fx.tracing.unseen import heed, refuse_numbers
from pdp_fx.tracing.watch import storage_of, version_of


def run_module(recorder: Recorder, module: nn.Module, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a module: a leaf or one that is kept whole becomes one step, any other is traced through."""
    path = recorder.paths.get(id(module), "")
    if not path:
        return call(module, *args, **kwargs)
    whole = Whole(path)
    lent, opaque = recorder.origins.lends(module), whole in recorder.findings.opaque
    layer = is_whole(module) and not lent
    if opaque or not layer or has_hooks(module):
        # What was drawn before is not drawn by the module; a layer of torch draws nothing outside torch.
        recorder.check_drawn()
    if lent and opaque:
        why = f"lends tensors to {path}, which cannot be looked into"
        raise UnrecordableError(why, Whole(recorder.scope.path), instead_of=whole)
    if opaque or layer:
        parts = list(module.modules())
        recorder.rebinding.overwrite(parts, path)
        with recorder.silent():
            step = recorder.step("call_module", path, args, kwargs)
            step.reason = recorder.findings.opaque.get(whole, why_compiled(module))
            result = _whole(recorder, step, call, (module, *args), kwargs)
        recorder.rebinding.pass_over(parts)
        return result
    if has_backward_hooks(module):
        raise UnrecordableError("has hooks that are called with its gradients", whole)
    with recorder.entered(path, module, (*args, *kwargs.values())):
        return call(module, *args, **kwargs)


def path_of(err: Exception) -> str | None:
    """The path of the innermost module whose code raised an error as it was recorded; None if none did."""
    ran = [f.f_locals for f, _ in traceback.walk_tb(err.__traceback__) if f.f_code is run_module.__code__]
    paths = [str(names["path"]) for names in ran]
    return next(filter(None, reversed(paths)), "") if paths else None


def run_method(recorder: Recorder, whole: Whole, method: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a method of a module as one step."""
    recorder.check_drawn()
    module = recorder.model.get_submodule(whole.path)
    with recorder.silent():
        # It may do so in its own way, and call its methods for it.
        parts = list(module.modules())
    recorder.rebinding.overwrite(parts, str(whole))
    with recorder.silent():
        step = recorder.step("call_module", whole, args, kwargs)
        step.reason = recorder.findings.opaque[whole]
        result = _whole(recorder, step, method, args, kwargs)
        mentioned = _mentioned(module, whole.method)
    recorder.rebinding.pass_over(parts)
    inside = f"{whole.path}." if whole.path else ""
    step.uses |= {inside + name for name in mentioned}
    return result


def _mentioned(model: nn.Module, method: str) -> frozenset[str]:
    """The parameters and buffers of what a method's code, and that of methods it calls, names after `self`.

    This run may not take the branch that uses them. All of the module's if there is no code to read. A number
    that a part of it holds, as in ``self.net.hidden_features``, uses none, nor does a question whether there
    is a part, or of which kind.
    """
    named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    found, todo, seen = set[str](), [method], set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(type(model), name))))
        except (OSError, TypeError, SyntaxError, AttributeError):
            return frozenset(named)
        nodes = list(ast.walk(tree))
        attributes_read = [node for node in nodes if isinstance(node, ast.Attribute)]
        numbers = [node for node in attributes_read if _is_number_of_part(node, model)]
        asked_about = [operand for node in nodes for operand in _asked_about(node) if _path(operand)]
        beside = {part for node in (*numbers, *asked_about) for part in ast.walk(node)}
        asked = {node.attr for node in attributes_read if node not in beside}
        todo += [
            attr
            for attr in asked
            if inspect.isfunction(getattr(type(model), attr, None)) and not hasattr(nn.Module, attr)
        ]
        found |= asked
    return frozenset(name for name in named if name.partition(".")[0] in found)


_QUESTIONS = frozenset({"hasattr", "isinstance", "type", "callable", "len"})
"""Functions that ask of their first argument what no number in it changes."""


def _asked_about(node: ast.AST) -> list[ast.expr]:
    """What an expression asks a question about: whether it is another object, of which kind, how long."""
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _QUESTIONS:
        return node.args[:1]
    return []


def _path(node: ast.AST) -> list[str]:
    """The names of an attribute of a variable, as in ``self.net.hidden``; empty of anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names if isinstance(node, ast.Name) else []


def _is_number_of_part(node: ast.AST, model: nn.Module) -> bool:
    """Whether an expression is a plain attribute of a module inside the model: a number, a text or None.

    A number of a layer is none, for it may change with the layer's weights. What a module does not have, and
    code asks for behind a question whether it has it, is one.
    """
    names = _path(node)
    if len(names) < 2:
        return False
    holder: nn.Module | None = model
    for name in names[:-1]:
        holder = None if holder is None else holder._modules.get(name)
    if holder is None:
        return False
    if _has_no(holder, names[-1]):
        return True
    held = {} if holder._parameters else vars(holder)
    return names[-1] in held and isinstance(held[names[-1]], bool | int | float | str | None)


def _has_no(module: nn.Module, name: str) -> bool:
    """Whether a module surely has no attribute of this name."""
    tables = (module._parameters, module._buffers, module._modules)
    if any(name in table for table in tables) or type(module).__getattr__ is not nn.Module.__getattr__:
        return False
    return inspect.getattr_static(module, name, tables) is tables


def run_function(recorder: Recorder, whole: Whole, function: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run a function, or a method of an object that is no module, as one step."""
    if isinstance(whole.holder, type):
        # Tensors that the object holds might be used in a branch that this run does not take.
        if any(recorder.watch.is_ours(tensor) for tensor in tensors(list(attributes(args[0]).values()))):
            raise UnrecordableError(
                recorder.findings.opaque[whole], Whole(recorder.scope.path), instead_of=whole
            )
        function, args = recorder.findings.bound(args[0], whole.method), args[1:]
    recorder.check_drawn()
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
    """Refuse a function that uses weights, or tensors of this run other than its arguments.

    It may get them from the object whose method it is, or from a global variable.
    """
    given = {storage_of(tensor) for tensor in operands}
    used = recorder.watch.touched | {storage_of(tensor) for tensor in tensors(result)}
    if recorder.watch.read_weights or not given.issuperset(used & owned):
        raise UnrecordableError(step.reason, Whole(recorder.scope.path), instead_of=whole)


def _whole(
    recorder: Recorder, step: Step, call: Call, args: Args, kwargs: Kwargs, alone: Whole | None = None
) -> Any:
    """Run a step that is not traced through.

    Args:
        recorder: the recorder.
        step: the step.
        call: what to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        alone: a function that may use nothing but its arguments, or None.
    """
    owned = frozenset[int]() if alone is None else recorder.watch.owned()
    unseen = bool(step.reason) or (step.op == "call_module" and has_hooks(args[0]))
    given = plain_leaves(recorder.handed((args, kwargs))) if unseen else []
    operands = list(tensors((args, kwargs)))
    buffers = list(args[0].buffers()) if args and isinstance(args[0], nn.Module) else []
    versions = [version_of(buffer) for buffer in buffers]
    result, changed = recorder.run_and_compare(call, args, kwargs, step, operands)
    if alone is not None:
        _check_given(recorder, alone, step, operands, result, owned)
    step.updates |= versions != [version_of(buffer) for buffer in buffers]
    if unseen:
        recorder.watch.allow_drawn()
    # What a part that is kept whole has seen of sizes that depend on numbers, it has seen of numbers.
    ragged = recorder.watch.ragged or any(map(is_ragged, all_values((step.args, step.kwargs))))
    if recorder.watch.read_numbers or (unseen and ragged):
        step.reads_numbers = unseen
    reading: list[Step] = []
    if unseen and recorder.findings.follows_returned:
        result, reading = followed(recorder, step, result)
    if step.reads_numbers:
        refuse_numbers(recorder, step, result)
    if given != (plain_leaves(recorder.handed((args, kwargs))) if unseen else []):
        why = f"gives {step.called} something to change that is no tensor"
        raise UnrecordableError(why, Whole(recorder.scope.path))
    sizes = _sizes_given(recorder, step, result, operands)
    result = recorder.commit(step, result, changed)
    recorder.steps += reading
    if unseen:
        heed(recorder, step, result, sizes)
    return result


def _sizes_given(recorder: Recorder, step: Step, result: Any, operands: list[torch.Tensor]) -> Facts:
    """The fact that the result has the same size as an operand, if it could not be known otherwise.

    The graph will check it; the size of the result then no longer counts as depending on numbers.
    """
    if not step.ragged or not isinstance(result, torch.Tensor) or recorder.watch.makes_ragged(result):
        return []
    for operand in operands:
        value = recorder.origins.value(operand)
        if operand.shape == result.shape and not is_ragged(value):
            step.ragged = False
            return [(Expr(operator.eq, (Expr("size", (step,)), Expr("size", (value,)))), True)]
    return []
