"""The paper's recipes for ImageNet: the PDP-base rows of its table of hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torchvision  # pyright: ignore[reportMissingTypeStubs]
from torch import nn

from benchmarks.mobilenet_v1 import MobileNetV1
from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.spec import Rule


def _torchvision(name: str, classes: int) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, num_classes=classes)


@dataclass(frozen=True)
class Recipe:
    """How the paper trains one network.

    Attributes:
        make: builds the network for a number of classes.
        sparsity: share of the weights that are pruned in the end.
        epochs: of the whole training.
        rate: peak learning rate of the cosine schedule, for the paper's batch of 1024 on all GPUs together.
        weight_decay: of all parameters.
        warmup: epochs of linear warm-up.
        start: s, the epoch at which pruning starts.
        epsilon: share of the target per epoch.
        tau: softness of the masks.
    """

    make: Callable[[int], nn.Module]
    sparsity: float
    epochs: int
    rate: float
    weight_decay: float
    batch: int = 1024
    momentum: float = 0.9
    warmup: int = 5
    start: int = 16
    epsilon: float = 0.015
    tau: float = 1e-4

    def spec(self, granularity: str, sparsity: float, schedule: Schedule) -> PruneSpec:
        """The spec of a run: "unstructured", "channels" or "N:M", the kept count first."""
        return PruneSpec(_rule(granularity, sparsity), schedule=schedule, tau=self.tau)

    def rate_at(self, epoch: float, epochs: int, batch: int) -> float:
        """The learning rate at a point of a run; in proportion to the batch."""
        peak = self.rate * batch / self.batch
        if epoch < self.warmup and self.warmup < epochs:
            return peak * epoch / self.warmup
        warmup = self.warmup if self.warmup < epochs else 0
        return peak * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


RECIPES = {
    "resnet18": Recipe(partial(_torchvision, "resnet18"), 0.855, 100, 1.8, 1.4e-5),
    "resnet50": Recipe(partial(_torchvision, "resnet50"), 0.898, 100, 1.8, 1.4e-5),
    "mobilenet_v1": Recipe(MobileNetV1, 0.866, 180, 1.8, 1.4e-5),
    "mobilenet_v2": Recipe(partial(_torchvision, "mobilenet_v2"), 0.802, 180, 0.8, 8e-6),
}


def _rule(granularity: str, sparsity: float) -> Rule:
    if granularity == "unstructured":
        return Unstructured(sparsity)
    if granularity == "channels":
        return Channels(mac_reduction=sparsity, round_to=16)
    keep, _, of = granularity.partition(":")
    if not (keep.isdigit() and of.isdigit()):
        raise ValueError(f"granularity must be unstructured, channels or N:M like 2:4, got {granularity!r}")
    return NM(int(keep), int(of))
