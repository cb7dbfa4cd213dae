import math
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from pdp_fx.granularity import NM, Channels, Unstructured
from pdp_fx.masks import ChannelMask, MaskLayout, NMMask, WeightMask
from pdp_fx.ops.nm import group_view
from pdp_fx.ops.soft_mask import soft_mask
from pdp_fx.ops.threshold import threshold
from pdp_fx.policy import MILLION, UNSET, MaskPolicy, MaskSite, Producer
from pdp_fx.softness import Softness

TAU = 1e-3
AnyMask = TypeVar("AnyMask", bound=MaskPolicy)


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * 0.05).to(dtype).requires_grad_()


def at(mask: AnyMask, target: int, share: float = 1.0) -> AnyMask:
    """The mask with its target fixed and a share of it reached."""
    mask.target.fill_(target)
    mask.advance(share)
    return mask


def weight_mask() -> WeightMask:
    return WeightMask(MaskSite(("w",), Unstructured(0.5), TAU))


def nm_mask() -> NMMask:
    return NMMask(MaskSite(("w",), NM(2, 4), TAU))


def channel_mask(
    *producers: Producer,
    parts: tuple[tuple[int, ...], ...] = (),
    width: int = 6,
    tau: Softness | float = TAU,
) -> ChannelMask:
    axes = producers or (Producer(0, None),)
    names = tuple("ab"[: len(axes)])
    return ChannelMask(MaskSite(names, Channels(0.5), tau, producers=axes, width=width, parts=parts))


MASKS = {"weight": weight_mask, "n:m": nm_mask, "channels": channel_mask}
every_mask = pytest.mark.parametrize("kind", MASKS)


@every_mask
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_is_masked_before_the_ramp(kind: str, training: bool, dtype: torch.dtype) -> None:
    mask, w = MASKS[kind]().train(training), weight(6, 8, dtype=dtype)
    masked = mask(w) if kind != "channels" else mask(w).to(dtype)[:, None] * w
    assert torch.equal(masked, w)
    (grad,) = torch.autograd.grad(masked.sum(), w)
    assert torch.equal(grad, torch.ones_like(w))


@every_mask
def test_the_state_is_whole_numbers_that_no_cast_touches(kind: str) -> None:
    mask = at(MASKS[kind](), 3_000_000 if kind == "n:m" else 3).half().bfloat16().double()
    assert {buffer.dtype for buffer in mask.buffers()} == {torch.int64}
    assert not list(mask.parameters())
    assert list(mask.state_dict()) == ["units"]


def test_nothing_is_pruned_while_the_target_is_not_fixed() -> None:
    mask = weight_mask()
    mask.advance(1.0)
    assert int(mask.count) == 0


def test_the_count_of_a_layer_with_more_weights_than_float32_has_whole_numbers_is_exact() -> None:
    assert int(at(weight_mask(), 2**24 + 1).count) == 2**24 + 1


@every_mask
def test_a_mask_says_when_its_target_is_fixed(kind: str) -> None:
    mask = MASKS[kind]()
    assert mask.allocated == (kind == "n:m")
    assert int(mask.target) == (2 * MILLION if kind == "n:m" else UNSET)
    assert at(mask, 5).allocated


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.5, 1.0])
def test_a_weight_mask_prunes_its_share_of_the_target_by_index(share: float) -> None:
    mask, w = at(weight_mask(), 33, share).eval(), weight(6, 8)
    masked = mask(w)
    assert int((masked == 0).sum()) == mask.pruned_now == round(share * 33)
    smallest = w.detach().abs().flatten().argsort()[: mask.pruned_now]
    assert torch.equal(mask.pruned(w).flatten().nonzero().flatten(), smallest.sort().values)
    assert torch.equal(masked[~mask.pruned(w)], w[~mask.pruned(w)])


def test_a_weight_mask_in_training_is_the_soft_mask_of_its_threshold() -> None:
    mask, w = at(weight_mask(), 30), weight(6, 8)
    t = threshold(w, torch.tensor(30))
    torch.testing.assert_close(mask(w), soft_mask(w, t, TAU), rtol=1e-12, atol=0)
    torch.testing.assert_close(mask.values(w), (mask(w) / w).detach(), rtol=1e-12, atol=0)
    assert int((mask.values(w) < 0.5).sum()) == 30


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ties_are_pruned_from_the_front(dtype: torch.dtype) -> None:
    mask = at(weight_mask(), 5).eval()
    w = torch.full((3, 4), 0.1, dtype=dtype)
    assert mask.pruned(w).flatten().tolist() == [True] * 5 + [False] * 7
    assert int((mask(w) == 0).sum()) == 5
    torch.testing.assert_close(mask.train().values(w).float(), torch.full((3, 4), 0.5))


def test_the_hard_mask_follows_the_weights_as_they_are() -> None:
    mask, w = at(weight_mask(), 20).eval(), weight(6, 8)
    first = mask.pruned(w)
    with torch.no_grad():
        w.copy_(w.flip(0))
    assert torch.equal(mask.pruned(w), first.flip(0))


@pytest.mark.parametrize("shape", [(6, 8), (3, 8, 5), (3, 8, 3, 3)])
@pytest.mark.parametrize(("share", "pruned"), [(0.3, 0), (0.5, 1), (0.9, 1), (1.0, 2)])
def test_an_nm_mask_prunes_whole_weights_of_groups_along_the_inputs(
    shape: tuple[int, ...], share: float, pruned: int
) -> None:
    mask, w = nm_mask().eval(), weight(*shape)
    mask.advance(share)
    assert mask.pruned_now == pruned
    gone, magnitudes = group_view(mask.pruned(w), 4), group_view(w.detach().abs(), 4)
    assert gone.sum(2).eq(pruned).all()
    largest_gone = magnitudes.masked_fill(~gone, -math.inf).amax(2)
    smallest_kept = magnitudes.masked_fill(gone, math.inf).amin(2)
    assert bool((largest_gone <= smallest_kept).all())
    assert torch.equal(mask(w) == 0, mask.pruned(w))


