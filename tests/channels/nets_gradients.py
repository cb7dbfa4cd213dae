"""Nets that take gradients as they run: forces are those of an energy, and a step of training is a layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, vectors

WIDTH, SIZE = 6, 8


class Energy(nn.Module):
    """Energies of rows of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


class Forces(Energy):
    """The forces on positions, as in models of molecules."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


class ForcesInAnyMode(Energy):
    """As above where a caller may have gradients off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return slope


class ForcesOfSets(Energy):
    """Forces on several positions each; whether they can be differentiated is a number, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return slope


class ReadsForces(nn.Module):
    """Forces of what a layer makes are read by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.forces, self.last = nn.Linear(WIDTH, WIDTH), Forces(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        energy, force = self.forces(self.first(x))
        return self.last(force) + energy


class PenalisesSlopes(Energy):
    """The penalty on gradients of Wasserstein critics."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.energy(x.requires_grad_())
        (slope,) = torch.autograd.grad(score, x, torch.ones_like(score), create_graph=True)
        return score + (slope.norm(dim=1, keepdim=True) - 1) ** 2


class ForcesOfManyActivations(Forces):
    """The slopes of activations that are no smooth functions, or not only."""

    def energy(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        x = F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.hardswish(x) + F.hardtanh(x)
        return self.out(F.celu(x) + F.softshrink(x) + F.hardshrink(x))


class LearnsOnce(Energy):
    """Takes one step of training for each call, as in meta-learning."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.energy(x).square().mean()
        slopes = torch.autograd.grad(loss, list(self.inner.parameters()), create_graph=True)
        weight, bias = (p - 0.1 * s for p, s in zip(self.inner.parameters(), slopes, strict=True))
        return self.out(torch.tanh(F.linear(x, weight, bias)))


class DecidesByForces(Energy):
    """Decides by its data, so that it is kept whole, and takes gradients in there."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return slope if slope.sum() > 0 else -slope


class HoldsForces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, WIDTH)
        self.held, self.last = DecidesByForces(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.held(self.middle(torch.relu(self.first(x)))))


GRADIENTS: tuple[Construct, ...] = (
    Construct(Forces, vectors(), removed=4),
    Construct(ForcesInAnyMode, vectors(), removed=4),
    Construct(ForcesOfSets, lambda batch: (torch.randn(batch, 5, WIDTH, dtype=torch.float64),), removed=4),
    Construct(ReadsForces, vectors(), removed=4),
    Construct(PenalisesSlopes, vectors(), removed=4),
    Construct(ForcesOfManyActivations, vectors(), removed=4),
    Construct(LearnsOnce, vectors(), removed=4),
    Construct(HoldsForces, vectors(), removed=4, reason="decides by its data"),
)
