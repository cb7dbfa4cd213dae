"""`Recorder`: one run of a model as a list of steps.

`intercept.py` calls the recorder for every torch function and every module call. What a graph cannot express
raises `UnrecordableError`, which says which part of the model to keep whole; the caller (`attempts.py`) then
records again.
"""

import operator
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from pdp_fx.tracing import functions
from pdp_fx.tracing.arguments import Arguments, all_values, leaves, stripped
from pdp_fx.tracing.attribute_reads import AttributeReads
from pdp_fx.tracing.branches import Branches
from pdp_fx.tracing.checks import Checks, refuse_ragged
from pdp_fx.tracing.compiling import compiling
from pdp_fx.tracing.decisions import Decisions
from pdp_fx.tracing.dtypes import Dtypes
from pdp_fx.tracing.expressions import is_tried
from pdp_fx.tracing.failures import Failures
from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.leaving import Leavings
from pdp_fx.tracing.objects import Apply, AsSubclass
from pdp_fx.tracing.origins import Origins
from pdp_fx.tracing.parts import Parts
from pdp_fx.tracing.rebinding import Rebinding
from pdp_fx.tracing.selecting import says
from pdp_fx.tracing.sizes import Live, Place, Session, given_as, live, note_fixed, plain, value_of
from pdp_fx.tracing.skipping import is_drawn, reads
from pdp_fx.tracing.source import Frames, source_line
from pdp_fx.tracing.steps import (
    DRAWS_OUTSIDE,
    TRUTH,
    Expr,
    NumberReadError,
    Recording,
    Scope,
    Step,
    UnrecordableError,
    Value,
    Whole,
    is_data,
    is_ragged,
    is_read,
    is_returned,
    varies,
)
from pdp_fx.tracing.structure import has_tensors, tensors
from pdp_fx.tracing.time_limit import TooLongError
from pdp_fx.tracing.unseen import heed, refuse_numbers
from pdp_fx.tracing.watch import Watch, version_of

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Recorder:
    """The steps of one run so far.

    Args:
        model: the model that runs.
        findings: what is known of the model, such as the parts to keep whole.
        answers: which way to go at each branch that is recorded both ways, by number; None to refuse such.
        empty: as for `record.record`.
    """

    def __init__(
        self,
        model: nn.Module,
        findings: Findings,
        answers: Callable[[int], bool] | None = None,
        empty: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.findings = findings
        self.checks, self.branches = Checks(self), Branches(self, answers, empty)
        self.session = Session(self.checks.decided, self.branches.by_count)
        self.steps: list[Step] = []
        self.scope = Scope("")
        self.scopes: dict[Scope, Args] = {self.scope: ()}
        self.flags: dict[str, set[tuple[str, bool]]] = {}
        self.asks_mode, self.asks_rank = False, ""
        self._inside, self._thread = False, threading.get_ident()
        self._recomputed, self._checkpoints = 0, 0
        self.failures = Failures(model, self.paths, findings.tried)
        self.watch = Watch(model)
        self.origins = Origins(model, self.watch, self._alias, self._another)
        self.arguments = Arguments(self.origins, self.session)
        self.reads, self.leavings = AttributeReads(self), Leavings(self)
        self.frames = Frames()
        self.dtypes, self.decisions = Dtypes(self.frames), Decisions(self)
        self.placed: tuple[Value, torch.device] | None = None
        self.parts = Parts()
        self.uses_threads = False
        self._calls: Counter[str] = Counter()
        self.rebinding = Rebinding(self)
        self._before = self._parts_of(self._looked_into(model))

    def placeholder(self, name: str, example: Any, default: Args = ()) -> tuple[Step, Any]:
        """Add an input of the model; returns its step and the example to run with."""
        step = Step("placeholder", name, default, {}, self.scope, "")
        self._note_kind(step, example)
        self.branches.empty(example)
        self.steps.append(step)
        for tensor in tensors(example):
            self.watch.own(tensor)
        return step, self.origins.adopt(example, step)

    def _note_kind(self, step: Step, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            with self.silent():
                step.shape, step.dtype = tuple(result.shape), result.dtype

    def follows_given(self, name: str) -> bool:
        """Whether a number that is given as this argument may be another at each call of the graph."""
        return self.findings.follows_given and given_as(name) not in self.findings.insisted

    def given_number(self, step: Step, number: float) -> Any:
        """A number that the model is given by an input, with the input as what computes it."""
        step.data = False
        if self.session.decoy is not None:
            self.session.decoy.meet(given_as(str(step.target)), step)
        return live(number, step, self.session)

    def guarded(self, act: Call, *args: Any) -> Any:
        """Call ``act(*args)``; note what cannot be recorded, and continue the run if that is possible."""
        try:
            return act(*args)
        except UnrecordableError as err:
            return self.failures.go_on(err, self.scope.path)

    def refuse(self, why: str) -> None:
        """Note that the model does something now that no graph can hold; the run ends, as after `guarded`."""
        self.guarded(_refuse, why)

    def note_in_eval(self, module: nn.Module) -> None:
        """Note that the model puts a module into eval mode as it runs; the next recording finds it so."""
        if self.findings.may_put_in_eval:
            paths = (self.paths.get(id(part)) for part in module.modules())
            self.findings.put_in_eval |= {path for path in paths if path}

    def function(self, function: Call, args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function and record it."""
        name = functions.name_of(function)
        if name == "register_hook":
            raise UnrecordableError(f"hooks the gradient of a tensor{functions.who_hooks_too()}")
        args, kwargs = functions.first_by_position(function, args, functions.in_own_names(function, kwargs))
        kwargs = functions.without_hints(name, args, kwargs)
        if name == "item" and self.branches.go_both_ways and is_drawn(self.arguments.encode(args[0])):
            return self._drawn_number(args[0])
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._by_tensors(args[1]), *args[2:])
        elif name == "new" and len(args) == 2 and isinstance(args[1], torch.Size):
            # In a graph it would be a tuple, which stands for numbers there.
            name, function, args = "new_empty", torch.Tensor.new_empty, (args[0], tuple(args[1]))
        elif name == "new_tensor":
            args = (args[0], *map(self._as_list, args[1:]))
        if any(isinstance(leaf, Live) for leaf in leaves((args, kwargs))):
            self._keep_told(functions.told_to_channels(function, args, kwargs))
        op, target, shown = functions.in_graph_form(function, args, kwargs)
        try:
            step = self.step(op, target, shown, kwargs)
        except UnrecordableError:
            if has_tensors((args, kwargs)):
                raise
            return self._constant_result(function, args, kwargs)
        step.args = tuple(self.parts.joined(value) for value in step.args)
        step.kwargs = {key: self.parts.joined(value) for key, value in step.kwargs.items()}
        operands = list(tensors((args, kwargs)))
        result, changed = self.run_and_compare(function, args, kwargs, step, operands)
        if functions.is_in_place(name) and operands and not changed:
            # The versions of several tensors at once are not counted while they are watched.
            changed = tuple(tensors(args[0])) if functions.changes_each(name) else (operands[0],)
        if functions.keeps_size(name) and changed:
            step.ragged = self.origins.is_ragged(changed)
        elif step.ragged and not self.watch.ragged:
            step.ragged = not self._is_sized_otherwise(name, step, operands, result)
        if not has_tensors(result) and not changed:
            return self._number(name, result, step)
        custom = functions.is_custom(function)
        if custom:
            refuse_numbers(self, step, result)
        result = self.commit(step, result, changed)
        if custom or isinstance(step.target, Apply | AsSubclass):
            heed(self, step, result, [])
        return result

    def _drawn_number(self, tensor: torch.Tensor) -> torch.Tensor:
        """A random number read from a tensor, as a tensor that compares and computes as the number does."""
        number = self.function(torch.Tensor.reshape, (tensor, ()), {})
        return self.function(torch.Tensor.double, (number,), {}) if number.is_floating_point() else number

    def _keep_told(self, told: Sequence[Any]) -> None:
        """Refuse what numbers say that are read from tensors, and insist on those that parts return.

        Channels may lie along any axis that they pick, and stay 0 only if they are filled with that.
        """
        for number in leaves(told):
            value = value_of(number, self.session) if isinstance(number, Live) else None
            if is_read(value):
                self.guarded(refuse_ragged, "picks an axis or a filling by", value)
            elif is_returned(value):
                note_fixed((number,), self.session)

    def _is_sized_otherwise(self, name: str, step: Step, operands: list[torch.Tensor], result: Any) -> bool:
        """Whether other operands than those whose sizes depend on numbers decide the size of the result."""
        sizing = functions.sizing(name, step.args)
        if sizing is not None:
            return not any(is_ragged(value) for value in sizing)
        if not functions.broadcasts(name) or not isinstance(result, torch.Tensor):
            return False
        # Nothing can be broadcast to more along an axis that is longer than 1.
        settled = [each for each in operands if each.shape == result.shape and 1 not in each.shape]
        return any(not self.origins.is_ragged((each,)) for each in settled)

    def _constant_result(self, function: Call, args: Args, kwargs: Kwargs) -> Any:
        """Record a tensor as a constant that is made of numbers unseen by the graph, as in NumPy arrays.

        If sizes are among these numbers, the graph will check that they are the same.
        """
        note_fixed(leaves((args, kwargs)), self.session)
        result = self.run(function, args, kwargs)
        for tensor in tensors(result):
            self.origins.constant(tensor)
        return result

    def _number(self, name: str, result: Any, step: Step) -> Any:
        """Handle a result without tensors; refuse one that depends on the numbers in tensors.

        A single number that follows from sizes stays a computation in the graph; for several, the graph will
        check that they are the same.
        """
        if step.target is torch._assert and not is_data(step.args[0]):
            return result
        if step.target is TRUTH and isinstance(step.args[0], bool):
            # The check was added where that was read.
            return result
        if result is NotImplemented:
            # Python then compares a tensor with None, or a text, by identity.
            return result
        if result is None and step.op == "call_function":
            self.steps.append(step)
            return result
        data = [value for value in all_values((step.args, step.kwargs)) if is_data(value)]
        followed = self.findings.follows_ragged and not any(map(is_drawn, data))
        if data and followed and name == "item" and type(result) in (int, float):
            # Sizes may follow from it, and decide no more than those of what a mask selects. Training changes
            # parameters and buffers, too.
            step.data, step.varies, step.ragged, step.sized = False, True, True, True
            return self._read(result, self._added(step), name)
        if data:
            raise NumberReadError(reads(data[0], f"uses the numbers in a tensor ({name})"), result)
        if not step.varies:
            return result
        if isinstance(result, np.ndarray):
            self.checks.decided(Expr(operator.eq, (Expr("tolist", (self._added(step),)), result.tolist())))
        elif name == "item" and isinstance(result, bool):
            self.checks.decided(Expr(operator.ne if result else operator.eq, (step.args[0], 0)), check=TRUTH)
        elif name == "item":
            return self._read(result, self._added(step), name)
        elif isinstance(result, bool | int | float | complex | list):
            self.checks.decided(Expr(operator.eq, (self._added(step), result)))
        return result

    def _added(self, step: Step) -> Step:
        self.steps.append(step)
        return step

    @contextmanager
    def entered(self, path: str, module: nn.Module, told: Sequence[Any]) -> Generator[None, None, None]:
        """Attribute the steps inside the block to a call of this module, which is ``told`` something."""
        self._calls[path] += 1
        outer, self.scope = self.scope, Scope(path, self._calls[path], self.scope)
        self.scopes[self.scope] = tuple(
            plain(each) for each in told if isinstance(each, bool | int | float | str)
        )
        inside = self._looked_into(module)
        # What was replaced so far, the caller has replaced.
        self.rebinding.note(inside, outer)
        before = self._parts_of(inside)
        try:
            yield
            self._leave(module, before)
        finally:
            self.scope = outer

    def _leave(self, module: nn.Module, parts: Mapping[Any, object]) -> None:
        """Look for what a module did other than by torch functions, and record or refuse it.

        Args:
            module: the module.
            parts: what `_parts_of` it was before.
        """
        inside = self._looked_into(module)
        now = self._parts_of(inside)
        new = next((name for place, name in now if (place, name) not in parts), None)
        if new is not None:
            why = f"adds a part {new} in its forward, which a run before tracing would have added"
            raise UnrecordableError(why, Whole(self.scope.path))
        other = next(
            (name for (place, name), part in parts.items() if now.get((place, name)) is not part), None
        )
        if other is not None:
            why = f"takes out or replaces its parameter or layer {other} in its forward"
            raise UnrecordableError(why, Whole(self.scope.path))
        self.rebinding.note(inside, self.scope)
        self.check_drawn()

    def _looked_into(self, module: nn.Module) -> list[nn.Module]:
        """A module and all in it but the parts that are kept whole: what these hold is their own affair."""
        found, left = dict.fromkeys([module]), [module]
        while left:
            inner = [
                part
                for part in left.pop()._modules.values()
                if part is not None
                and part not in found
                and Whole(self.paths.get(id(part), "")) not in self.findings.opaque
            ]
            found |= dict.fromkeys(inner)
            left += inner
        return list(found)

    def _parts_of(self, modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], object]:
        """All parameters and modules that some modules hold, by what holds them and their names there."""
        return {
            (holder, name): part
            for holder in modules
            for held in (holder._parameters, holder._modules)
            for name, part in held.items()
        }

    def check_drawn(self) -> None:
        """Refuse what the current module itself has drawn so far from other generators than torch's."""
        if self.watch.has_drawn_outside():
            raise UnrecordableError(DRAWS_OUTSIDE, Whole(self.scope.path))

    def finish(self, result: Any) -> Recording:
        """The recording of the run, which has returned ``result``."""
        self.failures.check()
        self._leave(self.model, self._before)
        self.rebinding.overwrite(self.model.modules())
        unfollowed = self.dtypes.unfollowed
        if self.findings.holds_dtypes:
            self.decisions.hold_unfollowed(unfollowed)
        output = self.parts.returned(self.arguments.output(result))
        self.leavings.settle()
        self.findings.sizes.read |= self.parts.settle(self.steps, output)
        unseen = tuple(self.origins.unseen)
        return Recording(
            tuple(self.steps),
            output,
            self.scopes,
            flags={path: frozenset(read) for path, read in self.flags.items()},
            asks_mode=self.asks_mode,
            asks_rank=self.asks_rank,
            unseen=unseen,
            uses_threads=self.uses_threads,
            draws=tuple(self.branches.draws),
            asked=tuple(self.branches.asked),
            unfollowed=tuple(line for line, _, _ in unfollowed),
        )

    @property
    def inside(self) -> bool:
        """Whether what happens now is no step of its own: a part of one, or the work of another thread."""
        return self._inside or threading.get_ident() != self._thread

    @contextmanager
    def silent(self) -> Generator[None, None, None]:
        """Record nothing inside the block."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def recomputing(self) -> Generator[None, None, None]:
        """Note that a call of `torch.utils.checkpoint` recomputes the steps inside the block in backward."""
        before = self._recomputed
        if not before:
            self._checkpoints += 1
            self._recomputed = self._checkpoints
        try:
            yield
        finally:
            self._recomputed = before

    def _by_tensors(self, index: Any) -> Any:
        """An index with constants in the place of NumPy's arrays."""
        if isinstance(index, tuple):
            return tuple(map(self._by_tensors, index))
        if type(index) is not np.ndarray:
            return index
        with self.silent():
            table = torch.from_numpy(index.copy())
        self.origins.constant(table)
        return table

    def _as_list(self, data: Any) -> Any:
        """Numbers for a new tensor, which become constants: a list in the place of NumPy's array."""
        if type(data) is not np.ndarray:
            return data
        self.check_drawn()
        return data.tolist()

    def step(self, op: str, target: Any, args: Args, kwargs: Mapping[str, Any]) -> Step:
        """A step with its arguments encoded as values; it is not yet part of the recording."""
        dtypes = self.dtypes.followed(args, dict(kwargs), len(self.steps))
        if not dtypes:
            self.decisions.note_kept(self.dtypes.kept(args, dict(kwargs)))
        encoded = tuple(self._encode(arg, dtypes) for arg in args)
        named = {key: self._encode(arg, dtypes) for key, arg in kwargs.items()}
        self.dtypes.given()
        step = Step(op, target, encoded, named, self.scope, source_line(), recomputed=self._recomputed)
        step.tried = is_tried()
        return step

    def _encode(self, arg: Any, dtypes: Mapping[torch.dtype, Expr]) -> Any:
        followed = dtypes.get(arg) if isinstance(arg, torch.dtype) else None
        return self.arguments.encode(arg) if followed is None else followed

    def run(self, call: Call, args: Args, kwargs: Mapping[str, Any]) -> Any:
        """Call with plain numbers in the place of live ones, without recording it."""
        with self.silent(), self.watch.watching(), compiling(False):
            return call(*self.handed(args), **self.handed(dict(kwargs)))

    def handed(self, arguments: Any) -> Any:
        """Arguments as a call gets them: with nothing that is live."""
        return stripped(arguments, self.origins.original)

    def live(self, number: Any, call: str, *args: Any) -> Any:
        """The number with the method call that computes it in the graph."""
        return self._read(number, Expr(call, args), call, *args[1:])

    def _read(self, number: Any, value: Value, call: str, axis: int = 0) -> Any:
        """The number that the model reads of a tensor, with the expression that reads it."""
        decoy = self.session.decoy
        asks = decoy is not None or bool(self.findings.insisted)
        if asks and not self.inside and self.checks.may_differ(value):
            place = Place(source_line(), call, axis)
            if place in self.findings.insisted:
                self.checks.insist(value, number)
            elif decoy is not None:
                decoy.meet(place, value)
        return live(number, value, self.session)

    def returned(self, number: Any, step: Step, place: int) -> Any:
        """A number that code which is not looked into returns, with the step that reads it of the result."""
        return self._read(number, step, "returned", place)

    def run_and_compare(
        self, call: Call, args: Args, kwargs: Kwargs, step: Step, operands: list[torch.Tensor]
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Run a step, note in it what its operations did, and return the result and the changed operands."""
        versions = [version_of(tensor) for tensor in operands]
        whole = step.op == "call_module" or bool(step.reason)
        try:
            result = self.run(call, args, kwargs)
        except (RuntimeError, IndexError, ValueError) as err:
            if step.tried and (whole or self.run(functions.fails_by_numbers, (call, args, kwargs), {})):
                self.guarded(_refuse_failing, type(err).__name__)
            self._failed(operands)
            raise
        if isinstance(call, Apply) and self.watch.read_numbers:
            raise UnrecordableError(f"looks at numbers in the autograd function {call.__name__}")
        values = all_values((step.args, step.kwargs))
        step.random, step.updates = self.watch.random, self.watch.updates
        step.uses = self.watch.used() if step.reason else frozenset()
        step.data = whole or step.random or any(is_data(value) or is_read(value) for value in values)
        step.ragged = self.watch.ragged or any(is_ragged(value) for value in values)
        step.varies = any(varies(value) for value in values)
        pairs = zip(operands, versions, strict=True)
        return result, tuple(tensor for tensor, before in pairs if version_of(tensor) != before)

    def _failed(self, operands: Sequence[torch.Tensor]) -> None:
        """Add checks of the sizes with which an operation fails, for the model may go on with something else.

        Those that make no difference, such as that of the batch, are waived later.
        """
        self.session.compared = self.findings.sizes.read = True
        for tensor in operands:
            value = self.origins.value(tensor)
            for axis, size in enumerate(self.run(torch.Tensor.size, (tensor,), {})):
                self.checks.decided(Expr(operator.eq, (Expr("size", (value, axis)), size)))

    def commit(self, step: Step, result: Any, changed: tuple[torch.Tensor, ...]) -> Any:
        """Add a step that has run, and return its result as the model's code gets it."""
        if any(tensor.is_nested for tensor in tensors(result)):
            raise UnrecordableError("makes a nested tensor, whose rows differ in length")
        self._note_kind(step, result)
        if says(step):
            self.branches.empty(result)
        self.steps.append(step)
        if self.session.decoy is not None and len(self.steps) > self.session.decoy.most:
            raise TooLongError
        step.changes = tuple(self.origins.value(tensor) for tensor in changed)
        for tensor in changed:
            returned = any(tensor is part for part in tensors(result))
            step.observed |= self.origins.change(tensor, step, returned)
        return self.origins.adopt(result, step, changed)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided and not tensor.requires_grad:
            return self.run(torch.Tensor.detach, (tensor,), {})
        return self.run(torch.Tensor.view_as, (tensor, tensor), {})

    def _another(self, tensor: torch.Tensor, detached: bool) -> Value:
        if detached:
            made = self.function(torch.Tensor.detach, (tensor,), {})
        else:
            made = self.function(torch.Tensor.view_as, (tensor, tensor), {})
        return self.origins.value(made)


def _refuse(why: str) -> NoReturn:
    raise UnrecordableError(why)


def _refuse_failing(error: str) -> NoReturn:
    raise NumberReadError(f"goes on where the numbers in a tensor raise a {error}", None)
