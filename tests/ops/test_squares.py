import pytest
import torch

from pdp_fx.ops.squares import ROW, sum_of_squares


@pytest.mark.parametrize("count", [0, 1, ROW, 2 * ROW, 2 * ROW + 1, 3 * ROW, 2**22 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_does_not_drift_with_the_number_of_weights(count: int, dtype: torch.dtype) -> None:
    weight = torch.full((count,), 0.02)
    weight[::2] = 0.03
    weight = weight.to(dtype)
    expected = weight.double().square().sum()
    found = sum_of_squares(weight)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


def test_it_reads_every_memory_format() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 32, 3, 3)
    expected = sum_of_squares(weight.double()).float()
    for each in (weight.to(memory_format=torch.channels_last), weight.transpose(0, 1), weight[:, ::2]):
        wanted = sum_of_squares(each.contiguous().double()).float()
        torch.testing.assert_close(sum_of_squares(each), wanted)
    torch.testing.assert_close(torch.func.vmap(sum_of_squares)(weight[None])[0], expected)
