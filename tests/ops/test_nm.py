import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdp_fx.ops.nm import (
    MILLIONTHS,
    SORTING_NETWORKS,
    group_view,
    nm_pruned,
    nm_threshold,
    sorted_magnitudes,
)
from pdp_fx.ops.soft_mask import soft_mask

SHAPES = ((5, 24), (3, 48, 7), (6, 24, 3, 3), (1, 24, 2, 2), (4, 48, 1, 1))


def every_group(
    values: NDArray[Any], m: int, compute: Callable[[NDArray[Any]], float | NDArray[Any]]
) -> NDArray[Any]:
    """Apply `compute` to each group of a weight (O, I, *kernel), one at a time."""
    out = np.empty((values.shape[0], values.shape[1] // m, m, *values.shape[2:]))
    for row, group, *kernel in itertools.product(*(range(size) for size in (*out.shape[:2], *out.shape[3:]))):
        members = values[(row, slice(group * m, (group + 1) * m), *kernel)]
        out[(row, group, slice(None), *kernel)] = compute(members)
    return out


def threshold_reference(weight: Tensor, m: int, kappa: int) -> NDArray[Any]:
    whole, rest = divmod(kappa, MILLIONTHS)
    fraction = rest / MILLIONTHS

    def compute(members: NDArray[Any]) -> float:
        ordered = np.sort(np.abs(members))
        levels = [0.0, *((ordered[:-1] + ordered[1:]) / 2), 0.0]
        squared = (1 - fraction) * levels[whole] ** 2 + fraction * levels[whole + 1] ** 2
        return math.sqrt(squared) if kappa > 0 else -math.inf

    return every_group(weight.detach().double().numpy(), m, compute)[:, :, :1]


def pruned_reference(weight: Tensor, m: int, pruned_now: int) -> NDArray[Any]:
    def compute(members: NDArray[Any]) -> NDArray[Any]:
        marked = np.zeros(m)
        marked[np.argsort(np.abs(members), kind="stable")[:pruned_now]] = 1
        return marked

    return every_group(weight.double().numpy(), m, compute).reshape(weight.shape).astype(bool)


@pytest.mark.parametrize("m", list(SORTING_NETWORKS))
def test_sorting_networks_sort_every_sequence_of_zeros_and_ones(m: int) -> None:
    sequences = torch.tensor(list(itertools.product((0.0, 1.0), repeat=m))).unsqueeze(1)
    ordered = torch.stack(sorted_magnitudes(sequences.movedim(2, 0)), dim=2)
    assert ordered.equal(sequences.sort(2).values)


def test_groups_are_consecutive_input_channels_of_one_kernel_position() -> None:
    weight = torch.randn(2, 8, 3, 3)
    groups = group_view(weight, 4)
    assert groups.data_ptr() == weight.data_ptr()
    assert groups[1, 1, :, 2, 0].equal(weight[1, 4:8, 2, 0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", [2, 3, 4, 8])
def test_thresholds_match_a_loop_over_the_groups(shape: tuple[int, ...], m: int) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    before = weight.clone()
    for kappa in (0, 1, 300_000, MILLIONTHS, (m - 1) * MILLIONTHS - 1, (m - 1) * MILLIONTHS):
        t = nm_threshold(weight, m, torch.tensor(kappa))
        np.testing.assert_allclose(t.numpy(), threshold_reference(weight, m, kappa), rtol=1e-12)
    assert weight.equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_kappa_is_halfway_between_neighbours_in_every_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 16, 3, 3).to(dtype).to(memory_format=torch.channels_last)
    t = nm_threshold(weight, 4, torch.tensor(2 * MILLIONTHS))
    ordered = group_view(weight.float().abs(), 4).sort(2).values
    assert t.dtype == torch.float32
    assert t.equal(((ordered[:, :, 1] + ordered[:, :, 2]) / 2).unsqueeze(2))


def test_kappa_is_clipped_so_that_a_group_keeps_a_weight() -> None:
    weight = torch.randn(3, 8)
    assert nm_threshold(weight, 4, torch.tensor(9 * MILLIONTHS)).equal(
        nm_threshold(weight, 4, torch.tensor(3 * MILLIONTHS))
    )
    assert nm_threshold(weight, 4, torch.tensor(-5)).eq(-math.inf).all()


def test_thresholds_are_continuous_where_a_floor_would_make_a_staircase() -> None:
    weight = torch.randn(16, 16, dtype=torch.float64)
    kappas = range(10_000, 3 * MILLIONTHS + 1, 10_000)
    ramp = torch.stack([nm_threshold(weight, 4, torch.tensor(kappa)) for kappa in kappas]).square()
    floors = [nm_threshold(weight, 4, torch.tensor(kappa - kappa % MILLIONTHS)) for kappa in kappas]
    staircase = torch.stack(floors).clamp(min=0.0).square()
    steepest = ramp[-1].max() / 100
    assert (ramp.diff(dim=0) >= -1e-15).all()
    assert ramp.diff(dim=0).max() < steepest
    assert staircase.diff(dim=0).max() > 10 * steepest
    for whole in (1, 2):
        just_below = nm_threshold(weight, 4, torch.tensor(whole * MILLIONTHS - 1))
        just_above = nm_threshold(weight, 4, torch.tensor(whole * MILLIONTHS + 1))
        torch.testing.assert_close(just_below, just_above, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("keep", "m"), [(1, 2), (1, 3), (2, 4), (1, 4), (4, 8)])
def test_pruned_weights_match_a_loop_over_the_groups(shape: tuple[int, ...], keep: int, m: int) -> None:
    for weight in (torch.randn(shape), torch.randint(-2, 3, shape).bfloat16()):
        before = weight.clone()
        for pruned_now in range(m - keep + 1):
            expected = pruned_reference(weight, m, pruned_now)
            marked = nm_pruned(weight, keep, m, pruned_now)
            assert marked.dtype == torch.bool
            np.testing.assert_array_equal(marked.numpy(), expected)
            assert nm_pruned(weight, keep, m, torch.tensor(pruned_now)).equal(marked)
        assert weight.equal(before)


def test_ties_are_pruned_lowest_index_first() -> None:
    weight = torch.tensor([[0.5, -0.5, 0.5, 0.5, 0.0, -0.0, 1.0, 0.0]])
    assert nm_pruned(weight, 2, 4, 2).tolist() == [[True, True, False, False, True, True, False, False]]


def test_a_group_never_keeps_fewer_than_n() -> None:
    marked = nm_pruned(torch.randn(6, 16), 2, 4, 4)
    assert group_view(marked, 4).sum(2).eq(2).all()
    assert nm_pruned(torch.randn(6, 16), 2, 4, torch.tensor(4)).sum() == 48


def test_a_channel_count_that_does_not_divide_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size of dim 1"):
        group_view(torch.randn(4, 3, 7, 7), 4)


def test_thresholds_are_constants_for_autograd() -> None:
    weight = torch.randn(6, 16, requires_grad=True)
    assert not nm_threshold(weight, 4, torch.tensor(1_500_000)).requires_grad


def test_a_compiled_step_agrees_with_the_eager_one() -> None:
    def loss(weight: Tensor, kappa: Tensor, inputs: Tensor) -> Tensor:
        masked = soft_mask(group_view(weight, 4), nm_threshold(weight, 4, kappa), 1e-4).flatten(1, 2)
        hard = weight.masked_fill(nm_pruned(weight, 2, 4, kappa // MILLIONTHS), 0.0)
        return (inputs @ masked.T).square().sum() + (inputs @ hard.T).sum()

    weight, inputs = (torch.randn(6, 16) * 0.03).requires_grad_(), torch.randn(5, 16)
    kappa = torch.tensor(1_500_000)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    eager_loss, compiled_loss = loss(weight, kappa, inputs), compiled(weight, kappa, inputs)
    assert compiled_loss.equal(eager_loss)
    (eager_grad,) = torch.autograd.grad(eager_loss, weight)
    (compiled_grad,) = torch.autograd.grad(compiled_loss, weight)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kappa", [0, 1_500_000, 2_000_000])
def test_a_gpu_finds_the_same_thresholds_without_waiting(kappa: int) -> None:
    weight = torch.randn(64, 64)
    on_device, kappa_there = weight.cuda(), torch.tensor(kappa, device="cuda")
    nm_threshold(on_device, 4, kappa_there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        t = nm_threshold(on_device, 4, kappa_there)
        marked = nm_pruned(on_device, 2, 4, kappa_there // MILLIONTHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(t.cpu(), nm_threshold(weight, 4, torch.tensor(kappa)), rtol=1e-6, atol=0)
    assert marked.cpu().equal(nm_pruned(weight, 2, 4, kappa // MILLIONTHS))


def test_nan_counts_as_the_largest_weight() -> None:
    """A model that has diverged shows it, in eval mode as well."""
    weight = torch.tensor([[math.nan, 1.0, -3.0, math.inf, 2.0, math.nan, math.nan, math.nan]])
    pruned = nm_pruned(weight, 2, 4, 2)
    assert pruned.tolist() == [[False, True, True, False, True, True, False, False]]
