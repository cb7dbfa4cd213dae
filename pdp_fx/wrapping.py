"""Wrappers around models, which `prepare` refuses, as `convert` does if they compute anything themselves.

A graph of a wrapped model would leave the wrapper out, and `convert` would lose what it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from pdp_fx.errors import StateError
from pdp_fx.example_inputs import fresh, matching, trial
from pdp_fx.measuring import relative_difference
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.leaves import has_hooks
from pdp_fx.tracing.replacing import ALONE, replaced
from pdp_fx.tracing.structure import tensors

RUNNERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")
"""Classes of torch that run a model on several devices or compiled; by name, since importing some is slow."""

_WRAPPERS = (*RUNNERS, "AveragedModel", "Sequential")
"""Classes of torch that compute what their only child computes."""


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model inside a torch wrapper such as DistributedDataParallel: its graph would leave it out.

    Raises:
        StateError: the model is or holds such a wrapper.
    """
    kinds = [type(part) for part in model.modules()]
    wrappers = [k.__name__ for k in kinds if k.__name__ in RUNNERS and k.__module__.startswith("torch.")]
    if wrappers:
        raise StateError(
            f"the model is wrapped by {wrappers[0]}, and a graph would do without that; prepare the model "
            "itself, and wrap what prepare returns"
        )


def refuse_more_than_wrapped(model: nn.Module, gm: fx.GraphModule, inputs: Inputs | None) -> None:
    """Refuse a wrapper that computes more than the prepared model in it, which convert would lose.

    A wrapper may have one child and, unless it is torch's, no tensors of its own. A wrapper that is not
    torch's, hooks, and a forward that was set on a module must not change the outputs on the example inputs;
    they may turn on autocast.

    Raises:
        StateError: it computes more, as far as this shows.
    """
    whole, known = model, True
    while model is not gm:
        children = list(model.children())
        of_torch = type(model).__module__.startswith("torch.") and type(model).__name__ in _WRAPPERS
        own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        if len(children) != 1 or (own and not of_torch):
            _refuse(model)
        model, known = children[0], known and of_torch and not _changed(model)
    if inputs is None or (known and not _changed(gm)):
        return
    inputs = matching(inputs, gm)
    with _uncast(compiled=type(whole).__name__ == "OptimizedModule" or gm._compiled_call_impl is not None):
        got, wanted = _given(whole, gm, inputs), _given(partial(type(gm).forward, gm), gm, inputs)
    if got is not None and (wanted is None or relative_difference(got, wanted) > 0):
        _refuse(whole)


def _changed(module: nn.Module) -> bool:
    """Whether a module calls more than its class says: hooks, or a forward that was set on it."""
    # What `torch.compile` returns has its own forward there.
    patched = "forward" in vars(module) and type(module).__name__ != "OptimizedModule"
    return patched or has_hooks(module)


@contextmanager
def _uncast(compiled: bool) -> Generator[None, None, None]:
    """Let blocks of autocast in this thread do nothing: they say how a model runs, not what it computes."""
    enter, leave, thread = torch.autocast.__enter__, torch.autocast.__exit__, threading.get_ident()

    def is_here() -> bool:
        return threading.get_ident() == thread

    # A compiled model would not see it, and needs no compiling for one run.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with (
        ALONE,
        replaced(torch.autocast, "__enter__", lambda self: self if is_here() else enter(self)),
        replaced(torch.autocast, "__exit__", lambda self, *err: None if is_here() else leave(self, *err)),
        eager,
    ):
        yield


def _given(call: Callable[..., Any], gm: fx.GraphModule, inputs: Inputs) -> tuple[Tensor, ...] | None:
    """The tensors that ``call``, around ``gm``, returns on the example inputs; None if it fails on them."""
    args, kwargs = fresh(inputs)
    try:
        with trial(gm):
            return tuple(tensors(call(*args, **kwargs)))
    except Exception:  # noqa: BLE001 a wrapper need not take what the model takes
        return None


def _refuse(model: nn.Module) -> NoReturn:
    raise StateError(
        f"{type(model).__name__} holds or does more than a prepared model, as by a hook or another forward, "
        "and convert would lose the rest; call convert on the part that came from prepare, without them, and "
        "give them to what it returns"
    )
