import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdp_fx.allocation import allocate, most_prunable, reach_macs, rounded, uniform_share
from pdp_fx.errors import SpecError

Layers = list[list[float]]
layer = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]), min_size=1, max_size=12)
layers = st.lists(layer, min_size=1, max_size=6)


@given(layers, st.data())
def test_counts_sum_to_the_total_and_respect_every_limit(scores: Layers, data: st.DataObject) -> None:
    most = [data.draw(st.integers(0, len(layer))) for layer in scores]
    total = data.draw(st.integers(0, sum(most)))
    counts = allocate([torch.tensor(layer) for layer in scores], total, most)
    assert sum(counts) == total
    assert all(0 <= count <= limit for count, limit in zip(counts, most, strict=True))


@given(layers, st.data())
def test_without_limits_the_lowest_scores_of_all_layers_go(scores: Layers, data: st.DataObject) -> None:
    flat = [score for layer in scores for score in layer]
    total = data.draw(st.integers(0, len(flat)))
    counts = allocate([torch.tensor(layer) for layer in scores], total, [len(layer) for layer in scores])
    order = sorted(range(len(flat)), key=lambda index: (flat[index], index))[:total]
    owners = [number for number, layer in enumerate(scores) for _ in layer]
    assert counts == [sum(owners[index] == number for index in order) for number in range(len(scores))]


def test_what_a_full_layer_cannot_give_comes_from_the_next_lowest() -> None:
    scores = [torch.tensor([0.1] * 4), torch.tensor([0.2, 0.5]), torch.tensor([0.3, 0.4])]
    assert allocate(scores, 4, [4, 2, 2]) == [4, 0, 0]
    assert allocate(scores, 4, [2, 2, 2]) == [2, 1, 1]
    assert allocate(scores, 4, [1, 1, 2]) == [1, 1, 2]


def test_more_than_may_go_is_refused() -> None:
    with pytest.raises(SpecError, match="5 units are to be pruned, but the layers may lose 4 at most; lower"):
        allocate([torch.ones(3), torch.ones(3)], 5, [2, 2])


def test_scores_of_half_precision_are_ranked_as_they_are() -> None:
    scores = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.5, 0.5], dtype=torch.bfloat16)]
    assert allocate(scores, 3, [2, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("size", "ratio", "min_keep", "least", "expected"),
    [
        (100, 0.9, 0.25, 1, 98),
        (100, 0.9, 0.0, 1, 99),
        (100, 0.9, 1.0, 1, 90),
        (100, 0.5, 0.0, 64, 36),
        (8, 0.5, 0.0, 64, 0),
        (1, 0.5, 0.25, 1, 0),
    ],
)
def test_a_layer_keeps_its_share_and_at_least_one(
    size: int, ratio: float, min_keep: float, least: int, expected: int
) -> None:
    assert most_prunable(size, ratio, min_keep, least) == expected


@given(st.integers(1, 200), st.data(), st.sampled_from([1, 4, 8, 16]))
def test_rounding_leaves_a_multiple_where_the_layer_allows_it(
    width: int, data: st.DataObject, round_to: int
) -> None:
    most = data.draw(st.integers(0, width - 1))
    pruned = data.draw(st.integers(0, most))
    result = rounded(pruned, width, round_to, most)
    kept = width - result
    assert 0 <= result <= most
    assert kept % round_to == 0 or result == 0
    assert result == 0 or abs(result - pruned) < round_to or kept - round_to < width - most


@pytest.mark.parametrize(("pruned", "left"), [(4, 32), (7, 24), (9, 24), (13, 16), (30, 8)])
def test_rounding_goes_to_the_nearest_multiple(pruned: int, left: int) -> None:
    assert 32 - rounded(pruned, 32, 8, 31) == left


@pytest.mark.parametrize(("size", "ratio", "gone"), [(10, 0.56, 6), (10, 0.54, 5), (9, 0.99, 8), (1, 0.9, 0)])
def test_equal_shares_are_rounded_and_leave_one(size: int, ratio: float, gone: int) -> None:
    assert uniform_share(size, ratio) == gone


def linear(total: int) -> list[int]:
    return [total]


@pytest.mark.parametrize("reduction", [0.01, 0.25, 0.5, 0.77])
def test_the_fewest_channels_that_reach_the_goal(reduction: float) -> None:
    def macs(counts: list[int]) -> float:
        return 64.0 * (100 - counts[0]) * (100 - counts[0])

    (pruned,) = reach_macs(linear, 99, macs, macs([0]), reduction)
    assert macs([pruned]) <= (1 - reduction) * macs([0]) < macs([pruned - 1])
    assert pruned == math.ceil(100 * (1 - math.sqrt(1 - reduction)))


def test_a_goal_out_of_reach_says_how_far_it_goes() -> None:
    with pytest.raises(SpecError, match=r"mac_reduction=0.9 cannot be reached: .* saves 0.250 of the"):
        reach_macs(linear, 25, lambda counts: 100.0 - counts[0], 100.0, 0.9)
