"""Intercepting what a model does while it runs, and passing it to a recorder.

Torch functions are seen by a function mode; everything else is seen by replacing functions and methods of
torch and Python for the time of the run.
"""

import builtins
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn import functional
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from pdp_fx.tracing.applies import with_apply
from pdp_fx.tracing.arguments import stripped
from pdp_fx.tracing.autocasts import recording_autocast
from pdp_fx.tracing.calls import run_function, run_method, run_module
from pdp_fx.tracing.casts import casting
from pdp_fx.tracing.chances import following_numbers
from pdp_fx.tracing.compiling import LOOKS_AT_MASK
from pdp_fx.tracing.expressions import is_tried
from pdp_fx.tracing.gradients import SET_GRADIENTS, gradient_blocks
from pdp_fx.tracing.memories import without_memory
from pdp_fx.tracing.objects import apply_of, subclass_of
from pdp_fx.tracing.processes import noting_processes
from pdp_fx.tracing.reads import called, check, hold_ranks
from pdp_fx.tracing.recomputing import noting_recomputed, run_recomputed
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import entries, replaced
from pdp_fx.tracing.settings import is_users_question, noting_settings
from pdp_fx.tracing.sizes import is_one
from pdp_fx.tracing.source import source_line, user_frame
from pdp_fx.tracing.steps import Expr, Whole
from pdp_fx.tracing.threads import noting_threads

_READS_NUMBERS = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
)
"""Functions that read many numbers at once, which a dispatch mode does not see."""


class _Listener(TorchFunctionMode):
    """Passes every torch function to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__wrapped__", None) is SET_GRADIENTS:
            func = SET_GRADIENTS
        weight = _weight_not_passed() if func is functional.l1_loss else None
        if weight is not None:
            with nullcontext() if self.recorder.inside else self:
                return _unfolded(func)(*args, **(kwargs or {}), weight=weight)
        if self.recorder.inside:
            self.recorder.watch.read_numbers |= func in _READS_NUMBERS
            return func(*args, **(kwargs or {}))
        for kind in types:
            if _overrides(kind):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs or {})
        return self.recorder.guarded(called, self.recorder, func, args, kwargs or {})


def _overrides(kind: type) -> bool:
    """Whether this is a class of the model's that is no tensor and says what torch functions do with it."""
    return not issubclass(kind, torch.Tensor) and inspect.ismethod(kind.__torch_function__)


def _weight_not_passed() -> torch.Tensor | None:
    """The weight that the innermost call of ``l1_loss`` was given, which it passes to no function mode."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    return frame and frame.f_locals["weight"]


class _IfCaught:
    """Whether a distribution checks its numbers: they only decide about errors, which the model may catch."""

    def __init__(self, checks: bool) -> None:
        self.checks = checks

    def __get__(self, distribution: Distribution | None, kind: type[Distribution]) -> bool:
        return self.checks and is_tried()


@contextmanager
def listening(recorder: Recorder) -> Generator[None, None, None]:
    """Pass all that the model does inside the block to the recorder."""
    # The import of torch.compile, which a function mode triggers, stores references to functions; it has to
    # happen before any are replaced.
    importlib.import_module("torch._dynamo")
    attention = _unfolded(functional.multi_head_attention_forward)
    with (
        without_memory(recorder),
        following_numbers(recorder),
        replaced(builtins, "len", _length(recorder)),
        replaced(torch, "broadcast_shapes", _broadcast(recorder)),
        replaced(torch.compiler, "is_compiling", _is_compiling(recorder)),
        replaced(transformer, LOOKS_AT_MASK, _looks_at_mask(recorder)),
        replaced(torch, "_check_tensor_all_with", _check_all(recorder)),
        replaced(Distribution, "_validate_args", _IfCaught(Distribution._validate_args)),
        replaced(functional, "multi_head_attention_forward", attention),
        _unlisted_calls(recorder),
        recording_autocast(recorder),
        noting_recomputed(recorder),
        _methods_whole(recorder),
        casting(recorder),
        gradient_blocks(recorder),
        noting_threads(recorder),
        _questions(recorder),
        recorder.watch,
        _Listener(recorder),
    ):
        yield


@contextmanager
def _questions(recorder: Recorder) -> Generator[None, None, None]:
    """Note what the model asks about where it runs."""
    with noting_settings(recorder), noting_processes(recorder):
        yield


@contextmanager
def _unlisted_calls(recorder: Recorder) -> Generator[None, None, None]:
    """Pass to the recorder what torch passes to no function mode."""
    with (
        replaced(nn.Module, "__call__", _module_call(recorder)),
        replaced(nn.Module, "train", _train(recorder)),
        replaced(nn.Module, "to", _to(recorder)),
        replaced(torch.Tensor, "as_subclass", _as_subclass(recorder)),
        with_apply(recorder.model, _function_apply(recorder)),
    ):
        yield


def _module_call(recorder: Recorder) -> Callable[..., Any]:
    call = nn.Module.__call__

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.inside:
            return call(module, *args, **kwargs)
        return recorder.guarded(run_module, recorder, module, call, args, kwargs)

    return module_call


def _train(recorder: Recorder) -> Callable[..., Any]:
    train = nn.Module.train

    def set_mode(module: nn.Module, mode: bool = True) -> nn.Module:
        if not recorder.inside and any(part.training != mode for part in module.modules()):
            path = recorder.paths.get(id(module), "")
            name = f"module {path!r}" if path else "itself"
            if not mode and path:
                recorder.note_in_eval(module)
            recorder.refuse(f"puts {name} into {'training' if mode else 'eval'} mode as it runs")
        return train(module, mode)

    return set_mode


def _to(recorder: Recorder) -> Callable[..., nn.Module]:
    move = nn.Module.to
    parse: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]

    def to(module: nn.Module, *told: Any, **options: Any) -> nn.Module:
        """Cast or move a module; where one of the model is what it is to be, the graph checks that."""
        by_tensor = any(isinstance(each, torch.Tensor) for each in (*told, *options.values()))
        if recorder.inside or by_tensor or id(module) not in recorder.paths:
            return move(module, *told, **options)
        device, dtype, _, layout = parse(*told, **options)
        held = [*module.parameters(), *module.buffers()]
        with recorder.silent():
            cast = [] if dtype is None else [tensor for tensor in held if tensor.is_floating_point()]
            moves = device is not None and any(tensor.to(device) is not tensor for tensor in held)
            stays = layout is None and not moves and all(tensor.dtype == dtype for tensor in cast)
        if not stays:
            return move(module, *told, **options)
        message = (
            f"{source_line()} casts a layer to {dtype}, which it has in this graph; "
            "cast the model before it is traced"
        )
        for tensor in cast:
            recorder.checks.hold(Expr(getattr, (recorder.origins.value(tensor), "dtype")), dtype, message)
        return module

    return to


def _as_subclass(recorder: Recorder) -> Callable[..., torch.Tensor]:
    convert = torch.Tensor.as_subclass

    def as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
        if recorder.inside:
            return convert(tensor, cls)
        return recorder.guarded(recorder.function, subclass_of(cls), (tensor,), {})

    return as_subclass


def _function_apply(recorder: Recorder) -> Callable[..., Any]:
    apply = inspect.getattr_static(torch.autograd.Function, "apply")

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.inside:
            return apply.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            return run_recomputed(recorder, args)
        return recorder.guarded(recorder.function, apply_of(cls), args, {})

    return function_apply


def _length(recorder: Recorder) -> Callable[[Any], int]:
    count = builtins.len

    def length(thing: Any) -> int:
        """The length of a tensor as a live number; Python's `len` returns a plain one."""
        if isinstance(thing, torch.Size) and not recorder.inside and is_users_question():
            hold_ranks(recorder)
        if recorder.inside or not isinstance(thing, torch.Tensor) or not thing.ndim:
            return count(thing)
        return thing.size(0)

    return length


