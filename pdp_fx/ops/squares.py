"""Sums of squares of whole layers."""

from typing import cast

import torch
from torch import Tensor, nn

from pdp_fx.ops.select import storage_order, transformed
from pdp_fx.ops.threshold import compute_dtype

ROW = 4096


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of all numbers, 0-dim, in `compute_dtype`.

    On a CPU torch adds the squares of float32 numbers up in float32, one by one: those of 2**27 weights drift
    by several percent. Here the norms of rows are taken first, and then the norm of these.

    Args:
        tensor: any shape, dtype and memory format.
    """
    dtype = compute_dtype(tensor.dtype)
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not transformed()
    if not plain or tensor.numel() <= 2 * ROW:
        return _norm(tensor, dtype).square()
    flat = storage_order(tensor)
    rest = flat.numel() % ROW
    rows = flat[: flat.numel() - rest].view(-1, ROW)
    norms = torch.cat([_norm(rows, dtype, 1), _norm(flat[flat.numel() - rest :], dtype).reshape(1)])
    return _norm(norms, dtype).square()


def _norm(tensor: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(tensor, dim=dim, dtype=dtype))