def test_a_ramp_of_groups_moves_the_soft_mask_between_whole_weights() -> None:
    mask, w = nm_mask(), weight(6, 8)
    means: list[float] = []
    for share in (0.25, 0.4, 0.5, 0.6, 0.75, 1.0):
        mask.advance(share)
        means.append(float(mask.values(w).mean()))
    assert means == sorted(means, reverse=True)
    assert len(set(means)) == len(means)


def test_channels_are_scored_by_the_root_mean_square_over_all_producers() -> None:
    first, second = weight(6, 8, 3, 3), weight(10, 6)
    places = (5, -1, 0, 1, -1, -1)
    mask = channel_mask(Producer(0, None), Producer(1, places))
    scores = mask.scores(first, second)
    for channel in range(6):
        rows = [first[channel].flatten()]
        rows += [second[:, row] for row, place in enumerate(places) if place == channel]
        expected = torch.cat(rows).square().mean().sqrt()
        torch.testing.assert_close(scores[channel], expected, rtol=1e-12, atol=0)


def test_channels_of_lowest_score_go_and_the_mask_is_shared() -> None:
    mask, w = at(channel_mask(), 4), weight(6, 8)
    scores = mask.scores(w).detach()
    t = threshold(scores, torch.tensor(4))
    expected = torch.sigmoid((scores.square() - t.square()) / TAU)
    torch.testing.assert_close(mask(w).detach(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(mask.values(w), expected, rtol=1e-12, atol=0)
    kept = scores.argsort()[4:].sort().values
    assert torch.equal(mask.eval()(w).nonzero().flatten(), kept)
    assert torch.equal((~mask.pruned(w)).nonzero().flatten(), kept)


@pytest.mark.parametrize("norm", [1e-15, 0.3, 1.0, 7.7, 1e15])
def test_of_channels_that_differ_by_rounding_the_first_go(norm: float) -> None:
    mask, w = at(channel_mask(), 3), weight(6, 8).detach()
    w = norm * w / w.norm(dim=1, keepdim=True)
    for dtype in (torch.float64, torch.float32):
        rounded = w.to(dtype) * (1 + torch.tensor([0, 1, -1, 1, 0, -1])[:, None] * 1e-7)
        assert mask.pruned(rounded.to(dtype)).tolist() == [True] * 3 + [False] * 3
        rounded[4] *= 0.9999
        assert mask.pruned(rounded.to(dtype)).tolist() == [True, True, False, False, True, False]


def test_the_gradient_of_a_channel_mask_reaches_its_weights() -> None:
    mask, w = at(channel_mask(), 3), weight(6, 8)
    t = threshold(mask.scores(w).detach(), torch.tensor(3))
    upstream = torch.randn(6, dtype=torch.float64)
    (grad,) = torch.autograd.grad(mask(w), w, upstream)
    m = mask.values(w)
    expected = 2 * w.detach() * (upstream * m * (1 - m))[:, None] / (TAU * 8)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-14)
    assert float(t) > 0


def test_an_all_zero_channel_has_a_finite_gradient() -> None:
    mask, w = at(channel_mask(), 3), weight(6, 8)
    with torch.no_grad():
        w[2] = 0
    (grad,) = torch.autograd.grad(mask(w).sum(), w)
    assert grad.isfinite().all()


def test_the_best_channel_of_each_part_stays() -> None:
    w = torch.arange(1.0, 7.0)[:, None].expand(6, 4).contiguous()
    mask = channel_mask(parts=((0, 1), (2, 3), (4, 5)))
    assert at(mask, 3).pruned(w).tolist() == [True, False, True, False, True, False]
    assert mask.fewest(1) == 3
    assert mask.fewest(4) == 4


@pytest.mark.parametrize("tau", [TAU, Softness(0.1, relative=True)])
def test_a_channel_that_stays_for_its_part_is_trained_as_it_is_shipped(tau: Softness | float) -> None:
    w = torch.arange(1.0, 7.0)[:, None].expand(6, 4).contiguous()
    mask = at(channel_mask(tau=tau, parts=((0, 1), (2, 3), (4, 5))), 3)
    soft, hard = mask.train()(w), mask.eval()(w)
    assert hard.tolist() == [0, 1, 0, 1, 0, 1]
    assert soft[hard == 1].min() > 0.99
    torch.testing.assert_close(mask.values(w), soft)


def test_many_parts_do_not_overflow_the_scores_by_which_channels_are_ranked() -> None:
    w = torch.ones(400, 1)
    w[::2] = 0.5
    mask = channel_mask(parts=tuple((place, place + 1) for place in range(0, 400, 2)), width=400)
    assert at(mask, 200).train()(w).isfinite().all()
    assert mask(w)[1::2].min() > 0.5


def test_a_layout_puts_masks_side_by_side_and_ones_elsewhere() -> None:
    layout = MaskLayout((3, -1, 0, 1, 2, -1))
    laid = layout(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4]))
    assert laid.tolist() == pytest.approx([0.4, 1.0, 0.1, 0.2, 0.3, 1.0])
    assert not layout.state_dict()
