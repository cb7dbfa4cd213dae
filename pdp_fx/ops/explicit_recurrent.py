"""Recurrent torch.nn modules that take their parameters as keyword arguments, by the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)


def _holding(module: Layer, given: Mapping[str, Tensor]) -> Layer:
    """Another object of the module's class that has the given tensors in the place of parameters.

    The module itself stays as it is, for other threads may be calling it.
    """
    made: Layer = object.__new__(type(module))
    vars(made).update(vars(module))
    vars(made)["_parameters"] = {**vars(module)["_parameters"], **given}
    if "_flat_weights" in vars(module):
        names, listed = vars(module)["_flat_weights_names"], vars(module)["_flat_weights"]
        vars(made)["_flat_weights"] = [given.get(n, w) for n, w in zip(names, listed, strict=True)]
    return made


class _Explicit(nn.Module):
    def forward(self, input: Any, hx: Any = None, **given: Tensor) -> Any:
        return super(_Explicit, _holding(self, given)).forward(input, hx)


class ExplicitLSTM(_Explicit, nn.LSTM):
    """`torch.nn.LSTM` with explicit parameters."""


class ExplicitGRU(_Explicit, nn.GRU):
    """`torch.nn.GRU` with explicit parameters."""


class ExplicitRNN(_Explicit, nn.RNN):
    """`torch.nn.RNN` with explicit parameters."""


class ExplicitLSTMCell(_Explicit, nn.LSTMCell):
    """`torch.nn.LSTMCell` with explicit parameters."""


class ExplicitGRUCell(_Explicit, nn.GRUCell):
    """`torch.nn.GRUCell` with explicit parameters."""


class ExplicitRNNCell(_Explicit, nn.RNNCell):
    """`torch.nn.RNNCell` with explicit parameters."""
