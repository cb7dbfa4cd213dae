"""Blocks that switch gradients off or on leave the caller's setting as it was; hooks are kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from pdp_fx.tracing import preserve
from pdp_fx.tracing.preserve import preserved
from tests.tracing.checks import Around, exact, opaque


class Blocks(nn.Module):
    """Every kind of block, nested, as a decorator, and one that follows the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.still, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    @torch.no_grad()
    def fixed(self, x: Tensor) -> Tensor:
        return self.still(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):
            x = self.first(x)
        with torch.no_grad():
            y = self.fixed(x)
            with torch.enable_grad():
                y = y + self.still(x)
        return self.last(x + y)


def test_a_graph_with_blocks_is_traced_again() -> None:
    class Still(Blocks):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.fixed(x)

    x = torch.randn(3, 4)
    again = exact(exact(Still(), x), x)
    assert "_set_grad_enabled(False)" in again.code
    for training in (False, True):
        with torch.no_grad():
            assert not any(part.requires_grad for part in again.train(training)(x))
            assert not torch.is_grad_enabled()
        kept, still = again(x)
        assert kept.requires_grad
        assert not still.requires_grad
        assert torch.is_grad_enabled()


class Inference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.still(x)


class HoldsInference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inference(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + self.inner(x).sum()


def test_gradients_of_every_kind_of_block() -> None:
    exact(Blocks(), torch.randn(3, 4))


@pytest.mark.parametrize("enabled", [False, True])
def test_the_caller_keeps_gradients_as_they_were(enabled: bool) -> None:
    gm = trace(Blocks(), torch.randn(3, 4))
    with torch.set_grad_enabled(enabled):
        assert gm(torch.randn(3, 4)).requires_grad is enabled
        assert torch.is_grad_enabled() is enabled


def test_inference_mode_stays_inside_an_opaque_module() -> None:
    with pytest.raises(TraceError, match=r"switches inference mode on.*test_gradients.py"):
        trace(Inference(), torch.randn(3, 4))
    model = HoldsInference()
    gm = trace(model, torch.randn(3, 4))
    assert "inference mode" in opaque(gm)["inner"]
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), model(x))


class Hooks(nn.Module):
    """Halves a gradient, and keeps it for others to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.register_hook(lambda gradient: gradient * 0.5)
        h.retain_grad()
        return h * 2


def test_a_module_that_hooks_gradients_stays_whole() -> None:
    gm = exact(nn.Sequential(nn.Linear(4, 4), Hooks()), torch.randn(3, 4), torch.randn(5, 4))
    assert opaque(gm)["1"].startswith("hooks the gradient of a tensor")


def test_a_forward_that_hooks_gradients_is_refused() -> None:
    with pytest.raises(TraceError, match=r"it hooks the gradient of a tensor \("):
        trace(Hooks(), torch.randn(3, 4))
    with pytest.raises(TraceError, match="or a hook of all modules does"), FlopCounterMode(display=False):
        trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4))


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * grad


rounded: Any = Rounded.apply
HELD: list[Any] = [rounded]


class RoundsByName(nn.Module):
    """Calls what the module of its code holds, as torch's own examples do."""

    def forward(self, x: Tensor) -> Tensor:
        return rounded(x)


class RoundsByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(x)


class RoundsByList(nn.Module):
    """Calls what is found nowhere by a name."""

    def forward(self, x: Tensor) -> Tensor:
        return HELD[0](x)


@pytest.mark.parametrize("inner", [RoundsByName(), RoundsByAttribute()], ids=["name", "attribute"])
def test_functions_looked_up_before_keep_their_gradients(inner: nn.Module) -> None:
    gm = exact(Around(inner), torch.randn(3, 4))
    assert not opaque(gm)
    assert rounded is HELD[0]


def test_functions_found_nowhere_are_refused() -> None:
    with pytest.raises(TraceError, match="an autograd function's apply that was looked up before"):
        trace(Around(RoundsByList()), torch.randn(3, 4))


def test_a_part_of_a_weight_is_written_to_without_gradients() -> None:
    """As where the bias of a forget gate is held at 1."""

    class Held(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.bias[1:3].fill_(1.0)
            return super().forward(input)

    gm = exact(Held(4, 4), torch.randn(2, 4))
    gm(torch.randn(2, 4)).sum().backward()
    assert torch.equal(gm.get_parameter("bias")[1:3], torch.ones(2))


class Asks(nn.Module):
    """Goes by whether gradients are on, or a tensor has any."""

    def __init__(self, asks: Callable[[Tensor], bool], factor: float = 2.0) -> None:
        super().__init__()
        self.asks, self.factor, self.layer = asks, factor, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.factor if self.asks(x) else x * 2.0


ASKS: tuple[Callable[[Tensor], bool], ...] = (
    lambda x: x.requires_grad,
    lambda x: not x.is_leaf,
    lambda x: torch.is_grad_enabled(),
)


@pytest.mark.parametrize("asks", ASKS)
def test_a_model_that_goes_by_whether_gradients_are_on_is_refused(asks: Callable[[Tensor], bool]) -> None:
    with pytest.raises(TraceError, match=r"where gradients are off .*test_gradients.py:\d+ asks whether"):
        trace(Asks(asks, 3.0), torch.randn(2, 4))


@pytest.mark.parametrize("asks", ASKS)
def test_a_model_that_does_the_same_without_gradients_is_followed(asks: Callable[[Tensor], bool]) -> None:
    exact(Asks(asks), torch.randn(2, 4))


def test_a_run_that_fails_leaves_gradients_as_they_were() -> None:
    def fails() -> None:
        with preserved(nn.Linear(4, 4)):
            torch._C._set_grad_enabled(False)
            raise ValueError("too early")

    with pytest.raises(ValueError, match="too early"):
        fails()
    assert torch.is_grad_enabled()


class GoesBackward(nn.Module):
    """Fills gradients of its weights in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.inner(x.detach()).pow(2).sum().backward()
        return self.outer(self.inner(x))


def test_gradients_that_runs_fill_are_taken_back() -> None:
    model = Around(GoesBackward())
    weight, bias = (model.get_parameter(f"inner.inner.{name}") for name in ("weight", "bias"))
    kept = bias.grad = torch.ones(4)
    trace(model, torch.randn(2, 4))
    assert weight.grad is None
    assert bias.grad is kept
    assert torch.equal(kept, torch.ones(4))


def test_what_another_setting_writes_to_is_put_back_at_once() -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    with preserve.unwritten(layer):
        preserve.all_is_written()
        with preserve.anything_may_be_written(), preserved(layer):
            layer.weight.data = layer.weight.data.bfloat16()
        assert layer.weight.dtype is torch.float32
        torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=0)


def test_all_is_restored_although_one_thing_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    model, (broken, mean) = nn.Sequential(*norms), (norm.get_buffer("running_mean") for norm in norms)

    def compare(one: Tensor, other: Tensor) -> bool:
        if one is broken:
            raise NotImplementedError
        return torch.equal(one, other)

    def changes() -> None:
        with preserved(model):
            model.eval()
            mean.add_(1)

    monkeypatch.setattr(preserve, "are_equal", compare)
    with pytest.raises(NotImplementedError):
        changes()
    assert all(module.training for module in model.modules())
    assert torch.equal(mean, torch.zeros(4))
