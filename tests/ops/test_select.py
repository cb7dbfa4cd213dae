import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdp_fx.ops.select import (
    BLOCK,
    as_numpy,
    kth_and_next_by_sort,
    order_statistics,
    smallest,
    smallest_by_cumsum,
    storage_order,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def stable_reference(magnitude: Tensor, count: int) -> Tensor:
    order = np.argsort(magnitude.double().reshape(-1).numpy(), kind="stable")
    marked = np.zeros(magnitude.numel(), dtype=bool)
    marked[order[:count]] = True
    return torch.tensor(marked).view(magnitude.shape)


def with_ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 9, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 17, 59, 60])
def test_ties_are_broken_by_index_in_every_dtype(dtype: torch.dtype, count: int) -> None:
    magnitude = with_ties((3, 4, 5), dtype)
    expected = stable_reference(magnitude, count)
    assert smallest(magnitude, count).equal(expected)
    assert smallest(magnitude, torch.tensor(count)).equal(expected)
    assert smallest_by_cumsum(magnitude, torch.tensor(count)).equal(expected)


@given(st.lists(st.floats(0, 4, width=16), min_size=1, max_size=30), st.data())
def test_any_values_give_the_stable_selection(values: list[float], data: st.DataObject) -> None:
    magnitude = torch.tensor(values, dtype=torch.bfloat16)
    count = data.draw(st.integers(0, len(values)))
    expected = stable_reference(magnitude, count)
    assert smallest(magnitude, count).equal(expected)
    assert smallest_by_cumsum(magnitude, torch.tensor(count)).equal(expected)


def test_equal_values_are_marked_from_the_front() -> None:
    assert smallest(torch.ones(5), 3).tolist() == [True, True, True, False, False]


def test_nan_ranks_last_and_is_never_marked() -> None:
    magnitude = torch.tensor([float("nan"), 2.0, 1.0, float("nan")])
    assert smallest(magnitude, 1).tolist() == [False, False, True, False]
    assert smallest(magnitude, 4).sum() < 4


def test_indices_are_row_major_whatever_the_memory_format() -> None:
    magnitude = with_ties((4, 6, 3, 3), torch.float32)
    expected = stable_reference(magnitude, 100)
    assert smallest(magnitude.to(memory_format=torch.channels_last), 100).equal(expected)
    assert smallest(magnitude.transpose(0, 1), 100).equal(stable_reference(magnitude.transpose(0, 1), 100))


def large_tensors() -> dict[str, Tensor]:
    size = BLOCK + 4321
    noise = torch.randn(size).abs()
    misleading = torch.rand(size)
    misleading[:: round(size ** (1 / 3) / 2)] += 5.0
    return {
        "normal": noise,
        "sorted": noise.sort().values,
        "reversed": noise.sort(descending=True).values,
        "rounded to bfloat16": noise.bfloat16(),
        "nine values": with_ties((size,), torch.float32),
        "mostly zero": noise * (noise > 2.0),
        "all equal": torch.full((size,), 0.25),
        "a sample that misleads": misleading,
        "integers": torch.randint(0, 1 << 40, (size,)),
    }


@pytest.mark.parametrize("name", list(large_tensors()))
def test_large_tensors_are_selected_exactly(name: str) -> None:
    magnitude = large_tensors()[name]
    size = magnitude.numel()
    ordered = magnitude.sort().values
    for count in (1, 2, 700, size // 2, int(0.9 * size), size - 700, size - 1):
        kth, following = order_statistics(as_numpy(-magnitude), count)
        assert kth == ordered[count - 1]
        assert following == ordered[count]
        assert smallest(magnitude, count).equal(stable_reference(magnitude, count))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, 11, 12, 13])
def test_ranks_are_clipped_and_the_input_is_left_alone(dtype: torch.dtype, count: int) -> None:
    magnitude = with_ties((12,), dtype)
    before = magnitude.clone()
    ordered = magnitude.sort().values
    expected = ordered[max(min(count, 12) - 1, 0)], ordered[min(count, 11)]
    by_sort = kth_and_next_by_sort(magnitude, torch.tensor(count))
    assert by_sort == expected
    assert by_sort[0].dtype == dtype
    assert order_statistics(as_numpy(magnitude), count) == expected
    assert magnitude.equal(before)


def test_storage_order_is_a_view_for_dense_memory_formats() -> None:
    contiguous = torch.randn(4, 6, 3, 3)
    for tensor in (contiguous, contiguous.to(memory_format=torch.channels_last), contiguous.transpose(0, 1)):
        flat = storage_order(tensor)
        assert flat.data_ptr() == tensor.data_ptr()
        assert flat.is_contiguous()
        assert flat.sort().values.equal(contiguous.flatten().sort().values)
    gappy = storage_order(contiguous.flatten(1)[:, ::2])
    assert gappy.is_contiguous()
    assert gappy.tolist() == contiguous.flatten()[::2].tolist()
    assert storage_order(torch.tensor(3.0)).tolist() == [3.0]
    assert storage_order(torch.arange(3.0).expand(2, 3)).numel() == 6


def test_smallest_is_a_well_formed_custom_op() -> None:
    magnitude = torch.rand(4, 6, 3, 3).to(memory_format=torch.channels_last)
    torch.library.opcheck(torch.ops.pdp_fx.smallest.default, (magnitude, torch.tensor(70)))


def test_smallest_compiles_in_one_graph() -> None:
    def masked(weight: Tensor, count: Tensor) -> Tensor:
        return weight.masked_fill(smallest(weight.abs(), count), 0.0)

    weight, count = torch.randn(6, 7, requires_grad=True), torch.tensor(20)
    compiled = torch.compile(masked, backend="aot_eager", fullgraph=True)
    assert compiled(weight, count).equal(masked(weight, count))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_selects_the_same_without_waiting(dtype: torch.dtype) -> None:
    magnitude = with_ties((64, 64), dtype)
    on_device, count = magnitude.cuda(), torch.tensor(1000, device="cuda")
    smallest(on_device, count)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = smallest(on_device, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.cpu().equal(stable_reference(magnitude, 1000))
