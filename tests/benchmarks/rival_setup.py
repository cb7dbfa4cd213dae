"""What the tests of the rivals share: sites, masks brought to a moment, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pdp_fx import NM, MaskPolicy, MaskSite, Progress, Schedule, Unstructured, WeightPolicy

Some = TypeVar("Some", bound=WeightPolicy)


def weight(*shape: int, seed: int = 0) -> nn.Parameter:
    """Weights in float64, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))


def unstructured(w: Tensor, ratio: float = 0.5) -> MaskSite:
    return MaskSite(("w",), Unstructured(ratio), 1e-4, (w,))


def pattern(w: Tensor, keep: int, of: int) -> MaskSite:
    return MaskSite(("w",), NM(keep, of), 1e-4, (w,))


def pruning(mask: Some, count: int) -> Some:
    """A planned mask that prunes ``count`` weights."""
    mask.target.fill_(count)
    mask.advance(1.0)
    return mask


def at(
    masks: Sequence[MaskPolicy], weights: Sequence[Tensor], counter: int, share: float, length: int
) -> None:
    """Bring the masks to a moment of a training of ``length`` steps or epochs."""
    now = Progress(counter, share, Schedule.fit(max(length, 2)))
    with torch.no_grad():
        type(masks[0]).update(masks, [(w,) for w in weights], now)


def gradients(function: Callable[[], Tensor], upstream: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of the inputs for a given gradient of the result."""
    return torch.autograd.grad(function(), inputs, upstream)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def ranked(magnitudes: Tensor) -> list[int]:
    """Flat indices, the least magnitude first."""
    return magnitudes.detach().flatten().argsort().tolist()


def marked(shape: Sequence[int], indices: Sequence[int]) -> Tensor:
    """A mask that is True at these flat indices."""
    mask = torch.zeros(int(torch.Size(shape).numel()), dtype=torch.bool)
    mask[list(indices)] = True
    return mask.view(*shape)
