import pytest
import torch
from torch import Tensor

from pdp_fx.ops import nm_mask
from pdp_fx.ops.nm import group_view, nm_threshold
from pdp_fx.ops.nm_mask import nm_soft_mask
from pdp_fx.ops.soft_mask import soft_mask

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 24), (3, 48, 7), (6, 24, 3, 3), (1, 24, 2, 2), (4, 48, 1, 1))
TAU = 1e-4


def by_definition(weight: Tensor, m: int, kappa: Tensor) -> Tensor:
    return soft_mask(group_view(weight, m), nm_threshold(weight, m, kappa), TAU).flatten(1, 2)


def gradient(masked: Tensor, weight: Tensor, upstream: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(masked, weight, upstream)
    return grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", [2, 3, 4, 8])
@pytest.mark.parametrize("kappa", [0, 1, 500_000, 1_000_000])
def test_mask_and_gradient_are_those_of_the_definition(shape: tuple[int, ...], m: int, kappa: int) -> None:
    weight = (torch.randn(shape, dtype=torch.float64) * 0.03).requires_grad_()
    upstream, pruned = torch.randn_like(weight), torch.tensor(kappa)
    expected = by_definition(weight, m, pruned)
    masked = nm_soft_mask(weight, m, pruned, TAU)
    torch.testing.assert_close(masked, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(
        gradient(masked, weight, upstream), gradient(expected, weight, upstream), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kappa", [500_000, 2_000_000])
def test_no_weight_becomes_subnormal(kappa: int) -> None:
    torch.set_flush_denormal(False)
    weight = torch.rand(8, 24).mul_(0.3).add_(1e-3).requires_grad_()
    masked = nm_soft_mask(weight, 4, torch.tensor(kappa), TAU)
    (grad,) = torch.autograd.grad(masked.sum(), weight)
    for result in (masked.detach(), grad):
        assert result.count_nonzero() < result.numel()
        assert result[result != 0].abs().min() > torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_memory_format_of_the_weight_are_kept(dtype: torch.dtype) -> None:
    weight = (torch.randn(8, 16, 3, 3) * 0.03).to(dtype).to(memory_format=torch.channels_last)
    weight.requires_grad_()
    masked = nm_soft_mask(weight, 4, torch.tensor(1_500_000), TAU)
    assert masked.dtype == dtype
    assert masked.stride() == weight.stride()
    grad = gradient(masked, weight, torch.randn(weight.shape).to(dtype))
    assert grad.dtype == dtype
    assert grad.stride() == weight.stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_pruned_is_the_identity_bit_for_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 16).to(dtype).requires_grad_()
    upstream = torch.randn_like(weight)
    masked = nm_soft_mask(weight, 4, torch.tensor(0), TAU)
    assert masked.equal(weight)
    assert gradient(masked, weight, upstream).equal(upstream)


def test_blocks_of_rows_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = (torch.randn(37, 16, 3, 3) * 0.03).requires_grad_()
    kappa, upstream = torch.tensor(1_500_000), torch.randn(weight.shape)
    whole = nm_soft_mask(weight, 4, kappa, TAU)
    expected = gradient(whole, weight, upstream)
    monkeypatch.setattr(nm_mask, "BLOCK", 16 * 9 * 4)
    blocks = nm_soft_mask(weight, 4, kappa, TAU)
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(blocks, weight, upstream), expected, rtol=1e-5, atol=1e-6)


def test_only_the_weight_is_kept_for_backward() -> None:
    weight = (torch.randn(6, 16) * 0.03).requires_grad_()
    kappa = torch.tensor(1_500_000)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nm_soft_mask(weight, 4, kappa, TAU)
    assert {tensor.data_ptr() for tensor in saved} == {weight.data_ptr(), kappa.data_ptr()}


def test_tau_may_be_a_tensor_and_the_gradient_has_a_gradient() -> None:
    weight = (torch.randn(2, 8, dtype=torch.float64) * 0.03).requires_grad_()
    kappa, tau = torch.tensor(1_500_000), torch.tensor(TAU, dtype=torch.float64)
    assert nm_soft_mask(weight, 4, kappa, tau).equal(nm_soft_mask(weight, 4, kappa, TAU))

    def slope(weight: Tensor) -> Tensor:
        masked = nm_soft_mask(weight, 4, kappa, tau).sum()
        (grad,) = torch.autograd.grad(masked, weight, create_graph=True)
        return grad

    plain = gradient(nm_soft_mask(weight, 4, kappa, tau), weight, torch.ones_like(weight))
    torch.testing.assert_close(slope(weight), plain, rtol=1e-11, atol=0)
    assert slope(weight).sum().requires_grad


@pytest.mark.parametrize("kappa", [0, 1_000_000, 1_500_000])
def test_a_compiled_step_agrees_with_the_eager_one(kappa: int) -> None:
    def loss(weight: Tensor, kappa: Tensor, inputs: Tensor) -> Tensor:
        return (inputs @ nm_soft_mask(weight, 4, kappa, TAU).T).square().sum()

    weight, inputs = (torch.randn(6, 16) * 0.03).requires_grad_(), torch.randn(5, 16)
    pruned = torch.tensor(kappa)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    eager_loss, compiled_loss = loss(weight, pruned, inputs), compiled(weight, pruned, inputs)
    torch.testing.assert_close(compiled_loss, eager_loss, rtol=1e-5, atol=0)
    (eager_grad,) = torch.autograd.grad(eager_loss, weight)
    (compiled_grad,) = torch.autograd.grad(compiled_loss, weight)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=1e-4, atol=1e-5)
