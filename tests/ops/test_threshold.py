import math

import pytest
import torch
from torch import Tensor

from pdp_fx.ops.select import BLOCK
from pdp_fx.ops.threshold import compute_dtype, threshold, threshold_by_sort

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def halfway(weight: Tensor, count: int) -> Tensor:
    ordered = weight.detach().to(compute_dtype(weight.dtype)).abs().flatten().sort().values
    return (ordered[count - 1] + ordered[count]) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 50, 143])
def test_threshold_is_halfway_between_its_neighbours(dtype: torch.dtype, count: int) -> None:
    weight = torch.randn(4, 4, 3, 3).to(dtype)
    t = threshold(weight, torch.tensor(count))
    assert t.equal(halfway(weight, count))
    assert t.shape == ()
    assert t.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_nothing_pruned_is_minus_infinity() -> None:
    assert threshold(torch.randn(5), torch.tensor(0)) == -math.inf
    assert threshold(torch.randn(5, dtype=torch.bfloat16), torch.tensor(0)).dtype == torch.float32


def test_a_layer_keeps_at_least_one_weight() -> None:
    weight = torch.randn(7)
    assert threshold(weight, torch.tensor(7)).equal(halfway(weight, 6))
    assert threshold(weight, torch.tensor(100)).equal(halfway(weight, 6))
    assert threshold_by_sort(weight, torch.tensor(7), torch.float32).equal(halfway(weight, 6))
    assert threshold(torch.randn(1), torch.tensor(1)) == -math.inf


def test_equal_weights_have_their_own_magnitude_as_threshold() -> None:
    assert threshold(torch.tensor([-0.3, 0.3, 0.3, -0.3]), torch.tensor(2)) == torch.tensor(0.3)


@pytest.mark.parametrize("count", [1, 6553, 59000, BLOCK + 511])
def test_large_layers_are_exact_in_every_memory_format(count: int) -> None:
    weight = torch.randn(BLOCK // 512 + 1, 64, 2, 4)
    expected = halfway(weight, count)
    for stored in (weight, weight.to(memory_format=torch.channels_last), weight.transpose(0, 1)):
        before = stored.clone()
        assert threshold(stored, torch.tensor(count)).equal(expected)
        assert stored.equal(before)


def test_no_overflow_at_the_end_of_the_range() -> None:
    largest = torch.finfo(torch.float32).max
    assert threshold(torch.full((4,), largest), torch.tensor(2)) == largest
    assert threshold(torch.full((4,), 6e4, dtype=torch.float16), torch.tensor(2)) == torch.tensor(6e4).half()


def test_threshold_is_a_constant_for_autograd() -> None:
    weight = torch.randn(10, requires_grad=True)
    t = threshold(weight, torch.tensor(4))
    assert not t.requires_grad
    (weight * t).sum().backward()
    assert weight.grad is not None
    assert weight.grad.equal(t.expand(10))


def test_threshold_is_a_constant_in_a_compiled_graph() -> None:
    def scaled(weight: Tensor, count: Tensor) -> Tensor:
        return (weight * threshold(weight, count)).sum()

    weight, count = torch.randn(10, requires_grad=True), torch.tensor(4)
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(weight, count), weight)
    assert grad.equal(halfway(weight, 4).expand(10))


# opcheck itself reads .grad of a clone.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_is_a_well_formed_custom_op(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 6, 3, 3).to(dtype, memory_format=torch.channels_last).requires_grad_()
    torch.library.opcheck(torch.ops.pdp_fx.threshold.default, (weight, torch.tensor(70)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [0, 1, 3000, 4096])
def test_a_gpu_finds_the_same_threshold_without_waiting(count: int) -> None:
    weight = torch.randn(64, 64)
    on_device, on_device_count = weight.cuda(), torch.tensor(count, device="cuda")
    threshold(on_device, on_device_count)
    torch.cuda.set_sync_debug_mode("error")
    try:
        t = threshold(on_device, on_device_count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert t.cpu().equal(threshold(weight, torch.tensor(count)))
