"""Recording one run of a model as steps.

The recorder is told of every torch function and every module call (`intercept.py` does the listening). It knows each
tensor by identity: a parameter or buffer by its name, a computed tensor by the step that made it. What it cannot
express raises `UnrecordableError`, which names the innermost module around; the caller keeps that module whole and
records again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pdp_fx.tracing import functions
from pdp_fx.tracing.compiling import compiling
from pdp_fx.tracing.expressions import only_checks
from pdp_fx.tracing.leaves import is_whole
from pdp_fx.tracing.objects import Build
from pdp_fx.tracing.preserve import generator_states
from pdp_fx.tracing.sizes import Live, Session, live, plain, value_of
from pdp_fx.tracing.source import source_line, user_frame
from pdp_fx.tracing.steps import (
    Attribute,
    Constant,
    Expr,
    Scope,
    Step,
    UnrecordableError,
    Value,
    is_data,
    is_ragged,
    root,
)
from pdp_fx.tracing.structure import (
    BASE_TYPES,
    as_base,
    children,
    has_tensors,
    is_namedtuple,
    is_record,
    record_fields,
    tensors,
)
from pdp_fx.tracing.watch import Watch, storage_of


class Recorder:
    """The steps of one run so far, and where each tensor came from.

    Args:
        model: the model that runs.
        opaque: paths of modules to keep whole, each with the reason.
    """

    def __init__(self, model: nn.Module, opaque: Mapping[str, str]) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        named = (*model.named_parameters(), *model.named_buffers())
        self.attributes = {id(tensor): Attribute(path) for path, tensor in named}
        self.opaque = opaque
        self.session = Session()
        self.steps: list[Step] = []
        self.scope = Scope("")
        self.scopes = {self.scope}
        self.inside = False
        self.failure: UnrecordableError | None = None
        self._autocasts: dict[int, Step] = {}
        self.watch = Watch(tensor for _, tensor in named)
        self._calls: Counter[str] = Counter()
        self._values = WeakTensorKeyDictionary()
        self._aliases: dict[int, list[TensorWeakRef]] = {}
        self._constants: dict[int, Constant] = {}
        self._objects: dict[int, tuple[Any, Value, tuple[int, ...]]] = {}
        self._devices: dict[int, tuple[torch.device, Value]] = {}

    def placeholder(self, name: str, example: Any, default: tuple[Any, ...] = ()) -> tuple[Step, Any]:
        """Add an input of the model; returns its step and the example to run with."""
        step = Step("placeholder", name, default, {}, self.scope, "")
        self.steps.append(step)
        for tensor in tensors(example):
            self.watch.own(tensor)
        return step, self.adopt(example, step)

    def guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """Act for the model; a refusal is remembered even if the model catches the error."""
        try:
            return act(*args)
        except UnrecordableError as err:
            err.path = self.scope.path if err.path is None else err.path
            self.failure = self.failure or err
            raise

    def enter_autocast(self, context: torch.autocast) -> None:
        """Note that the model changes the autocast state."""
        if self.inside:
            return
        dtype = context.fast_dtype if context._enabled else None
        args = (context.device, dtype, context._enabled, context._cache_enabled)
        step = self.step("call_function", torch.amp.autocast_mode._enter_autocast, args, {})
        self.steps.append(step)
        self._autocasts[id(context)] = step

    def exit_autocast(self, context: torch.autocast) -> None:
        """Note that the model puts the autocast state back."""
        if not self.inside and id(context) in self._autocasts:
            step = self.step("call_function", torch.amp.autocast_mode._exit_autocast, (), {})
            step.args = (self._autocasts.pop(id(context)),)
            self.steps.append(step)

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function and record it, unless it only looks at metadata."""
        name = functions.name_of(function)
        if functions.is_setter(function):
            raise UnrecordableError(f"sets the attribute {name} of a tensor")
        if name in functions.SIZES and self._any_ragged(args):
            raise UnrecordableError(f"reads a size that depends on the numbers in a tensor ({name})")
        read = _READS.get(name)
        if read is not None and args and isinstance(args[0], torch.Tensor):
            return read(self, *args, **kwargs)
        if name in functions.METADATA and not (name == "type" and len(args) > 1):
            return self.run(function, args, kwargs)
        return self._record_function(name, function, args, kwargs)

    def _record_function(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        op, target, shown = functions.in_graph_form(function, args, kwargs)
        try:
            step = self.step(op, target, shown, kwargs)
        except UnrecordableError:
            if has_tensors((args, kwargs)):
                raise
            return self._constant_result(function, args, kwargs)
        operands = list(tensors((args, kwargs)))
        versions = [tensor._version for tensor in operands]
        result = self.run(function, args, kwargs, step)
        changed = [t for t, before in zip(operands, versions, strict=True) if t._version != before]
        if functions.is_in_place(name) and operands and not changed:
            changed = operands[:1]
        if not has_tensors(result) and not changed:
            return self._number(name, result, step)
        return self._commit(step, result, changed)

    def _constant_result(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor made of numbers that the graph does not see, such as a numpy array."""
        result = self.run(function, args, kwargs)
        for tensor in tensors(result):
            self._constants[id(tensor)] = Constant(tensor)
        return result

    def _number(self, name: str, result: Any, step: Step) -> Any:
        """A result without tensors: fine unless it tells something about numbers that may change."""
        if step.target is torch._assert and not is_data(step.args[0]):
            return result
        if result is None and step.op == "call_function":
            self.steps.append(step)
            return result
        if step.data and any(is_data(v) for v in (*step.args, *step.kwargs.values())):
            raise UnrecordableError(f"uses the numbers in a tensor ({name})")
        return result

    def module(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module: a leaf or an opaque one becomes one step, any other is traced through."""
        path = self.paths.get(id(module), "")
        if not path:
            return call(module, *args, **kwargs)
        if is_whole(module) or path in self.opaque:
            with self._silent():
                return self._leaf(path, module, call, args, kwargs)
        with self._entered(path):
            return call(module, *args, **kwargs)

    @contextmanager
    def _entered(self, path: str) -> Iterator[None]:
        self._calls[path] += 1
        outer, self.scope = self.scope, Scope(path, self._calls[path], self.scope)
        self.scopes.add(self.scope)
        before = generator_states()
        try:
            yield
            if generator_states() != before:
                raise UnrecordableError("draws random numbers outside torch", path)
        finally:
            self.scope = outer

    def _leaf(
        self, path: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        step = self.step("call_module", path, args, kwargs)
        step.reason = self.opaque.get(path, "")
        operands = list(tensors((args, kwargs)))
        versions = [tensor._version for tensor in operands]
        result = self.run(call, (module, *args), kwargs, step)
        changed = [t for t, before in zip(operands, versions, strict=True) if t._version != before]
        if self.watch.read_numbers and _has_numbers(result):
            raise UnrecordableError(f"gets a number from {path} that depends on numbers in a tensor")
        return self._commit(step, result, changed)

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """What happens inside the block is not recorded."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def step(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        """A step with its arguments written as values; not yet part of the recording."""
        encoded = tuple(self.encode(arg) for arg in args)
        named = {key: self.encode(arg) for key, arg in kwargs.items()}
        return Step(op, target, encoded, named, self.scope, source_line())

    def run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], step: Step | None = None
    ) -> Any:
        """Call with plain numbers, unrecorded, noting in the step what the call did underneath."""
        with self._silent(), self.watch.watching() as watch, compiling(False):
            result = call(*_stripped(args), **_stripped(dict(kwargs)))
        if step is not None:
            operands = [*_leaves(step.args), *_leaves(step.kwargs)]
            step.random = watch.random
            step.data = step.op == "call_module" or watch.random or any(is_data(v) for v in operands)
            step.ragged = watch.ragged or any(is_ragged(v) for v in operands)
        return result

    def _commit(self, step: Step, result: Any, changed: list[torch.Tensor]) -> Any:
        self.steps.append(step)
        step.changes = tuple(self.value(tensor) for tensor in changed)
        step.observed = any(self._is_seen_elsewhere(tensor) for tensor in changed)
        if step.ragged and isinstance(result, tuple | list) and step.target in ("unbind", torch.unbind):
            raise UnrecordableError("loops over a tensor whose size depends on numbers")
        for tensor in changed:
            self._note_change(tensor, step)
            if id(tensor) not in self.attributes and any(tensor is part for part in tensors(result)):
                self._values[tensor] = step
        return self.adopt(result, step, changed)

    def _note_change(self, tensor: torch.Tensor, step: Step) -> None:
        """What is written into a tensor is also in its views, and in what it is a view of."""
        for owner in (ref() for ref in self._aliases.get(storage_of(tensor), [])):
            maker = root(self._values.get(owner)) if owner is not None else None
            if maker is not None:
                maker.data |= step.data
                maker.ragged |= step.ragged

    def _is_seen_elsewhere(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self.attributes or id(tensor) in self._constants:
            return True
        value = self._values.get(tensor)
        if isinstance(value, Step) and value.op == "placeholder":
            return True
        owners = [ref() for ref in self._aliases.get(storage_of(tensor), [])]
        return any(owner is not None and owner is not tensor for owner in owners)

    def adopt(self, result: Any, value: Value, changed: list[torch.Tensor] | None = None) -> Any:
        """Remember where the tensors in a result come from; returns the result to hand to the model.

        A function that returns its argument unchanged (dropout in eval mode, `contiguous`) must not make the model's
        later uses of the argument look like uses of the result: such a result is replaced by an alias of it.
        """
        if isinstance(result, torch.Tensor):
            return self._adopt_tensor(result, value, changed or [])
        parts = list(children(result)) if not isinstance(result, BASE_TYPES) else []
        if not any(has_tensors(part) for _, _, part in parts):
            return result
        adopted: dict[Any, Any] = {}
        for kind, key, part in parts:
            reach = getattr if kind == "attribute" else _getitem
            adopted[key] = self.adopt(part, Expr(reach, (value, key)), changed)
        if isinstance(result, list | dict):
            for key, part in adopted.items():
                result[key] = part
        elif type(result) is tuple:
            result = tuple(adopted.values())
        maker = root(value)
        if maker is not None and maker.op in ("placeholder", "call_module"):
            self._objects[id(result)] = (result, value, _fingerprint(result))
        return result

    def _adopt_tensor(self, tensor: torch.Tensor, value: Value, changed: list[torch.Tensor]) -> torch.Tensor:
        if any(tensor is other for other in changed):
            return tensor
        if tensor in self._values or id(tensor) in self.attributes or id(tensor) in self._constants:
            tensor = self.run(torch.Tensor.view_as, (tensor, tensor), {})
        self._values[tensor] = value
        self._aliases.setdefault(storage_of(tensor), []).append(TensorWeakRef(tensor))
        return tensor

    def value(self, tensor: torch.Tensor) -> Value:
        """Where a tensor comes from."""
        known = self._values.get(tensor) or self.attributes.get(id(tensor)) or self._constants.get(id(tensor))
        if known is not None:
            return known
        if self.watch.is_ours(tensor):
            raise UnrecordableError("uses a tensor made by code that torch functions do not show")
        made = self._constants[id(tensor)] = Constant(tensor)
        return made

    def encode(self, arg: Any) -> Any:
        """An argument with values in the place of tensors and live numbers."""
        if isinstance(arg, torch.Tensor):
            return self.value(arg)
        if isinstance(arg, Live):
            return value_of(arg, self.session)
        if id(arg) in self._devices and self._devices[id(arg)][0] is arg:
            return self._devices[id(arg)][1]
        known = self._objects.get(id(arg))
        if known is not None and known[0] is arg and known[2] == _fingerprint(arg):
            return known[1]
        if isinstance(arg, slice):
            return slice(self.encode(arg.start), self.encode(arg.stop), self.encode(arg.step))
        return self._encode_container(as_base(arg))

    def _encode_container(self, arg: Any) -> Any:
        if isinstance(arg, BASE_TYPES):
            return arg
        if is_namedtuple(arg):
            return type(arg)(*(self.encode(part) for part in arg))
        if isinstance(arg, tuple | list):
            parts = [self.encode(part) for part in arg]
            return parts if isinstance(arg, list) else tuple(parts)
        if is_record(arg):
            return Expr(type(arg), (), {key: self.encode(part) for key, part in record_fields(arg).items()})
        if isinstance(arg, dict):
            parts = {key: self.encode(part) for key, part in arg.items()}
            return parts if type(arg) is dict else Expr(type(arg), (parts,))
        if hasattr(arg, "__dict__") and not callable(arg) and has_tensors(arg):
            return self._build(arg)
        raise UnrecordableError(f"passes a {type(arg).__name__}, which a graph cannot hold")

    def output(self, result: Any) -> Any:
        """What the model returns, written as values; objects of users' classes are taken apart."""
        try:
            return self.encode(result)
        except UnrecordableError:
            if isinstance(result, BASE_TYPES) or callable(result):
                raise
        if is_record(result):
            return Expr(type(result), (), {key: self.output(part) for key, part in record_fields(result).items()})
        if type(result) in (tuple, list):
            return type(result)(self.output(part) for part in result)
        if isinstance(result, dict):
            parts = {key: self.output(part) for key, part in result.items()}
            return parts if type(result) is dict else Expr(type(result), (parts,))
        return self._build(result)

    def _build(self, result: Any) -> Expr:
        if not hasattr(result, "__dict__"):
            raise UnrecordableError(f"returns a {type(result).__name__}, which a graph cannot hold")
        state: dict[str, Any] = {}
        fixed: list[tuple[str, Any]] = []
        for name, part in vars(result).items():
            if callable(part) or isinstance(part, type):
                fixed.append((name, part))
            else:
                state[name] = self.output(part)
        return Expr(Build(type(result), tuple(fixed)), (state,))

    def _any_ragged(self, args: tuple[Any, ...]) -> bool:
        return any(is_ragged(self._values.get(tensor)) for tensor in tensors(args))

    def read_shape(self, tensor: torch.Tensor) -> torch.Size:
        """The sizes of a tensor as live numbers."""
        value = self.value(tensor)
        sizes = self.run(torch.Tensor.size, (tensor,), {})
        return torch.Size([live(n, Expr("size", (value, axis)), self.session) for axis, n in enumerate(sizes)])

    def read_size(self, tensor: torch.Tensor, dim: int | None = None) -> Any:
        """The sizes, or one of them, as live numbers."""
        shape = self.read_shape(tensor)
        return shape if dim is None else shape[dim]

    def read_numel(self, tensor: torch.Tensor) -> Any:
        """The number of elements as a live number."""
        return live(self.run(torch.Tensor.numel, (tensor,), {}), Expr("numel", (self.value(tensor),)), self.session)

    def read_device(self, tensor: torch.Tensor) -> torch.device:
        """The device, remembered by identity, so that the graph still runs when the model moves elsewhere."""
        device = self.run(_device_of, (tensor,), {})
        self._devices[id(device)] = (device, Expr(getattr, (self.value(tensor), "device")))
        return device

    def read_item(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor, which must not depend on data."""
        value = self.value(tensor)
        if is_data(value):
            raise UnrecordableError("uses the number in a tensor (item)")
        return live(self.run(torch.Tensor.item, (tensor,), {}), Expr("item", (value,)), self.session)

    def read_bool(self, tensor: torch.Tensor) -> bool:
        """The truth of a tensor; where it depends on data, only a check may ask for it, and the graph checks too."""
        value = self.run(torch.Tensor.__bool__, (tensor,), {})
        if not is_data(self.value(tensor)):
            return value
        frame = user_frame()
        if frame is None or not only_checks(frame, value):
            raise UnrecordableError("branches on the numbers in a tensor")
        self.check(tensor if value else self.function(torch.logical_not, (tensor,), {}))
        return value

    def check(self, condition: torch.Tensor) -> None:
        """Let the graph fail if a tensor is not true."""
        with self._silent():
            self.function(torch._assert, (condition, f"the check at {source_line()} failed"), {})

    def read_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor.data`, which is `tensor.detach()` to a graph."""
        return self.function(torch.Tensor.detach, (tensor,), {})


_READS: dict[str, Callable[..., Any]] = {
    "shape": Recorder.read_shape,
    "size": Recorder.read_size,
    "numel": Recorder.read_numel,
    "nelement": Recorder.read_numel,
    "device": Recorder.read_device,
    "item": Recorder.read_item,
    "__bool__": Recorder.read_bool,
    "data": Recorder.read_data,
}


def _getitem(container: Any, key: Any) -> Any:
    return container[key]


def _device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def _fingerprint(container: Any) -> tuple[int, ...]:
    return tuple(id(part) for _, _, part in children(container))


def _has_numbers(result: Any) -> bool:
    return any(isinstance(leaf, bool | int | float) for leaf in _leaves(result))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list | dict):
        for _, _, part in children(tree):
            yield from _leaves(part)
    elif isinstance(tree, slice):
        yield from (tree.start, tree.stop, tree.step)
    else:
        yield tree


def _stripped(arg: Any) -> Any:
    """The argument with plain numbers in the place of live ones."""
    if isinstance(arg, Live):
        return plain(arg)
    if isinstance(arg, slice):
        return slice(plain(arg.start), plain(arg.stop), plain(arg.step))
    if not any(isinstance(leaf, Live) for leaf in _leaves(arg)) or isinstance(arg, BASE_TYPES):
        return arg
    if is_namedtuple(arg):
        return type(arg)(*(_stripped(part) for part in arg))
    if isinstance(arg, dict):
        return {key: _stripped(part) for key, part in arg.items()}
    return type(arg)(_stripped(part) for part in arg) if isinstance(arg, tuple | list) else arg
