import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from pdp_fx.granularity import Unstructured
from pdp_fx.masks import WeightMask
from pdp_fx.ops import ranking
from pdp_fx.ops.ranking import Ranking
from pdp_fx.ops.select import Values
from pdp_fx.ops.threshold import threshold
from pdp_fx.policy import MaskSite

SITE = MaskSite(("weight",), Unstructured(0.5), 1e-4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry with every selection."""
    counts: list[int] = []
    select = Ranking._select  # pyright: ignore[reportPrivateUsage]

    def counting(memory: Ranking, values: Values, pruned: int) -> tuple[object, object]:
        counts.append(pruned)
        return select(memory, values, pruned)

    monkeypatch.setattr(Ranking, "_select", counting)
    return counts


def masked_layer() -> tuple[WeightMask, nn.Parameter]:
    mask = WeightMask(SITE)
    mask.target.fill_(90)
    mask.advance(0.5)
    return mask, nn.Parameter(torch.randn(10, 15) * 0.03)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(150,), (7, 3), (6, 4, 3, 3), (1, 5)])
def test_what_is_remembered_is_what_a_selection_finds(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory, weight = Ranking(), torch.randn(shape).to(dtype)
    for pruned in (1, weight.numel() // 2, weight.numel() - 1):
        first = memory.around(weight, pruned)
        assert memory.around(weight, pruned) == first
        assert 0.5 * first[0] + 0.5 * first[1] == threshold(weight, torch.tensor(pruned))


def test_one_selection_serves_a_whole_optimizer_step(selections: list[int]) -> None:
    mask, weight = masked_layer()
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(1, 4):
        for _ in range(2):
            mask(weight).square().sum().backward()
        (mask(weight) + mask(weight)).sum().backward()
        checkpoint(mask, weight, use_reentrant=False).sum().backward()
        with torch.no_grad():
            mask.eval()(weight)
        mask.train()
        assert len(selections) == step
        optimizer.step()


def test_a_weight_with_gaps_in_memory_is_masked_like_a_dense_one() -> None:
    mask, weight = masked_layer()
    gappy = nn.Parameter(torch.stack([weight.detach(), torch.ones_like(weight)], -1)[..., 0])
    assert not gappy.is_contiguous()
    for mode in (True, False):
        assert mask.train(mode)(gappy).equal(mask(weight))


def change_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def change_data(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def change_one_weight_through_data(weight: nn.Parameter) -> None:
    weight.data.view(-1)[weight.abs().argmax()] = 0.0


def replace_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2


def change_through_a_view_of_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] *= 2


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_data,
        change_one_weight_through_data,
        replace_data,
        change_through_a_view_of_numpy,
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_no_way_of_writing_a_weight_leaves_a_stale_mask(
    change: Callable[[nn.Parameter], None], mode: bool
) -> None:
    mask, weight = masked_layer()
    mask.train(mode)
    mask(weight)
    change(weight)
    fresh = WeightMask(SITE).train(mode)
    fresh.target.fill_(90)
    fresh.advance(0.5)
    assert mask(weight).equal(fresh(weight))


def test_another_count_is_another_threshold() -> None:
    mask, weight = masked_layer()
    half = mask(weight)
    mask.advance(1.0)
    assert int((mask(weight).abs() < half.abs()).sum()) > 0


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_pruned_costs_nothing(mode: bool, selections: list[int]) -> None:
    mask, weight = masked_layer()
    mask.advance(0.0)
    assert mask.train(mode)(weight) is weight
    assert not selections


def test_ties_are_pruned_exactly_after_a_remembered_rank() -> None:
    mask, weight = masked_layer()
    with torch.no_grad():
        weight.copy_(torch.randint(-3, 4, weight.shape))
    for _ in range(2):
        assert int(mask.pruned(weight).sum()) == 45


def test_ranking_leaves_the_storage_resizable() -> None:
    """FSDP frees a gathered weight by resizing its storage to nothing."""
    mask, weight = masked_layer()
    mask(weight)
    weight.untyped_storage().resize_(0)


def test_inference_tensors_and_copies_are_ranked_too() -> None:
    mask, weight = masked_layer()
    expected = mask.eval()(weight)
    with torch.inference_mode():
        assert mask(weight.clone()).equal(expected)
    assert copy.deepcopy(mask)(weight).equal(expected)


def test_broken_weights_are_never_remembered_as_equal() -> None:
    mask, weight = masked_layer()
    whole = mask(weight).detach().clone()
    saved = weight.detach().clone()
    weight.data.fill_(math.nan)
    assert bool(mask(weight).isnan().all())
    weight.data.copy_(saved)
    found: Tensor = mask(weight)
    assert found.equal(whole)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0, 1024.0])
def test_doubles_that_were_all_scaled_are_ranked_anew(factor: float) -> None:
    memory, weight = (
        Ranking(),
        torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    before = memory.around(weight, 2048)
    for _ in range(12):
        weight.data.mul_(factor)
        before = tuple(factor * value for value in before)
        assert memory.around(weight, 2048) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_which_as_many_were_doubled_as_halved_are_ranked_anew(dtype: torch.dtype) -> None:
    for seed in range(200):
        weight = torch.randn(8, 36, generator=torch.Generator().manual_seed(seed)).to(dtype)
        memory = Ranking()
        memory.around(weight, 200)
        weight.data[:4].mul_(2)
        weight.data[4:].mul_(0.5)
        assert memory.around(weight, 200) == Ranking().around(weight, 200)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_of_an_odd_number_of_weights_counts(dtype: torch.dtype) -> None:
    memory, weight = Ranking(), torch.arange(-3, 4).to(dtype)
    memory.around(weight, 6)
    weight.data[-1] = 7.0
    assert memory.around(weight, 6) == (3.0, 7.0)


def by_sort(weight: Tensor, pruned: int) -> tuple[float, float]:
    ordered = weight.detach().abs().flatten().sort().values
    return float(ordered[pruned - 1]), float(ordered[pruned])


@pytest.mark.parametrize("change", [0.0, 1e-4, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("digits", [1, 3, 9])
@pytest.mark.parametrize("size", [1024, 5000, 70_000])
def test_magnitudes_that_move_are_found_as_a_sort_finds_them(size: int, digits: int, change: float) -> None:
    """Few digits make ties; the wanted rank moves, too, as it does on a ramp."""
    torch.manual_seed(0)
    memory, weight = Ranking(), torch.randn(size)
    for pruned in (size // 2, size // 2 + 3, size - 1, 1, 1, size // 3):
        weight.add_(torch.randn(size) * change).div_(1 + change)
        rounded = weight.round(decimals=digits)
        assert memory.around(rounded, pruned) == by_sort(rounded, pruned)


def test_magnitudes_that_hardly_moved_are_found_without_a_new_selection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    memory, weight = Ranking(), torch.randn(9000)
    memory.around(weight, 7000)

    def refused(values: Values, count: int) -> tuple[object, object]:
        raise AssertionError("selected from scratch")

    monkeypatch.setattr(ranking, "order_statistics", refused)
    for _ in range(5):
        weight.add_(torch.randn(9000) * 1e-3)
        assert memory.around(weight, 7000) == by_sort(weight, 7000)


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan])
def test_special_numbers_keep_their_rank_while_others_move(value: float) -> None:
    torch.manual_seed(0)
    memory, weight = Ranking(), torch.randn(3000)
    weight[::3] = value
    for pruned in (900, 1500, 1990):
        for _ in range(3):
            weight.mul_(1.001)
            assert memory.around(weight, pruned) == by_sort(weight, pruned)
