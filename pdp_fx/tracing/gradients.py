"""Recording blocks that switch gradients off or on, so that the graph restores its caller's setting.

`torch.no_grad` stores on entry whether gradients are on, and restores that on exit. A recording is made with
gradients on, and would restore "on" for every caller; so the setting on entry is read by a node of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.replacing import replaced
from pdp_fx.tracing.sizes import Live, value_of
from pdp_fx.tracing.steps import Step, Value

_BEGINNINGS = (
    (torch.no_grad, "__enter__"),
    (torch.enable_grad, "__enter__"),
    (torch.set_grad_enabled, "__init__"),
)
"""Where each kind of block looks whether gradients are on."""


_ARE_ON, SET_GRADIENTS = torch.is_grad_enabled, torch._C._set_grad_enabled


@contextmanager
def gradient_blocks(recorder: Recorder) -> Generator[None, None, None]:
    """Record what the blocks of a model find on entry, and that they restore it."""
    found: dict[int, Step] = {}
    with ExitStack() as stack:
        for kind, name in _BEGINNINGS:
            stack.enter_context(replaced(kind, name, _begin(recorder, getattr(kind, name), found)))
            stack.enter_context(replaced(kind, "__exit__", _end(recorder, kind.__exit__, found)))
        stack.enter_context(replaced(torch._C, "_set_grad_enabled", _set(recorder)))
        stack.enter_context(replaced(torch.inference_mode, "__enter__", _refused(recorder)))
        yield


def _begin(recorder: Recorder, begin: Callable[..., Any], found: dict[int, Step]) -> Callable[..., Any]:
    def beginning(block: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.inside:
            step = found[id(block)] = recorder.step("call_function", _ARE_ON, (), {})
            recorder.steps.append(step)
        return begin(block, *args, **kwargs)

    return beginning


def _end(recorder: Recorder, end: Callable[..., Any], found: dict[int, Step]) -> Callable[..., Any]:
    def ending(block: Any, *args: Any) -> Any:
        before = found.pop(id(block), None)
        if before is None or recorder.inside:
            return end(block, *args)
        _restore(recorder, before)
        with recorder.silent():
            return end(block, *args)

    return ending


def _set(recorder: Recorder) -> Callable[[Any], None]:
    """What takes the place of the function of torch, for the code of graphs, where no block is left.

    Torch looks its own function up by name to tell of a call, and finds this one, too.
    """

    @functools.wraps(SET_GRADIENTS)
    def setting(mode: Any) -> None:
        if not isinstance(mode, Live):
            SET_GRADIENTS(mode)
            return
        if not recorder.inside:
            _restore(recorder, value_of(mode, recorder.session))
        with recorder.silent():
            SET_GRADIENTS(bool(mode))

    return setting


def _restore(recorder: Recorder, before: Value) -> None:
    """Record that it is as before whether gradients are on."""
    step = recorder.step("call_function", SET_GRADIENTS, (), {})
    step.args = (before,)
    recorder.steps.append(step)


def _refused(recorder: Recorder) -> Callable[..., Any]:
    enter = torch.inference_mode.__enter__

    def entering(block: torch.inference_mode) -> None:
        if recorder.inside:
            enter(block)
        else:
            recorder.refuse("switches inference mode on, where torch.no_grad() would do")

    return entering
