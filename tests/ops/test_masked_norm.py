"""Norms over masked channels against the same norms without the channels that are masked out."""

import torch
from torch import Tensor
from torch.nn import functional

from pdp_fx.ops.masked_norm import masked_group_norm, masked_layer_norm, masked_rms_norm


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
