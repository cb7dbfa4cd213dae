"""Finding NaN and infinite values by a sum."""

import pytest
import torch

from pdp_fx.ops.finite import all_finite

HUGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("values", [[], [0.0], [1.0, -2.0], [HUGE, HUGE], [HUGE, HUGE, -HUGE]])
def test_finite(values: list[float]) -> None:
    """Also where the sum overflows."""
    assert all_finite(torch.tensor(values))


@pytest.mark.parametrize(
    "values", [[float("nan")], [1.0, float("inf")], [float("-inf"), float("inf")], [HUGE, HUGE, float("nan")]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_not_finite(values: list[float], dtype: torch.dtype) -> None:
    assert not all_finite(torch.tensor(values).to(dtype))
