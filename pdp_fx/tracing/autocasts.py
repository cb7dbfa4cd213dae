"""Blocks of autocast in a model, as steps of its graph.

A block for the device that a tensor is on, as in ``torch.autocast(x.device.type, enabled=False)``, is one for
the device that the model was moved to, and the dtype of a block that names none is that device's.
"""

from __future__ import annotations

import ast
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from pdp_fx.tracing.expressions import expression_at
from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import replaced
from pdp_fx.tracing.source import user_frame
from pdp_fx.tracing.steps import Expr, Step


class _Told(NamedTuple):
    """What the code tells a block: whether its device is computed; if it names a dtype, and what to keep."""

    computed: bool = False
    dtype: bool = True
    cache: bool = True


@contextmanager
def recording_autocast(recorder: Recorder) -> Generator[None, None, None]:
    """Record where blocks of autocast begin and end."""
    make, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__
    told, begun = WeakKeyDictionary[torch.autocast, _Told](), dict[int, Step]()

    def autocast_init(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        named = dict(zip(("device_type", "dtype", "enabled", "cache_enabled"), args, strict=False)) | kwargs
        says = (named.get(name) is not None for name in ("dtype", "cache_enabled"))
        told[self] = _Told(type(self) is torch.autocast and _computes_device(), *says)

    def autocast_enter(self: torch.autocast) -> Any:
        if not recorder.inside:
            begun[id(self)] = _enter(recorder, self, told.get(self, _Told()))
        return enter(self)

    def autocast_exit(self: torch.autocast, *args: Any) -> Any:
        if id(self) in begun and not recorder.inside:
            step = recorder.step("call_function", torch.amp.autocast_mode._exit_autocast, (), {})
            step.args = (begun.pop(id(self)),)
            recorder.steps.append(step)
        return leave(self, *args)

    with (
        replaced(torch.autocast, "__init__", autocast_init),
        replaced(torch.autocast, "__enter__", autocast_enter),
        replaced(torch.autocast, "__exit__", autocast_exit),
    ):
        yield


def _enter(recorder: Recorder, context: torch.autocast, told: _Told) -> Step:
    dtype = context.fast_dtype if context._enabled and told.dtype else None
    cache = context._cache_enabled if told.cache else None
    args = (context.device, dtype, context._enabled, cache)
    step = recorder.step("call_function", torch.amp.autocast_mode._enter_autocast, args, {})
    if told.computed and recorder.placed is not None and recorder.placed[1].type == context.device:
        device = Expr(getattr, (Expr(getattr, (recorder.placed[0], "device")), "type"))
        step.args = (device, *step.args[1:])
    recorder.steps.append(step)
    return step


def _computes_device() -> bool:
    """Whether the call of `torch.autocast` in the model's code is given a device other than by its name."""
    frame = user_frame()
    located = None if frame is None else expression_at(frame)
    if located is None or not isinstance(located.node, ast.Call):
        return False
    call = located.node
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "device_type"), None)
    device = call.args[0] if call.args else named
    return device is not None and not isinstance(device, ast.Constant)
