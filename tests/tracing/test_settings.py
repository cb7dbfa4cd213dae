"""Models that go by the settings of their caller: autocast, and inference mode."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, is_inference_mode_enabled, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdp_fx import PruneSpec, Schedule, Unstructured, convert, prepare, step
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import Around, exact, opaque


class Asks(nn.Module):
    """Does something else where a setting is on."""

    def __init__(self, asks: Callable[[], bool], factor: float) -> None:
        super().__init__()
        self.asks, self.factor, self.layer = asks, factor, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.factor if self.asks() else x * 2.0


SETTINGS: dict[str, Callable[[], bool]] = {
    "under autocast": lambda: torch.is_autocast_enabled("cpu"),
    "in inference mode": lambda: is_inference_mode_enabled(),  # noqa: PLW0108 as a model's code calls it
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_that_goes_by_a_setting_is_refused(setting: str) -> None:
    with pytest.raises(TraceError, match=rf"{setting} it .*test_settings.py:\d+ asks whether that is so"):
        trace(Asks(SETTINGS[setting], 3.0), torch.randn(2, 4))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_that_asks_and_does_the_same_is_followed(setting: str) -> None:
    exact(Asks(SETTINGS[setting], 2.0), torch.randn(2, 4))


class Leaves(nn.Module):
    """Computes in float32 also where autocast is on, and enters no block where it is off anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        on = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if on else contextlib.nullcontext():
            return self.last(x.float().relu())


def test_a_model_that_leaves_autocast_only_if_it_is_on_leaves_it() -> None:
    model, x = Leaves(), torch.randn(3, 4)
    gm = exact(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = gm(x), model(x)
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found, expected)


class HalvesSaved(nn.Module):
    """Saves half of each number for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return torch.tanh(self.layer(x))


def test_what_changes_what_is_saved_for_backward_stays_whole() -> None:
    gm = exact(Around(HalvesSaved()), torch.randn(3, 4))
    (why,) = opaque(gm).values()
    assert why.startswith("changes what is saved for the backward pass")
    with pytest.raises(TraceError, match="saved for the backward pass, by saved_tensors_hooks"):
        trace(HalvesSaved(), torch.randn(3, 4))


class GoesThrough(nn.Module):
    """Goes beyond a rounding, with gradients straight through, but only where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rounded = torch.round(x * 4) / 4
        if self.training and torch.is_grad_enabled():
            rounded = x + 2 * (rounded - x).detach()
        return self.last(rounded)


def test_training_mode_insists_on_the_gradients_that_the_model_asks_for() -> None:
    model, x = GoesThrough(), torch.randn(3, 4)
    gm = exact(model, x)
    assert not opaque(gm)
    with torch.no_grad():
        assert torch.equal(gm.eval()(x), model.eval()(x))
        with pytest.raises(AssertionError, match=r"test_settings.py:\d+ asks whether gradients are on"):
            gm.train()(x)


