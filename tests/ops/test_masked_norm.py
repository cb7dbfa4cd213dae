"""Norms over masked channels against the same norms without the channels that are masked out."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdp_fx.ops.masked_norm import (
    PLAIN,
    masked_group_norm,
    masked_huber_loss,
    masked_l1_loss,
    masked_layer_norm,
    masked_mean,
    masked_mse_loss,
    masked_rms_norm,
    masked_smooth_l1_loss,
    masked_std,
    masked_var,
)

STAYS = [1, 2, 3, 4, 5, 6]


def layer(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    given = (x, [x.shape[1]], weight, bias)
    return functional.layer_norm(*given) if mask is None else masked_layer_norm(*given, mask=mask)


def rms(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    given = (x, [x.shape[1]], weight)
    return functional.rms_norm(*given) if mask is None else masked_rms_norm(*given, mask=mask)


def bare_rms(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    given = (x, [x.shape[1]])
    return functional.rms_norm(*given) if mask is None else masked_rms_norm(*given, mask=mask)


def group(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    given = (x, 2, weight, bias)
    return functional.group_norm(*given) if mask is None else masked_group_norm(*given, mask=mask)


def mean(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    return torch.mean(x, 1, True) if mask is None else masked_mean(x, 1, True, mask=mask, axis=1)


def var(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    given = (x, -1, False, True)
    return torch.var(*given) if mask is None else masked_var(*given, mask=mask, axis=1)


def std(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    return torch.std(x, keepdim=True) if mask is None else masked_std(x, keepdim=True, mask=mask, axis=1)


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


def test_masks_that_are_all_1_get_the_gradient_of_the_masked_norm() -> None:
    x, weight, bias = some(3, 5, 8), some(8), some(8).flip(0)
    mask = torch.ones(8, dtype=torch.float64)

    def by_formula(x: Tensor, mask: Tensor) -> Tensor:
        share = mask / mask.sum()
        centred = x - (x * share).sum(-1, keepdim=True)
        scaled = centred * torch.rsqrt((centred.square() * share).sum(-1, keepdim=True) + 1e-5)
        return mask * (scaled * weight + bias)

    def gradients(norm: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        given = x.clone().requires_grad_(), mask.clone().requires_grad_()
        return torch.autograd.grad((norm(*given) * some(8)).square().sum(), given)

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return masked_layer_norm(x, [8], weight, bias, mask=mask)

    plain = functional.layer_norm(x, [8], weight, bias)
    assert masked(x, mask.clone().requires_grad_()).equal(plain), "no bit changes"
    found = gradients(masked)
    assert found[1].abs().max() > 0.1
    torch.testing.assert_close(found, gradients(by_formula), rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("kind", [masked_layer_norm, masked_rms_norm, masked_group_norm])
@pytest.mark.parametrize(
    "order",
    [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: torch.cat([x, x], 1).contiguous(memory_format=torch.channels_last)[:, :8],
        lambda x: torch.cat([x, x], 3).contiguous(memory_format=torch.channels_last)[..., :4],
        lambda x: x[..., :1].expand(x.shape),
        lambda x: x[:, :, :1, :1].contiguous(memory_format=torch.channels_last),
    ],
)
def test_results_lie_in_memory_as_those_of_the_norm_do(
    kind: Callable[..., Tensor], order: Callable[[Tensor], Tensor]
) -> None:
    """Views of them may need that."""
    x = order(torch.randn(2, 8, 6, 4))
    x, of = (x, 4) if kind is masked_group_norm else (x.permute(0, 2, 3, 1), [8])
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1])
    assert kind(x, of, mask=mask).stride() == PLAIN[kind](x, of).stride()


@pytest.mark.parametrize("norm", [layer, rms, group], ids=["layer", "rms", "group"])
def test_an_empty_batch_has_an_empty_result(norm: Any) -> None:
    x = torch.randn(0, 8)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert norm(x, torch.ones(8), torch.zeros(8), mask).shape == x.shape


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


@pytest.mark.parametrize("norm", [layer, rms, bare_rms, group, mean, var, std])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0])
@pytest.mark.parametrize(
    ("dtype", "of_weights"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_masked_norm_is_as_precise_as_that_of_the_channels_that_stay(
    norm: Callable[..., Tensor], scale: float, dtype: torch.dtype, of_weights: torch.dtype, casts: bool
) -> None:
    x = (scale * (some(4, 8) + 1)).to(dtype)
    weight, bias = some(8).to(of_weights), some(8).flip(0).to(of_weights)
    mask = torch.zeros(8).index_fill(0, torch.tensor(STAYS), 1.0)
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
        found = norm(x, weight, bias, mask)
        expected = norm(x[:, STAYS], weight[STAYS], bias[STAYS])
        whole = norm(x, weight, bias, torch.ones(8))
    assert found.dtype == expected.dtype == whole.dtype
    found = found if norm in (mean, var, std) else found[:, STAYS]
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= 16 * torch.finfo(expected.dtype).eps


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {}),
        ((False,), {}),
        ((None,), {"keepdim": True}),
        ((1,), {"unbiased": False}),
        (([0, 1], False), {}),
        (((-1, 0), True, True), {}),
        (([],), {}),
        (((),), {}),
        ((), {"correction": 0}),
        ((-1,), {"correction": 2.5, "keepdim": True}),
    ],
)
def test_variances_take_the_arguments_that_they_take_in_torch(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    x, stays = some(5, 8), torch.tensor(STAYS)
    mask = torch.zeros(8, dtype=torch.float64).index_fill(0, stays, 1.0)
    for plain, masked in ((torch.var, masked_var), (torch.std, masked_std)):
        ones = masked(x, *given, **named, mask=torch.ones(8), axis=1)
        assert torch.equal(ones, plain(x, *given, **named))
        found = masked(x, *given, **named, mask=mask, axis=1)
        torch.testing.assert_close(found, plain(x[:, stays], *given, **named), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("masked", "named"),
    [
        (masked_mse_loss, {}),
        (masked_l1_loss, {"reduction": "mean"}),
        (masked_smooth_l1_loss, {"beta": 0.3}),
        (masked_smooth_l1_loss, {"beta": 0.0}),
        (masked_huber_loss, {"delta": 0.2}),
    ],
)
@pytest.mark.parametrize("shape", [(5, 8, 3), (1, 8, 1)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_is_the_mean_over_the_channels_that_stay(
    masked: Any, named: dict[str, Any], shape: tuple[int, ...]
) -> None:
    x, target, plain = some(5, 8, 3), some(*shape).flip(0) + 0.1, PLAIN[masked]
    mask = torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor(STAYS), 1.0)
    found = masked(x, target, **named, mask=mask, axis=1)
    expected = plain(x[:, STAYS], target[:, STAYS], **named)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ones = torch.ones(8, dtype=torch.float64, requires_grad=True)
    assert not masked(x, target, **named, mask=ones, axis=1).requires_grad
    whole = masked(x, target.requires_grad_(), **named, mask=ones, axis=1)
    assert torch.equal(whole, plain(x, target, **named))
    whole.backward()
    assert ones.grad is not None
    assert ones.grad.abs().max() > 1e-3, "the masks get a gradient"


def test_a_weighted_loss_is_the_mean_over_the_channels_that_stay() -> None:
    x, target, weight = some(5, 8), some(5, 8).flip(0), some(5, 8).abs()
    mask = torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor(STAYS), 1.0)
    found = masked_huber_loss(x, target, weight=weight, mask=mask, axis=1)
    plain: Any = functional.huber_loss
    expected = plain(x[:, STAYS], target[:, STAYS], weight=weight[:, STAYS])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_group_norm_of_images_goes_over_several_of_them_at_once() -> None:
    mask, weight, bias = torch.linspace(0, 1, 6, dtype=torch.float64), some(6), some(6)
    # Behind a convolution over several weights at once, images lie so.
    images = some(2, 3, 6, 4, 4).movedim(1, 0)
    found = torch.func.vmap(lambda each: group(each, weight, bias, mask))(images)
    expected = torch.stack([group(each, weight, bias, mask) for each in images])
    torch.testing.assert_close(found, expected)


def test_a_group_norm_of_images_with_the_channels_last_compiles_in_one_graph() -> None:
    mask, weight, bias = torch.linspace(0, 1, 6, dtype=torch.float64), some(6), some(6)
    images = some(2, 6, 4, 4).to(memory_format=torch.channels_last)
    compiled = torch.compile(group, fullgraph=True, backend="eager")
    found = compiled(images, weight, bias, mask)
    torch.testing.assert_close(found, group(images, weight, bias, mask))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_what_a_mean_runs_over_may_be_written_to_afterwards() -> None:
    mask = torch.linspace(0, 1, 6, requires_grad=True)
    first = torch.randn(4, 6, requires_grad=True)
    for write in (torch.Tensor.relu_, torch.Tensor.zero_):
        hidden = first * 1.0
        mean = masked_mean(hidden, -1, mask=mask, axis=-1)
        write(hidden)
        found = torch.autograd.grad(mean.square().sum(), (first, mask))
        expected = masked_mean(first, -1, mask=mask, axis=-1).square().sum()
        torch.testing.assert_close(found, torch.autograd.grad(expected, (first, mask)))


def test_a_deviation_of_nothing_has_no_gradient() -> None:
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1.0, 0.5, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    masked_std(x, 1, mask=mask, axis=1).sum().backward()
    assert x.grad is not None
    assert mask.grad is not None
    assert not x.grad.any()
    assert not mask.grad.any()


@pytest.mark.parametrize("masked", [mean, var, layer, rms, group])
def test_an_axis_of_another_length_is_refused_before_anything_is_pruned(masked: Any) -> None:
    mask = torch.ones(8, dtype=torch.float64)
    with pytest.raises(AssertionError, match="an axis of 8 entries, .* here it has 12"):
        masked(some(3, 12), some(12), some(12), mask)


def statistics() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "layer_norm": lambda x, mask: masked_layer_norm(x, [8], mask=mask),
        "rms_norm": lambda x, mask: masked_rms_norm(x, [8], mask=mask),
        "group_norm": lambda x, mask: masked_group_norm(x, 2, mask=mask),
        "mean": lambda x, mask: masked_mean(x, mask=mask, axis=1),
        "var": lambda x, mask: masked_var(x, mask=mask, axis=1),
        "std": lambda x, mask: masked_std(x, mask=mask, axis=1),
    }


@pytest.mark.parametrize("name", statistics())
@pytest.mark.parametrize("soft", [False, True])
def test_statistics_of_what_is_detached_lead_to_no_layer(name: str, soft: bool) -> None:
    """As a running mean that is kept in a buffer, which must not hold on to a step's graph."""
    act, mask = statistics()[name], torch.ones(8, dtype=torch.float64)
    if soft:
        mask[0] = 0.3
    x = some(5, 8)
    assert not act(x, mask.requires_grad_()).requires_grad
    assert act(x.requires_grad_(), mask).requires_grad
