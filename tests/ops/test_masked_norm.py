"""Norms over masked channels against the same norms without the channels that are masked out."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdp_fx.ops.masked_norm import masked_group_norm, masked_layer_norm, masked_mean, masked_rms_norm


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_masked_channels_are_zero_and_take_no_part_in_the_statistics() -> None:
    x, weight, bias = some(3, 5, 8), some(8), some(8).flip(0)
    stays = torch.tensor([0, 2, 3, 7])
    mask = torch.zeros(8, dtype=torch.float64).index_fill(0, stays, 1.0)
    gone = mask == 0
    layer = masked_layer_norm(x, [8], weight, bias, mask=mask)
    assert not layer[..., gone].any()
    expected = functional.layer_norm(x[..., stays], [4], weight[stays], bias[stays])
    torch.testing.assert_close(layer[..., stays], expected, rtol=1e-12, atol=1e-12)
    rms = masked_rms_norm(x, [8], weight, 1e-6, mask=mask)
    assert not rms[..., gone].any()
    expected = functional.rms_norm(x[..., stays], [4], weight[stays], 1e-6)
    torch.testing.assert_close(rms[..., stays], expected, rtol=1e-12, atol=1e-12)


def test_a_group_norm_loses_the_same_places_of_all_groups_or_whole_groups() -> None:
    x, weight, bias = some(3, 12, 5), some(12), some(12).flip(0)
    for stays, groups in (
        (torch.tensor([0, 2, 4, 6, 8, 10]), 3),
        (torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]), 2),
    ):
        mask = torch.zeros(12, dtype=torch.float64).index_fill(0, stays, 1.0)
        found = masked_group_norm(x, 3, weight, bias, mask=mask)
        assert not found[:, mask == 0].any()
        expected = functional.group_norm(x[:, stays], groups, weight[stays], bias[stays])
        torch.testing.assert_close(found[:, stays], expected, rtol=1e-12, atol=1e-12)


def test_one_mask_for_a_whole_group_only_scales_it_and_its_gradients_are_finite() -> None:
    x, weight, bias = some(3, 12, 5), some(12), some(12).flip(0)
    for value in (1e-300, 1e-30, 0.1, 0.3, 0.9, 0.0):
        mask = torch.ones(12, dtype=torch.float64)
        mask[4:8] = value
        mask.requires_grad_()
        source = x.clone().requires_grad_()
        found = masked_group_norm(source, 3, weight, bias, mask=mask)
        plain = functional.group_norm(x, 3, weight, bias)
        torch.testing.assert_close(found, plain * mask[:, None], rtol=1e-12, atol=1e-12)
        found.square().sum().backward()
        assert mask.grad is not None
        assert source.grad is not None
        assert mask.grad.isfinite().all()
        assert source.grad.isfinite().all()


CHANNELS, STAYS = 16, [1, 2, 5, 6, 9, 10, 13, 14]
"""The channels that stay are the same two of each group of four."""

Norm = Callable[..., Tensor]


def layer(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor, **mask: Tensor) -> Tensor:
    return norm(x, [x.shape[-1]], weight, bias, **mask)


def rms(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor, **mask: Tensor) -> Tensor:
    return norm(x, [x.shape[-1]], weight, **mask)


def rms_of_eps(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor, **mask: Tensor) -> Tensor:
    return norm(x, [x.shape[-1]], weight, 1e-4, **mask)


def groups(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor, **mask: Tensor) -> Tensor:
    return norm(x, 4, weight, bias, **mask)


def mean(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor, **mask: Any) -> Tensor:
    return norm(x, -1, True, **(mask | {"axis": 1} if mask else {}))


CALLS: dict[str, tuple[Norm, Norm, Callable[..., Tensor]]] = {
    "layer": (functional.layer_norm, masked_layer_norm, layer),
    "rms": (functional.rms_norm, masked_rms_norm, rms),
    "rms of eps": (functional.rms_norm, masked_rms_norm, rms_of_eps),
    "groups": (functional.group_norm, masked_group_norm, groups),
    "mean": (torch.mean, masked_mean, mean),
}

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype | None]] = {
    "float64": (torch.float64, torch.float64, None),
    "float32": (torch.float32, torch.float32, None),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "float16": (torch.float16, torch.float16, None),
    "bfloat16 with float32 weights": (torch.bfloat16, torch.float32, None),
    "autocast of float32": (torch.float32, torch.float32, torch.bfloat16),
    "autocast of bfloat16": (torch.bfloat16, torch.float32, torch.bfloat16),
}
"""The dtype of the data, that of the weights, and that of autocast."""


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["large", "as small as eps"])
def test_in_every_precision_a_mask_gives_what_the_plain_norm_gives(
    call: str, precision: str, scale: float
) -> None:
    """Of all channels where the mask is as good as 1, and of those that stay where it is 0 or 1."""
    plain, masked, norm = CALLS[call]
    dtype, weights, autocast = PRECISIONS[precision]
    x = (scale * some(3, CHANNELS)).to(dtype)
    weight, bias = some(CHANNELS).to(weights), some(CHANNELS).flip(0).to(weights)
    whole = torch.ones(CHANNELS, dtype=torch.promote_types(weights, torch.float32))
    whole[0] -= torch.finfo(whole.dtype).eps
    stays = torch.tensor(STAYS)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        found = norm(masked, x, weight, bias, mask=whole)
        expected = norm(plain, x, weight, bias)
        few = norm(masked, x, weight, bias, mask=torch.zeros_like(whole).index_fill(0, stays, 1.0))
        sliced = norm(plain, x[:, stays], weight[stays], bias[stays])
    assert found.dtype == expected.dtype == few.dtype == sliced.dtype
    close = {
        "rtol": 4 * torch.finfo(dtype).eps,
        "atol": 4 * torch.finfo(dtype).eps * float(expected.abs().max()),
    }
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(few if call == "mean" else few[:, stays], sliced, **close)
