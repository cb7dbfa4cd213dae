"""Selection and soft masks on a GPU: few launches, and each weight read as rarely as can be.

The thresholds of all layers take ten launches, however many layers there are, and four readings of the
weights: 16 bytes for each float32 weight, where a sort of values with their indices moves some hundred. A
soft mask and its gradient take one launch each: 8 and 12 bytes for each float32 weight. Nothing here waits
for the device.

Where Triton is missing, or does not give on this machine what the formulas in tensor operations give, those
are used instead, and a warning says so once.
"""

import importlib
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pdp_fx.ops.select import transformed
from pdp_fx.ops.threshold import threshold_by_sort

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = 1 << 30
"""Places in a layer are 32-bit numbers in the kernels."""

BLOCK = 1024
BLOCKS = 16
"""How many blocks of weights one program of the selection counts before it adds to the layer's counts."""

ROUNDS = (24, 16, 8, 0)
"""How far to the right each round shifts the bits, to have its eight in front."""

TRIED_TAU = 1e-2


class Table(NamedTuple):
    """Where the weights of some layers are, on their device.

    Attributes:
        key: addresses and sizes, to tell whether the table still holds.
        addresses: (layers,) int64, in bytes.
        sizes: (layers,) int64, in weights.
        layers: (pieces,) int64, the layer of each piece.
        starts: (pieces,) int64, where in its layer each piece begins.
    """

    key: tuple[tuple[int, int], ...]
    addresses: Tensor
    sizes: Tensor
    layers: Tensor
    starts: Tensor


def usable(weight: Tensor) -> bool:
    """Whether the kernels can work on a weight, here and now."""
    if not weight.is_cuda or torch.compiler.is_compiling() or transformed():
        return False
    if type(weight) not in (Tensor, nn.Parameter):
        return False
    fits = weight.dtype in DTYPES and 0 < weight.numel() < MOST and _is_dense(weight)
    return fits and _works(weight.device)


def table(weights: Sequence[Tensor], last: Table | None = None) -> Table:
    """Write down where weights are; ``last`` is given back if it still holds."""
    key = tuple((weight.data_ptr(), weight.numel()) for weight in weights)
    if last is not None and last.key == key:
        return last
    piece = BLOCK * BLOCKS
    pieces = [(layer, start) for layer, (_, size) in enumerate(key) for start in range(0, size, piece)]
    # One copy from pinned memory, for which nothing waits.
    numbers = [
        number for column in (*zip(*key, strict=True), *zip(*pieces, strict=True)) for number in column
    ]
    device = weights[0].device
    there = torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return Table(key, *there.split([len(key), len(key), len(pieces), len(pieces)]))


def thresholds(where: Table, counts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Do `pdp_fx.ops.threshold.threshold` for all layers of a table.

    Args:
        where: the layers, of one device.
        counts: for each layer 0-dim int64, how many of its weights are pruned now.
        dtype: of the weights.

    Returns:
        (layers,) float32.
    """
    kernels = _kernels()
    layers, device = len(where.key), where.sizes.device
    wanted = torch.stack(tuple(counts))
    found = torch.empty(layers, dtype=torch.float32, device=device)
    prefixes, ranks, above = torch.empty(3, layers, dtype=torch.int32, device=device)
    bins = torch.zeros(layers, kernels.BINS.value, dtype=torch.int32, device=device)
    with torch.cuda.device_of(wanted):
        for shift in ROUNDS:
            kernels.count_digits[(len(where.layers),)](
                where.addresses, where.sizes, where.layers, where.starts, prefixes, bins, above,
                SHIFT=shift, DTYPE=kernels.STORED[dtype], BLOCK=BLOCK, BLOCKS=BLOCKS,
            )  # fmt: skip
            kernels.choose_digit[(layers,)](
                where.sizes, wanted, prefixes, ranks, bins, above, found, SHIFT=shift
            )
    return found


def masked(weight: Tensor, threshold: Tensor, tau: float | Tensor) -> Tensor:
    """Return w_hat (equation 1) with the shape, dtype and memory format of ``weight``."""
    result = torch.empty_like(weight)
    _launch(_kernels().mask_weights, weight, (threshold, tau, result), tau)
    return result


def gradient(weight: Tensor, threshold: Tensor, tau: float | Tensor, upstream: Tensor) -> Tensor:
    """Return dw (equation 2) with the shape, dtype and memory format of ``weight``."""
    result = torch.empty_like(weight)
    if upstream.stride() != weight.stride():
        upstream = torch.empty_like(weight, dtype=upstream.dtype).copy_(upstream)
    _launch(_kernels().mask_gradients, weight, (threshold, tau, upstream, result), tau)
    return result


def _kernels() -> Any:
    """The kernels, imported when they are needed: Triton is not everywhere, and takes its time."""
    return importlib.import_module("pdp_fx.ops.kernels")


def _launch(kernel: Any, weight: Tensor, rest: tuple[Any, ...], tau: float | Tensor) -> None:
    size, stored = weight.numel(), isinstance(tau, Tensor)
    with torch.cuda.device_of(weight):
        kernel[(math.ceil(size / BLOCK),)](weight, *rest, size, TAU_STORED=stored, BLOCK=BLOCK)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie in memory without gaps and without sharing a place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


_WORKS: dict[torch.device, bool] = {}


def _works(device: torch.device) -> bool:
    """Whether Triton gives on this device what tensor operations give; tried once."""
    # The device is waited for, which must not happen while a graph is captured.
    if device not in _WORKS and not torch.cuda.is_current_stream_capturing():
        try:
            _WORKS[device] = agrees(device)
        except Exception as err:  # noqa: BLE001 - no compiler, no Triton, a device it does not know
            logger.warning("pdp-fx goes without its Triton kernels on %s: %s", device, err)
            _WORKS[device] = False
    return _WORKS.get(device, False)


def agrees(device: torch.device) -> bool:
    """Try the kernels on a few numbers, with ties, zeros and infinity among them."""
    numbers = torch.linspace(-1, 1, 3 * BLOCK, device=device).round(decimals=2)
    layers = [numbers, torch.cat([numbers, numbers.new_tensor([math.inf, -0.0])])]
    counts = [torch.tensor(count, device=device) for count in (BLOCK, 2 * BLOCK)]
    found = thresholds(table(layers), counts, numbers.dtype)
    expected = [threshold_by_sort(*pair, numbers.dtype) for pair in zip(layers, counts, strict=True)]
    leaf = numbers.detach().requires_grad_()
    soft = leaf * torch.sigmoid((leaf.square() - expected[0].square()) / TRIED_TAU)
    (slope,) = torch.autograd.grad(soft.sum(), leaf)
    mine = masked(numbers, found[0], TRIED_TAU)
    my_slope = gradient(numbers, found[0], TRIED_TAU, torch.ones_like(numbers))
    return (
        found.equal(torch.stack(expected))
        and torch.allclose(mine, soft.detach(), rtol=1e-4, atol=1e-6)
        and torch.allclose(my_slope, slope, rtol=1e-4, atol=1e-4)
    )