def _broadcast(recorder: Recorder) -> Callable[..., torch.Size]:
    broadcast_now = torch.broadcast_shapes

    def broadcast_shapes(*shapes: Any) -> torch.Size:
        """The shape to which tensors of these are broadcast, whose sizes are those that are not 1."""
        found = broadcast_now(*map(stripped, shapes))
        if recorder.inside:
            return found
        given = [(shape,) if isinstance(shape, int) else tuple(shape) for shape in shapes]
        columns = ([shape[axis] for shape in given if len(shape) >= -axis] for axis in range(-len(found), 0))
        # Every size is asked for, since it may be another one that is 1 at the next call.
        asked = [[(is_one(size), size) for size in column] for column in columns]
        return torch.Size([next((size for one, size in column if not one), column[0][1]) for column in asked])

    return broadcast_shapes


def _check_all(recorder: Recorder) -> Callable[..., None]:
    check_all_now = torch._check_tensor_all_with

    def check_all(error_type: type[Exception], cond: torch.Tensor, message: Any = None) -> None:
        if recorder.inside:
            check_all_now(error_type, cond, message)
        else:
            recorder.guarded(check, recorder, torch.all(cond))

    return check_all


def _is_compiling(recorder: Recorder) -> Callable[[], bool]:
    compiling_now = torch.compiler.is_compiling

    def is_compiling() -> bool:
        caller = sys._getframe(1)
        recorder.findings.asked |= user_frame(caller) is caller
        return compiling_now()

    return is_compiling


def _looks_at_mask(recorder: Recorder) -> Callable[..., bool]:
    looks_now = getattr(transformer, LOOKS_AT_MASK)

    def looks(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        recorder.findings.asked |= mask is not None and is_causal is None
        return looks_now(mask, is_causal, size)

    return looks


@contextmanager
def _methods_whole(recorder: Recorder) -> Generator[None, None, None]:
    """Replace the methods and functions that are kept whole, so that their calls go to the recorder."""
    with ExitStack() as stack:
        for whole in recorder.findings.opaque:
            if whole.holder is not None:
                call = _function_call(recorder, whole)
                for owner, name in _references(recorder.model, whole):
                    stack.enter_context(replaced(owner, name, call))
            elif whole.method:
                module = recorder.model.get_submodule(whole.path)
                call = _method_call(recorder, whole, module)
                stack.enter_context(entries([(vars(module), whole.method, call)]))
        yield


def _method_call(recorder: Recorder, whole: Whole, module: nn.Module) -> Callable[..., Any]:
    method = getattr(module, whole.method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside:
            return method(*args, **kwargs)
        return recorder.guarded(run_method, recorder, whole, method, args, kwargs)

    return call


def _references(model: nn.Module, whole: Whole) -> list[tuple[Any, str]]:
    """Where a function is looked up: its Python module or class, and attributes of the model's modules."""
    function = getattr(whole.holder, whole.method)
    kept = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if value is function
    ]
    return [(whole.holder, whole.method), *kept]


def _function_call(recorder: Recorder, whole: Whole) -> Callable[..., Any]:
    function = getattr(whole.holder, whole.method)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside:
            return function(*args, **kwargs)
        return recorder.guarded(run_function, recorder, whole, function, args, kwargs)

    return call


def _unfolded(function: Any) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not dispatch itself: the calls inside it are seen."""
    passed = dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), _none_overrides)
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **passed},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _none_overrides(*tensors: Any) -> bool:
    return False
