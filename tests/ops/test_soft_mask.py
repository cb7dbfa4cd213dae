import math

import pytest
import torch
from torch import Tensor

from pdp_fx.ops.nm import group_view
from pdp_fx.ops.soft_mask import FAINT, soft_mask, soft_mask_value
from pdp_fx.ops.threshold import threshold

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TAU = 1e-4
DENSE = torch.tensor(-math.inf)


def layer(dtype: torch.dtype = torch.float64, *, scale: float = 0.03) -> Tensor:
    return (torch.randn(6, 8, 3, 3, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def gradient(weight: Tensor, t: Tensor, upstream: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(soft_mask(weight, t, TAU), weight, upstream)
    return grad


def equation_2(weight: Tensor, t: Tensor, upstream: Tensor) -> Tensor:
    squared, keep = weight.detach().double().square(), t.double()
    mask = torch.softmax(torch.stack((squared, keep.square().expand_as(squared))) / TAU, dim=0)[0]
    return (mask + 2 * squared / TAU * mask * (1 - mask)) * upstream


def test_forward_is_equation_1() -> None:
    weight = layer()
    t = threshold(weight, torch.tensor(300))
    exponentials = (weight.square() / TAU).exp(), (t.square() / TAU).exp()
    mask = exponentials[0] / (exponentials[0] + exponentials[1])
    torch.testing.assert_close(soft_mask(weight, t, TAU), mask * weight, rtol=1e-11, atol=0)
    torch.testing.assert_close(soft_mask_value(weight, t, TAU), mask.detach(), rtol=1e-11, atol=0)


def test_gradient_is_equation_2_with_a_constant_threshold() -> None:
    weight = layer()
    t = threshold(weight, torch.tensor(300))
    upstream = torch.randn_like(weight)
    expected = equation_2(weight, t, upstream)
    torch.testing.assert_close(gradient(weight, t, upstream), expected, rtol=1e-11, atol=1e-14)

    def masked(weight: Tensor) -> Tensor:
        return soft_mask(weight, t, TAU)

    # Weights of 0.03 move by far more than a step of 1e-8; tau = 1e-4 makes the third derivative about 1e6.
    torch.autograd.gradcheck(masked, (weight,), eps=1e-8, atol=1e-6, rtol=1e-6)


def test_gradient_of_a_group_shaped_threshold_is_equation_2() -> None:
    weight = group_view(layer(), 4).detach().requires_grad_()
    t = weight.detach().abs().mean(2, keepdim=True)
    upstream = torch.randn_like(weight)
    expected = equation_2(weight, t, upstream)
    torch.testing.assert_close(gradient(weight, t, upstream), expected, rtol=1e-11, atol=1e-14)


def test_a_threshold_that_asks_for_a_gradient_gets_none() -> None:
    weight, t = layer(), torch.tensor(0.02, dtype=torch.float64, requires_grad=True)
    soft_mask(weight, t, TAU).sum().backward()
    assert weight.grad is not None
    assert t.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity_is_the_identity_bit_for_bit(dtype: torch.dtype) -> None:
    for weight in (layer(dtype), layer(dtype, scale=1e4)):
        upstream = torch.randn_like(weight)
        upstream[0], upstream[1] = -0.0, math.inf
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]
        masked = soft_mask(weight, DENSE.to(weight.device), TAU)
        assert masked.detach().view(bits).equal(weight.detach().view(bits))
        assert gradient(weight, DENSE, upstream).view(bits).equal(upstream.view(bits))
        assert soft_mask_value(weight, DENSE, TAU).eq(1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_number", [False, True])
def test_no_weight_becomes_subnormal(dtype: torch.dtype, as_number: bool) -> None:
    torch.set_flush_denormal(False)
    weight = layer(torch.float32, scale=0.05).detach().to(dtype).requires_grad_()
    for t in torch.linspace(0.05, 0.15, 21):
        given = float(t) if as_number else t
        masked = soft_mask(weight, given, TAU)
        (grad,) = torch.autograd.grad(masked.sum(), weight)
        under_func = torch.func.grad(lambda w, t=given: soft_mask(w, t, TAU).sum())(weight.detach())
        for result in (masked, grad, under_func):
            least = result.detach()[result != 0].abs().min()
            assert least > torch.finfo(dtype).tiny
        pruned = masked == 0
        assert bool(pruned.any()) == bool((weight.float().square() - t**2 < FAINT * TAU).any())
        assert not grad[pruned].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_weights_stay_finite(dtype: torch.dtype) -> None:
    weight = torch.tensor([0.0, -0.0, 1e-4, -1.0, 300.0, -1e4], dtype=dtype, requires_grad=True)
    for t in (0.0, 1e-4, 1.0, 300.0, 1e4):
        threshold_now = torch.tensor(t)
        masked = soft_mask(weight, threshold_now, TAU)
        assert masked.isfinite().all()
        assert (masked.abs() <= weight.abs()).all()
        # At |w| = t equation 2 is 1/2 + t^2 / (2 tau), 5e11 for t = 1e4: half precision cannot hold it.
        if dtype != torch.float16:
            assert gradient(weight, threshold_now, torch.ones_like(weight)).isfinite().all()


@pytest.mark.parametrize("scale", [1e15, 1e18, 1e20, 1e38])
@pytest.mark.parametrize("as_number", [True, False])
def test_weights_of_a_training_that_has_exploded_have_finite_masks(scale: float, as_number: bool) -> None:
    weight = (torch.linspace(-3, 3, 60) * scale).requires_grad_()
    t = threshold(weight, torch.tensor(30))
    masked = soft_mask(weight, t if as_number else t.expand(1), TAU)
    assert masked.isfinite().all()
    assert masked[weight.abs() > t].equal(weight[weight.abs() > t])


def test_an_infinite_weight_stays_infinite_and_leaves_its_neighbours_alone() -> None:
    weight = torch.tensor([0.01, math.inf, -math.inf, 0.03], requires_grad=True)
    finite = weight.detach()[[0, 3]].requires_grad_()
    for t in (DENSE, torch.tensor(0.02)):
        masked = soft_mask(weight, t, TAU)
        assert masked[[1, 2]].tolist() == [math.inf, -math.inf]
        assert soft_mask_value(weight, t, TAU)[[1, 2]].tolist() == [1.0, 1.0]
        assert masked[[0, 3]].equal(soft_mask(finite, t, TAU))
        assert gradient(weight, t, torch.ones(4))[[0, 3]].equal(gradient(finite, t, torch.ones(2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_its_last_rounding_only(dtype: torch.dtype) -> None:
    half_ulp = torch.finfo(dtype).eps / 2
    weight = layer(dtype)
    t = threshold(weight, torch.tensor(300))
    exact = soft_mask(weight.double(), t.double(), TAU)
    masked = soft_mask(weight, t, TAU)
    assert masked.dtype == dtype
    smallest_step = torch.finfo(dtype).smallest_normal * 2 * half_ulp
    torch.testing.assert_close(masked.double(), exact, rtol=1.01 * half_ulp, atol=smallest_step)
    upstream = torch.randn_like(weight)
    expected = equation_2(weight, t, upstream.double())
    found = gradient(weight, t, upstream).double()
    torch.testing.assert_close(found, expected, rtol=1.01 * half_ulp, atol=smallest_step)


def test_the_memory_format_of_the_weight_is_kept() -> None:
    weight = layer().detach().to(memory_format=torch.channels_last).requires_grad_()
    t = threshold(weight, torch.tensor(300))
    masked = soft_mask(weight, t, TAU)
    assert masked.stride() == weight.stride()
    assert gradient(weight, t, torch.ones(weight.shape, dtype=weight.dtype)).stride() == weight.stride()
    groups = group_view(weight, 4)
    by_group = soft_mask(groups, groups.abs().mean(2, keepdim=True), TAU)
    assert by_group.flatten(1, 2).stride() == weight.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    weight = layer(dtype)
    t = threshold(weight, torch.tensor(300))
    expected, upstream = soft_mask(weight, t, TAU), torch.randn_like(weight)
    expected_grad = gradient(weight, t, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        masked = soft_mask(weight, threshold(weight, torch.tensor(300)), TAU)
        (grad,) = torch.autograd.grad(masked, weight, upstream)
    assert masked.dtype == dtype
    assert masked.equal(expected)
    assert grad.equal(expected_grad)


def test_only_the_weight_and_the_threshold_are_kept_for_backward() -> None:
    weight = layer()
    t = threshold(weight, torch.tensor(300))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        soft_mask(weight, t, TAU)
    assert {tensor.data_ptr() for tensor in saved} == {weight.data_ptr()}


def test_a_compiled_step_agrees_with_the_eager_one() -> None:
    def loss(weight: Tensor, count: Tensor, inputs: Tensor) -> Tensor:
        masked = soft_mask(weight, threshold(weight, count), TAU)
        return torch.nn.functional.conv2d(inputs, masked).square().sum()

    weight, count, inputs = layer(torch.float32), torch.tensor(300), torch.randn(2, 8, 5, 5)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    eager_loss, compiled_loss = loss(weight, count, inputs), compiled(weight, count, inputs)
    torch.testing.assert_close(compiled_loss, eager_loss, rtol=1e-6, atol=0)
    (eager_grad,) = torch.autograd.grad(eager_loss, weight)
    (compiled_grad,) = torch.autograd.grad(compiled_loss, weight)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tau_may_be_a_tensor(dtype: torch.dtype) -> None:
    weight = layer(dtype)
    t, upstream, tau = (
        threshold(weight, torch.tensor(300)),
        torch.randn_like(weight),
        torch.tensor(TAU, dtype=torch.float64),
    )
    assert soft_mask(weight, t, tau).equal(soft_mask(weight, t, float(tau)))
    (grad,) = torch.autograd.grad(soft_mask(weight, t, tau), weight, upstream)
    assert grad.equal(gradient(weight, t, upstream))


def test_the_gradient_has_a_gradient() -> None:
    weight = layer()
    t = threshold(weight, torch.tensor(300))

    def slope(weight: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(soft_mask(weight, t, TAU).sum(), weight, create_graph=True)
        return grad

    torch.testing.assert_close(
        slope(weight), gradient(weight, t, torch.ones_like(weight)), rtol=1e-12, atol=0
    )
    torch.autograd.gradcheck(slope, (weight,), eps=1e-8, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_masks_the_same_without_waiting() -> None:
    weight = layer(torch.float32)
    t, upstream = threshold(weight, torch.tensor(300)), torch.randn(weight.shape)
    on_device, t_there, upstream_there = weight.detach().cuda().requires_grad_(), t.cuda(), upstream.cuda()
    gradient(on_device, t_there, upstream_there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        masked, grad = soft_mask(on_device, t_there, TAU), gradient(on_device, t_there, upstream_there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(masked.cpu(), soft_mask(weight, t, TAU), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(grad.cpu(), gradient(weight, t, upstream), rtol=1e-5, atol=1e-5)
