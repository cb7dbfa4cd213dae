from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from pdp_fx.tracing.examples import example_call
from pdp_fx.tracing.forgetting import forgetting
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import tried
from tests.tracing.checks import exact


def test_nothing_is_kept_for_a_backward_pass_though_gradients_are_on() -> None:
    weight = torch.ones(3, requires_grad=True)

    def work() -> Tensor:
        assert torch.is_grad_enabled()
        return (weight * 2).exp()

    result = forgetting(work)
    with pytest.raises(RuntimeError, match="was not kept"):
        result.sum().backward()


def test_work_that_needs_gradients_is_done_again_on_the_same_state() -> None:
    module = nn.BatchNorm1d(3)
    count = module.get_buffer("num_batches_tracked")
    runs: list[int] = []

    def work() -> Tensor:
        runs.append(int(count))
        given = torch.ones(4, 3, requires_grad=True)
        return torch.autograd.grad(module(given).exp().sum(), given)[0]

    assert forgetting(work, module).shape == (4, 3)
    assert runs == [0, 0]


def test_an_expected_error_ends_the_work() -> None:
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        forgetting(work, expected=(KeyError,))
    assert runs == [1]


def test_hooks_that_a_failed_call_has_left_are_taken_back_in_order() -> None:
    """As `torch.utils.checkpoint` leaves them in torch 2.11."""

    def hooked() -> Generator[None, None, None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    def work() -> None:
        generator = hooked()
        next(generator)
        raise KeyError("x")

    with pytest.raises(KeyError) as kept:
        forgetting(work, expected=(KeyError,))
    weight = torch.ones(3, requires_grad=True)
    weight.exp().sum().backward()
    assert kept.type is KeyError


class Force(nn.Module):
    """Differentiates in its forward pass, and looks at numbers, so that it stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        given = x.detach().requires_grad_()
        force = torch.autograd.grad(given.pow(3).sum(), given)[0]
        return x + force if float(force.sum()) > -1e9 else x


class Forced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.force = nn.Linear(4, 4), Force()

    def forward(self, x: Tensor) -> Tensor:
        return self.force(self.linear(x))


def test_a_model_that_differentiates_in_its_forward_is_traced() -> None:
    model, x = Forced(), torch.randn(2, 4)
    exact(model, x)


def test_indices_beyond_a_made_up_example_are_refused() -> None:
    """Torch does not look at them by default, and then writes elsewhere."""

    def neighbours(x: Tensor) -> Tensor:
        edges = torch.tensor([[0, 7], [7, 0]])
        return torch.sparse_coo_tensor(edges, x.new_ones(2), (len(x), len(x))).coalesce()

    assert forgetting(lambda: neighbours(torch.ones(8, 2))).shape == (8, 8)
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        forgetting(lambda: neighbours(torch.ones(2, 2)))


@pytest.mark.parametrize("catches", [False, True])
def test_an_error_of_what_was_not_kept_is_not_expected(catches: bool) -> None:
    def work() -> Tensor:
        given = torch.ones(3, requires_grad=True)
        try:
            return torch.autograd.grad(given.exp().sum(), given)[0]
        except RuntimeError:
            if not catches:
                raise
            return given

    torch.testing.assert_close(forgetting(work, expected=(Exception,)), torch.ones(3).exp())


class ByGradients(nn.Module):
    """Differentiates in its forward pass, and gives something else where gradients are off.

    Args:
        differentiate: gives the gradient of a function at a point.
    """

    def __init__(self, differentiate: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.differentiate = nn.Linear(3, 4), differentiate

    def forward(self, x: Tensor) -> Tensor:
        tracks = torch.is_grad_enabled()
        with torch.enable_grad():
            force = self.differentiate(lambda y: self.linear(y).pow(2).sum(), x.detach().requires_grad_())
        return force if tracks else force * 2


def of_autograd(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    return torch.autograd.grad(function(at), at, create_graph=True)[0]


def of_func(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    return torch.func.grad(function)(at)


@pytest.mark.parametrize("differentiate", [of_autograd, of_func])
def test_models_that_differentiate_are_checked_like_others(
    differentiate: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> None:
    inner, x = ByGradients(differentiate), torch.randn(2, 3)
    assert isinstance(tried(inner, example_call(x), False), Outcome)
    with pytest.raises(
        TraceError, match="where gradients are off it returns another|the forward of ByGradients itself"
    ):
        trace(inner, x)
    model = nn.Sequential(inner, nn.Linear(3, 2))
    gm = exact(model, x)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