class ChoosesKernel(nn.Module):
    """Says by which kernel attention is to be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x, x)


def test_what_chooses_the_kernel_of_attention_stays_whole() -> None:
    gm = exact(Around(ChoosesKernel()), torch.randn(2, 3, 4), torch.randn(5, 3, 4))
    (why,) = opaque(gm).values()
    assert why.startswith("chooses the kernel of attention")


def test_what_is_saved_on_another_device_is_the_same() -> None:
    class SavesElsewhere(HalvesSaved):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return torch.tanh(self.layer(x))

    assert not opaque(exact(SavesElsewhere(), torch.randn(3, 4)))


def test_a_block_that_sets_gradients_to_what_they_are_is_refused() -> None:
    """It would turn them on where they are off."""

    class SetsThem(HalvesSaved):
        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                return self.layer(x)

    with pytest.raises(TraceError, match=r"where gradients are off it .*test_settings.py:\d+ asks"):
        trace(SetsThem(), torch.randn(3, 4))


class GoesBy(nn.Module):
    """Takes another way by what a tensor says of its gradients."""

    def __init__(self, asks: Callable[["GoesBy", Tensor, Tensor], bool], factor: float) -> None:
        super().__init__()
        self.asks, self.factor = asks, factor
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h * self.factor if self.asks(self, x, h) else h * 2)


WAYS: dict[str, Callable[[GoesBy, Tensor, Tensor], bool]] = {
    "last.weight needs": lambda model, x, h: model.last.weight.requires_grad,
    "first.weight needs": lambda model, x, h: any(p.requires_grad for p in model.parameters()),
    "an input needs": lambda model, x, h: x.requires_grad,
    "a result needs": lambda model, x, h: model.training and h.requires_grad,
}


def turned(model: nn.Module, gm: nn.Module, x: Tensor, way: str) -> None:
    """Freeze all parameters, or have the input need gradients."""
    x.requires_grad_(way == "an input needs")
    for parameter in (*model.parameters(), *gm.parameters()):
        parameter.requires_grad_(way == "an input needs")


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_insists_on_what_needs_gradients_where_the_model_goes_by_it(way: str) -> None:
    model, x = GoesBy(WAYS[way], 3.0), torch.randn(2, 4)
    gm = exact(model, x)
    with torch.no_grad():
        assert torch.equal(gm.eval()(x), model.eval()(x))
    turned(model, gm, x, way)
    with pytest.raises(AssertionError, match=rf"test_settings.py:\d+ asks whether {way} gradients"):
        gm.train()(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_insists_on_nothing_that_changes_nothing(way: str) -> None:
    model, x = GoesBy(WAYS[way], 2.0), torch.randn(2, 4)
    gm = exact(model, x)
    turned(model, gm, x, way)
    assert torch.equal(gm.train()(x), model.train()(x))


def test_a_tied_weight_is_asked_by_either_name() -> None:
    model, x = GoesBy(lambda model, x, h: model.last.weight.requires_grad, 3.0), torch.randn(2, 4)
    model.first, model.last = nn.Linear(4, 4), nn.Linear(4, 4)
    model.last.weight = model.first.weight
    gm = exact(model, x)
    model.first.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match="asks whether .*weight needs gradients"):
        gm(x)


def test_masks_leave_to_the_parameter_whether_it_is_trained() -> None:
    model, x = GoesBy(WAYS["last.weight needs"], 3.0), torch.randn(2, 4)
    spec = PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0, length=2))
    prepared = prepare(model, spec, x)
    step(prepared)
    prepared(x).sum().backward()
    with torch.no_grad():
        masked = prepared.eval()(x)
    assert torch.equal(convert(prepared)(x), masked)


def test_a_graph_insists_on_the_dtype_of_autocast_that_the_model_computes_in() -> None:
    class Follows(HalvesSaved):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).to(torch.get_autocast_dtype("cpu")).float()

    model, x = Follows(), torch.randn(3, 4)
    gm = exact(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gm(x), model(x))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(AssertionError, match=r"test_settings.py:\d+ asks for the dtype of autocast"),
    ):
        gm(x)


class StopsGradients(GoesBy):
    """Gives the same whatever the answer is, but lets other gradients pass."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h if self.asks(self, x, h) else h.detach())


class StartsFromInput(GoesBy):
    """As models of energies or scores do."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.asks(self, x, x):
            x = x.detach().requires_grad_()
        return self.last(self.first(x))


def asks_the_input(model: GoesBy, x: Tensor, h: Tensor) -> bool:
    return x.requires_grad


@pytest.mark.parametrize("kind", [StopsGradients, StartsFromInput])
def test_a_graph_insists_on_what_needs_gradients_where_only_these_go_by_it(kind: type[GoesBy]) -> None:
    model, x = kind(asks_the_input, 0.0), torch.randn(2, 4)
    gm = exact(model, x)
    x.requires_grad_()
    with pytest.raises(AssertionError, match=r"test_settings.py:\d+ asks whether an input needs gradients"):
        gm.train()(x)


ORIGINS: dict[str, Callable[[GoesBy, Tensor, Tensor], bool]] = {
    "is_leaf": lambda model, x, h: not x.is_leaf,
    "grad_fn": lambda model, x, h: x.grad_fn is not None,
}


@pytest.mark.parametrize("way", ORIGINS)
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_graph_insists_on_inputs_that_are_no_results_where_the_model_goes_by_it(
    way: str, factor: float
) -> None:
    model, x = GoesBy(ORIGINS[way], factor), torch.randn(2, 4)
    gm = exact(model, x)
    made = x.clone().requires_grad_() * 1
    if factor == 2:
        assert torch.equal(gm(made), model(made))
        return
    with pytest.raises(AssertionError, match="asks whether an input"):
        gm(made)
    with pytest.raises(AssertionError, match="asks whether an input"):
        gm(made.detach().requires_grad_())


def test_a_model_that_asks_whether_a_result_is_of_inference_mode_is_refused() -> None:
    with pytest.raises(TraceError, match=r"in inference mode it .*test_settings.py:\d+ asks"):
        trace(GoesBy(lambda model, x, h: h.is_inference(), 3.0), torch.randn(2, 4))
    exact(GoesBy(lambda model, x, h: h.is_inference(), 2.0), torch.randn(2, 4))


def test_what_looks_at_a_gradient_stays_whole() -> None:
    inner = GoesBy(lambda model, x, h: model.first.weight.grad is not None, 3.0)
    gm = exact(Around(inner), torch.randn(2, 4))
    assert list(opaque(gm)) == ["inner"]
    assert opaque(gm)["inner"].startswith("looks at the gradient of a tensor")
