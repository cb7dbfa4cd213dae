"""Distributions of torch, which check the numbers that they are given."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence

from tests.tracing.checks import exact, opaque


class Policy(nn.Module):
    """What actor-critic networks and variational autoencoders do with distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale, self.choice = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        latent = Normal(self.mean(x), self.scale(x).exp())
        prior = Normal(torch.zeros_like(latent.mean), torch.ones_like(latent.mean))
        choice = Categorical(logits=self.choice(x))
        action = choice.probs.argmax(-1)
        drawn = latent.rsample() if self.training else latent.mean
        return drawn, kl_divergence(latent, prior).sum(-1), choice.entropy(), choice.log_prob(action)


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Distribution:
        return Independent(Normal(self.mean(x), 1.0), 1)


def test_what_is_computed_from_distributions_is_followed() -> None:
    assert not opaque(exact(Policy(), torch.randn(3, 4), torch.randn(5, 4)))


class GoesOn(nn.Module):
    """Takes the exponent of scales that a distribution refuses."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return Normal(x, x).stddev
        except ValueError:
            return Normal(x, x.exp()).stddev


def test_a_part_that_goes_on_where_a_distribution_refuses_numbers_is_kept_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch.compile turns that off for the whole process.
    monkeypatch.setattr(Distribution, "_validate_args", True)
    gm = exact(nn.Sequential(nn.Identity(), GoesOn()), torch.rand(3, 4) + 1, torch.randn(5, 4))
    assert list(opaque(gm)) == ["1"]


def test_a_distribution_can_be_returned() -> None:
    gm = exact(Returns(), torch.randn(3, 4))
    assert gm(torch.randn(5, 4)).log_prob(torch.zeros(5, 3)).shape == (5,)
