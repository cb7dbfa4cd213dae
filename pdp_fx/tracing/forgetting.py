"""Running a model with gradients switched on, but without keeping anything for a backward pass.

A model can see whether gradients are on, so they have to be on as they will be in training. The
activations that autograd would keep are several times the memory of the run itself.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from pdp_fx.tracing.preserve import preserved

T = TypeVar("T")


def forgetting(work: Callable[[], T], *models: nn.Module, expected: tuple[type[Exception], ...] = ()) -> T:
    """Do work that runs models, and put them back; where something that was not kept is missed, do it again.

    Args:
        work: what to do; it is done again, in the usual way, only if it ends in an error.
        models: what to put back.
        expected: errors that are results of the work.
    """
    try:
        with preserved(*models), torch.autograd.graph.saved_tensors_hooks(_forget, _miss):
            return work()
    except expected:
        raise
    except Exception:  # noqa: BLE001 a model may call backward, or torch.func, which refuses all hooks
        with preserved(*models):
            return work()


def in_mode(model: nn.Module, training: bool) -> nn.Module:
    """Put a model into a mode by way of training mode: there it lets go of what it has kept for evaluation.

    Tables made of weights are kept that way. Those from before a run would be constants in its graph.
    """
    return model.train().train(training)


def _forget(tensor: torch.Tensor) -> None:
    """Keep nothing."""


def _miss(packed: Any) -> NoReturn:
    raise RuntimeError("what a backward pass would need was not kept")
