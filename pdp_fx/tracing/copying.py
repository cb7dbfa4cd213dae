"""Copying models, also those that hold results of their last forward."""

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pdp_fx.errors import StateError
from pdp_fx.tracing.replacing import ALONE, replaced

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model, shares: bool = False) -> Model:
    """A deep copy, in which results of the last forward that hooks may have stored are detached.

    Args:
        model: the model.
        shares: whether the copy has the parameters and buffers of the model itself.

    Raises:
        StateError: the model cannot be copied.
    """
    deepcopy = Tensor.__deepcopy__

    def without_history(tensor: Tensor, memo: Any) -> Any:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            return memo.setdefault(id(tensor), tensor.detach().clone())
        if tensor.is_leaf:
            return deepcopy(tensor, memo)
        detached = tensor.detach()
        # The memo goes by the identity of what was copied, which another may have once this one is gone.
        memo.setdefault(id(memo), []).append(detached)
        return deepcopy(detached, memo)

    memo = _empty_tables(model)
    if shares:
        memo |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        with ALONE, replaced(Tensor, "__deepcopy__", without_history):
            made = copy.deepcopy(model, memo)
    except Exception as err:
        raise StateError(f"the model cannot be copied: {type(err).__name__}: {err}") from err
    # Every graph module has a class of its own, whose name deepcopy forgets.
    type(made).__name__ = type(model).__name__
    return made


def _empty_tables(model: nn.Module) -> dict[int, Any]:
    """A memo for deepcopy with the empty tables of all modules, a dozen each, whose copying takes long."""
    tables = [value for module in model.modules() for value in vars(module).values()]
    empty = [table for table in tables if type(table) is OrderedDict and not table]
    return {id(table): OrderedDict[str, Any]() for table in empty}
