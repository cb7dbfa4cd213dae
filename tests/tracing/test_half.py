"""Computing in 16 bits on a CPU, where it is slow, by way of float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdp_fx.tracing.half import WidenedHalf


def _given(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 5, 5).to(dtype), torch.randn(4, 3, 3, 3).to(dtype), torch.randn(4).to(dtype)]


def _computed(given: list[Tensor]) -> list[Tensor]:
    images, weight, bias = given
    made = functional.conv2d(images, weight, bias)
    rows = functional.linear(made.flatten(2), torch.ones(6, 9).to(made), torch.ones(6).to(made))
    return [made, rows, rows @ rows.mT, torch.mm(rows[0], rows[1].mT), made.relu()]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float16, 1e-2), (torch.bfloat16, 1e-1)])
def test_what_is_computed_in_float32_comes_back_in_16_bits(dtype: torch.dtype, near: float) -> None:
    with WidenedHalf():
        got = _computed(_given(dtype))
    assert all(each.dtype is dtype for each in got)
    for one, other in zip(got, _computed(_given(dtype)), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    with WidenedHalf():
        got = _computed(_given(dtype))
    assert all(map(torch.equal, got, _computed(_given(dtype))))


def test_gradients_flow_through() -> None:
    given = [each.requires_grad_() for each in _given(torch.float16)]
    images, weight, bias = given
    with WidenedHalf():
        functional.conv2d(images, weight, bias).sum().backward()
    assert all(each.grad is not None and each.grad.dtype is torch.float16 for each in given)
