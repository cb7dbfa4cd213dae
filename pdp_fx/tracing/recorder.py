"""Recording one run of a model as steps.

The recorder is told of every torch function and every module call (`intercept.py` does the listening). What a
graph cannot express raises `UnrecordableError`, which says what has to stay whole; the caller records again.
"""

import operator
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from pdp_fx.tracing import functions
from pdp_fx.tracing.arguments import Arguments, all_values, leaves, stripped
from pdp_fx.tracing.compiling import compiling
from pdp_fx.tracing.dtypes import Dtypes
from pdp_fx.tracing.failures import Failures
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.leaves import is_whole
from pdp_fx.tracing.objects import Apply
from pdp_fx.tracing.origins import Origins
from pdp_fx.tracing.shapes import Facts, check_step, structure_of
from pdp_fx.tracing.sizes import Session, live, note_fixed
from pdp_fx.tracing.source import source_line
from pdp_fx.tracing.steps import (
    DIFFERS_BY_MODE,
    Attribute,
    Expr,
    NumberReadError,
    Recording,
    Scope,
    Step,
    UnrecordableError,
    Whole,
    identity,
    is_data,
    is_ragged,
    may_change,
    varies,
)
from pdp_fx.tracing.structure import has_tensors, tensors
from pdp_fx.tracing.watch import Watch, storage_of

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Recorder:
    """The steps of one run so far.

    Args:
        model: the model that runs.
        findings: what to keep whole.
    """

    def __init__(self, model: nn.Module, findings: Findings) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.findings = findings
        self.session = Session(self.decided)
        self.steps: list[Step] = []
        self.scope = Scope("")
        self.scopes = {self.scope}
        self.inside = False
        self.failures = Failures(model, self.paths, findings.tried)
        self.watch = Watch(model)
        self.origins = Origins(model, self.watch, self._alias)
        self.arguments = Arguments(self.origins, self.session)
        self.dtypes = Dtypes()
        self._calls: Counter[str] = Counter()
        self._decided: set[Hashable] = set()
        self._buffers = dict(model._buffers)

    def placeholder(self, name: str, example: Any, default: Args = ()) -> tuple[Step, Any]:
        """Add an input of the model; returns its step and the example to run with."""
        step = Step("placeholder", name, default, {}, self.scope, "")
        self.steps.append(step)
        for tensor in tensors(example):
            self.watch.own(tensor)
        return step, self.origins.adopt(example, step)

    def guarded(self, act: Call, *args: Any) -> Any:
        """Act for the model; what cannot be recorded is noted, and where it can the run goes on."""
        try:
            return act(*args)
        except UnrecordableError as err:
            return self.failures.go_on(err, self.scope.path)

    def function(self, function: Call, args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function and record it."""
        name = functions.name_of(function)
        if name == "register_hook":
            raise UnrecordableError("hooks the gradient of a tensor")
        op, target, shown = functions.in_graph_form(function, args, kwargs)
        try:
            step = self.step(op, target, shown, kwargs)
        except UnrecordableError:
            if has_tensors((args, kwargs)):
                raise
            return self._constant_result(function, args, kwargs)
        operands = list(tensors((args, kwargs)))
        result, changed = self._run_and_compare(function, args, kwargs, step, operands)
        if functions.is_in_place(name) and operands and not changed:
            changed = (operands[0],)
        if functions.keeps_size(name) and changed:
            step.ragged = self.origins.is_ragged(changed)
        if not has_tensors(result) and not changed:
            return self._number(name, result, step)
        if step.ragged and isinstance(result, tuple | list) and name == "unbind":
            raise UnrecordableError("loops over a tensor whose size depends on numbers")
        return self._commit(step, result, changed)

    def _constant_result(self, function: Call, args: Args, kwargs: Kwargs) -> Any:
        """A tensor made of numbers that the graph does not see, such as a numpy array.

        Where it is made of sizes, too, they are those that the graph was made with.
        """
        note_fixed(leaves((args, kwargs)), self.session)
        result = self.run(function, args, kwargs)
        for tensor in tensors(result):
            self.origins.constant(tensor)
        return result

    def _number(self, name: str, result: Any, step: Step) -> Any:
        """A result without tensors: fine unless it tells something about numbers that may change.

        Of numbers that follow from sizes, a single one stays a computation, and the graph checks others.
        """
        if step.target is torch._assert and not is_data(step.args[0]):
            return result
        if result is None and step.op == "call_function":
            self.steps.append(step)
            return result
        if any(is_data(value) for value in all_values((step.args, step.kwargs))):
            raise NumberReadError(f"uses the numbers in a tensor ({name})", result)
        if not step.varies:
            return result
        if isinstance(result, np.ndarray):
            self.decided(Expr(operator.eq, (Expr("tolist", (self._added(step),)), result.tolist())))
        elif name == "item":
            return live(result, self._added(step), self.session)
        elif isinstance(result, bool | int | float | list):
            self.decided(Expr(operator.eq, (self._added(step), result)))
        return result

    def _added(self, step: Step) -> Step:
        self.steps.append(step)
        return step

    def module(self, module: nn.Module, call: Call, args: Args, kwargs: Kwargs) -> Any:
        """Run a module: a leaf or an opaque one becomes one step, any other is traced through."""
        path = self.paths.get(id(module), "")
        if not path:
            return call(module, *args, **kwargs)
        whole = Whole(path)
        lent = self.origins.lends(module)
        if lent and whole in self.findings.opaque:
            why = f"lends tensors to {path}, which cannot be looked into"
            raise UnrecordableError(why, Whole(self.scope.path), instead_of=whole)
        if whole in self.findings.opaque or (is_whole(module) and not lent):
            with self.silent():
                step = self.step("call_module", path, args, kwargs)
                step.reason = self.findings.opaque.get(whole, "")
                return self._whole(step, call, (module, *args), kwargs)
        with self._entered(path, module):
            return call(module, *args, **kwargs)

    def method(self, whole: Whole, method: Call, args: Args, kwargs: Kwargs) -> Any:
        """Run a method of a module as one step."""
        with self.silent():
            step = self.step("call_module", whole, args, kwargs)
            if whole.path:
                step.op, step.target, step.args = (
                    "call_method",
                    whole.method,
                    (Attribute(whole.path), *step.args),
                )
            step.reason = self.findings.opaque[whole]
            result = self._whole(step, method, args, kwargs)
        if self.watch.read_weights and self.scope.path:
            raise UnrecordableError(step.reason, Whole(self.scope.path), instead_of=whole)
        return result

    def user_function(self, whole: Whole, function: Call, args: Args, kwargs: Kwargs) -> Any:
        """Run a function that is none of the model's methods, or a method of another object, as one step."""
        if isinstance(whole.holder, type):
            # What it holds may be used in a branch that is not taken now.
            if any(
                self.watch.is_ours(tensor)
                for tensor in tensors(list(getattr(args[0], "__dict__", {}).values()))
            ):
                raise UnrecordableError(self.findings.opaque[whole], Whole(self.scope.path), instead_of=whole)
            function, args = self.findings.bound(args[0], whole.method), args[1:]
        with self.silent():
            step = self.step("call_function", function, args, kwargs)
            step.reason = self.findings.opaque[whole]
            return self._whole(step, function, args, kwargs, whole)

    def _check_given(
        self, whole: Whole, step: Step, operands: list[torch.Tensor], result: Any, owned: frozenset[int]
    ) -> None:
        """Refuse a function that uses weights, or anything of this run that the graph would not give it.

        It may have that from the object whose method it is, or from a global variable.
        """
        given = {storage_of(tensor) for tensor in operands}
        used = self.watch.touched | {storage_of(tensor) for tensor in tensors(result)}
        if self.watch.read_weights or not given.issuperset(used & owned):
            raise UnrecordableError(step.reason, Whole(self.scope.path), instead_of=whole)

    def _whole(self, step: Step, call: Call, args: Args, kwargs: Kwargs, alone: Whole | None = None) -> Any:
        owned = frozenset[int]() if alone is None else self.watch.owned()
        operands = list(tensors((args, kwargs)))
        buffers = list(args[0].buffers()) if args and isinstance(args[0], nn.Module) else []
        versions = [_version(buffer) for buffer in buffers]
        result, changed = self._run_and_compare(call, args, kwargs, step, operands)
        if alone is not None:
            self._check_given(alone, step, operands, result, owned)
        step.updates |= versions != [_version(buffer) for buffer in buffers]
        if step.reason:
            self.watch.allow_drawn()
        if self.watch.read_numbers and any(isinstance(leaf, bool | int | float) for leaf in leaves(result)):
            raise UnrecordableError(f"gets a number from {step.called} that depends on numbers in a tensor")
        sizes = self._sizes_given(step, result, operands)
        result = self._commit(step, result, changed)
        if step.reason and step.reason != DIFFERS_BY_MODE:
            self._check_structure(step, result, sizes)
        return result

    def _sizes_given(self, step: Step, result: Any, operands: list[torch.Tensor]) -> Facts:
        """That a tensor has the size of one that was given, where nothing but the numbers in it says so.

        Then the size depends on them no longer.
        """
        if not step.ragged or not isinstance(result, torch.Tensor) or self.watch.makes_ragged(result):
            return []
        for operand in operands:
            value = self.origins.value(operand)
            if operand.shape == result.shape and not is_ragged(value):
                step.ragged = False
                return [(Expr(operator.eq, (Expr("size", (step,)), Expr("size", (value,)))), True)]
        return []

    def _check_structure(self, step: Step, result: Any, sizes: Facts) -> None:
        """Let the graph fail if something opaque returns another structure, such as no tensor at all."""
        facts = structure_of(step, result) + sizes
        if facts:
            message = f"{step.called} returned something else than when it was traced"
            self.steps.append(check_step(facts, message, step.scope, step.source))

    @contextmanager
    def _entered(self, path: str, module: nn.Module) -> Generator[None, None, None]:
        self._calls[path] += 1
        outer, self.scope = self.scope, Scope(path, self._calls[path], self.scope)
        self.scopes.add(self.scope)
        buffers = dict(module._buffers)
        try:
            yield
            self._leave(module, buffers)
        finally:
            self.scope = outer

    def _leave(self, module: nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
        """Look for what a module did besides calling functions.

        A buffer that it replaced by another tensor is, in the graph, overwritten.
        """
        for name, before in buffers.items():
            after = module._buffers.get(name)
            if after is before:
                continue
            if before is None or after is None or kind_of_tensor(before) != kind_of_tensor(after):
                raise UnrecordableError(f"replaces its buffer {name}", Whole(self.scope.path))
            with self.silent():
                self.function(
                    torch.Tensor.copy_, (before, self.function(torch.Tensor.detach, (after,), {})), {}
                )
        if self.watch.has_drawn_outside():
            raise UnrecordableError("draws random numbers outside torch", Whole(self.scope.path))

    def decided(self, fact: Expr) -> None:
        """Let the graph fail where something that users' code has found true of sizes is not."""
        known = identity(fact)
        if self.inside or known in self._decided or is_data(fact) or not may_change(fact):
            return
        self._decided.add(known)
        source = source_line()
        message = (
            f"{source} decides by sizes, and by these otherwise than in this graph; "
            "trace with example_inputs of such sizes"
        )
        self.steps.append(
            Step("call_function", torch._assert, (fact, message), {}, self.scope, source, decides=True)
        )

    def finish(self, result: Any) -> Recording:
        """The recording of a run that is over and gave this result."""
        self.failures.check()
        self._leave(self.model, self._buffers)
        return Recording(tuple(self.steps), self.arguments.output(result), frozenset(self.scopes))

    @contextmanager
    def silent(self) -> Generator[None, None, None]:
        """What happens inside the block is not recorded."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def step(self, op: str, target: Any, args: Args, kwargs: Mapping[str, Any]) -> Step:
        """A step with its arguments written as values; not yet part of the recording."""
        dtypes = self.dtypes.followed(args, dict(kwargs), len(self.steps))
        encoded = tuple(self._encode(arg, dtypes) for arg in args)
        named = {key: self._encode(arg, dtypes) for key, arg in kwargs.items()}
        return Step(op, target, encoded, named, self.scope, source_line())

    def _encode(self, arg: Any, dtypes: Mapping[torch.dtype, Expr]) -> Any:
        followed = dtypes.get(arg) if isinstance(arg, torch.dtype) else None
        return self.arguments.encode(arg) if followed is None else followed

    def run(self, call: Call, args: Args, kwargs: Mapping[str, Any]) -> Any:
        """Call with plain numbers, unrecorded."""
        with self.silent(), self.watch.watching(), compiling(False):
            return call(*stripped(args), **stripped(dict(kwargs)))

    def live(self, number: Any, call: str, *args: Any) -> Any:
        """A number with the method call that computes it."""
        return live(number, Expr(call, args), self.session)

    def _run_and_compare(
        self, call: Call, args: Args, kwargs: Kwargs, step: Step, operands: list[torch.Tensor]
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Run a step; notes in it what the call did underneath, and returns which operands changed."""
        versions = [_version(tensor) for tensor in operands]
        result = self.run(call, args, kwargs)
        if isinstance(call, Apply) and self.watch.read_numbers:
            raise UnrecordableError(f"looks at numbers in the autograd function {call.__name__}")
        values = all_values((step.args, step.kwargs))
        whole = step.op == "call_module" or bool(step.reason)
        step.random, step.updates = self.watch.random, self.watch.updates
        step.data = whole or step.random or any(is_data(value) for value in values)
        step.ragged = self.watch.ragged or any(is_ragged(value) for value in values)
        step.varies = any(varies(value) for value in values)
        pairs = zip(operands, versions, strict=True)
        return result, tuple(tensor for tensor, before in pairs if _version(tensor) != before)

    def _commit(self, step: Step, result: Any, changed: tuple[torch.Tensor, ...]) -> Any:
        self.steps.append(step)
        step.changes = tuple(self.origins.value(tensor) for tensor in changed)
        for tensor in changed:
            returned = any(tensor is part for part in tensors(result))
            step.observed |= self.origins.change(tensor, step, returned)
        return self.origins.adopt(result, step, changed)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.run(torch.Tensor.view_as, (tensor, tensor), {})


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed; what inference mode makes cannot be changed in place outside it."""
    return 0 if tensor.is_inference() else tensor._version


def kind_of_tensor(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What another tensor must have in common with one to take its place."""
    return tensor.shape, tensor.dtype, tensor.device
