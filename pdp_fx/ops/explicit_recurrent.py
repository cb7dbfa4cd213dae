"""Recurrent torch.nn modules that take their parameters as keyword arguments, by the parameters' names."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def _holding(module: nn.Module, given: Mapping[str, Tensor]) -> Generator[None]:
    """Replace parameters of a module by the given tensors inside the block."""
    table, listed = vars(module)["_parameters"], vars(module).get("_flat_weights")
    vars(module)["_parameters"] = {**table, **given}
    if listed is not None:
        names = vars(module)["_flat_weights_names"]
        vars(module)["_flat_weights"] = [given.get(n, w) for n, w in zip(names, listed, strict=True)]
    try:
        yield
    finally:
        vars(module)["_parameters"] = table
        if listed is not None:
            vars(module)["_flat_weights"] = listed


class _Explicit(nn.Module):
    def forward(self, input: Any, hx: Any = None, **given: Tensor) -> Any:
        with _holding(self, given):
            return super().forward(input, hx)


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
