"""Running a model with gradients switched on, but without keeping anything for a backward pass.

A model can see whether gradients are on, so they have to be on as they will be in training. The
activations that autograd would keep are several times the memory of the run itself.
"""

import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from pdp_fx.tracing.preserve import preserved

T = TypeVar("T")

_REFUSED = "saved tensor hooks"
"""What torch.func and its like say that they do not support."""


def forgetting(work: Callable[[], T], *models: nn.Module, expected: tuple[type[Exception], ...] = ()) -> T:
    """Do work that runs models, keep no activations for a backward pass, and restore the models.

    Args:
        work: runs models. If it fails, or needs what was not kept, as one does that calls backward, it is
            done again with activations kept.
        models: the models to restore.
        expected: errors that are results of the work; after them it is not done again, unless it needs what
            was not kept.
    """
    needed = False

    def miss(packed: Any) -> NoReturn:
        nonlocal needed
        needed = True
        raise RuntimeError("what a backward pass would need was not kept")

    try:
        with preserved(*models), checked_indices(), torch.autograd.graph.saved_tensors_hooks(_forget, miss):
            result = _unwound(work)
        # A model may have caught the error.
        if not needed:
            return result
    except expected as err:
        if not needed and _REFUSED not in str(err):
            raise
    except Exception:  # noqa: BLE001 whatever it is, what was not kept may be the cause
        pass
    with preserved(*models), checked_indices():
        return work()


def checked_indices() -> AbstractContextManager[Any]:
    """Have torch check the indices of sparse tensors, which those of a made-up example may exceed."""
    return torch.sparse.check_sparse_tensor_invariants(enable=True)


def _unwound(work: Callable[[], T]) -> T:
    """Do work; if it fails, free what its frames hold.

    A generator that has set hooks, as `torch.utils.checkpoint` has in torch 2.11, takes them back when it is
    freed, and has to do so before those around it are taken back.
    """
    try:
        return work()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


def in_mode(model: nn.Module, training: bool, in_eval: Iterable[str] = ()) -> nn.Module:
    """Put a model into a mode by way of training mode, in which models drop what they cache for evaluation.

    Some cache tables computed from weights; a table from before a run would be a constant in its graph.

    Args:
        model: the model.
        training: the mode.
        in_eval: the paths of modules that are in eval mode all the same.
    """
    model.train()
    model.train(training)
    for path in in_eval:
        model.get_submodule(path).training = False
    return model


def _forget(tensor: torch.Tensor) -> None:
    """Keep nothing."""
