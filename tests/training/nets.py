"""What the training tests have in common: a small residual net, its data, and an ordinary training step."""

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.pruner import Pruner
from pdp_fx.spec import Forward, Rule

RULES: dict[str, Rule] = {
    "unstructured": Unstructured(0.8),
    "n:m": NM(2, 4),
    "channels": Channels(ratio=0.5),
}
RAMP = Schedule(start=1, epsilon=0.25, per="step")


class Net(nn.Module):
    """Three convolutions, one of them around a residual connection, and a linear layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.inner = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(width)
        self.outer = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, 4, h, w) to (n, 10)."""
        stream = torch.relu(self.norm(self.stem(images)))
        stream = torch.relu(stream + self.outer(torch.relu(self.inner_norm(self.inner(stream)))))
        return self.head(stream.mean((2, 3)))


def batch(seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 4, 6, 6, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


def prepared(
    rule: Rule,
    schedule: Schedule = RAMP,
    width: int = 8,
    tau: float | str = 1e-4,
    forward: Forward = "soft",
    pruned_decay: float = 0.0,
    tau_end: float | None = None,
) -> fx.GraphModule:
    """The net, the same at every call, prepared for ``rule``."""
    torch.manual_seed(0)
    spec = PruneSpec(
        rule, schedule=schedule, tau=tau, tau_end=tau_end, forward=forward, pruned_decay=pruned_decay
    )
    return pdp_fx.prepare(Net(width), spec, batch()[0])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An ordinary optimizer."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    call: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """One step of training and of the schedule; ``call`` is what is run when that is not ``model``."""
    images, labels = batch(seed)
    run = model if call is None else call
    loss = functional.cross_entropy(run(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pdp_fx.step(model)
    return loss.item()


def state(model: nn.Module) -> Pruner:
    """The pruning state inside a prepared model."""
    found = model.get_submodule("pdp")
    assert isinstance(found, Pruner)
    return found


def pruned_counts(model: nn.Module) -> list[int]:
    """How many units each mask prunes now, counted in its hard mask."""
    masks = state(model).mask_items()
    weights = [[model.get_parameter(name) for name in mask.parameters_read] for _, mask in masks]
    return [int(mask.pruned(*read).sum()) for (_, mask), read in zip(masks, weights, strict=True)]
