"""Torch-Pruning's group norm in the shared loop: sparse training, slicing, fine-tuning."""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training import Feed, Trainer

REGULARISATION = 5e-4
"""What its authors use on CIFAR, in the place of weight decay."""

RATES = 391 * (60 * 0.01 + 20 * 0.001 + 20 * 0.0001)
"""The sum of the learning rates of their training under regularisation, of 100 epochs."""

NORMALIZER = "max"
"""What they divide the scores of a group by on CIFAR, so that groups can be ranked together."""


@dataclass
class PeerTrainer(Trainer):
    """A dense net whose groups are drawn towards 0 and sliced half way, by Torch-Pruning.

    As in its authors' script (reproduce/main.py, method "group_sl"), there is no weight decay until then.

    Attributes:
        reduction: share of the multiply-accumulates to save, counted as everywhere in this package.
        across: whether one threshold holds for all groups, or each loses the same share.
    """

    reduction: float = 0.5
    across: bool = False
    peer: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for group in self.optimizers[0].param_groups:
            group["weight_decay"] = 0.0
        self.peer = _pruner(self.model, 0.5, self.across, self.regularisation)

    @property
    def regularisation(self) -> float:
        """As strong over all epochs until the cut and their learning rates as over its authors' hundred."""
        steps = range(self.cut * self.budget.steps)
        return REGULARISATION * RATES / sum(self.settings.rate * self.rate_factor(step) for step in steps)

    @property
    def cut(self) -> int:
        """The epoch at which channels go."""
        return max(self.budget.epochs // 2, 1)

    @property
    def restarts(self) -> tuple[int, ...]:
        return (self.cut,)

    def epoch(self, batches: Feed) -> float:
        if self.done < self.cut:
            self.peer.update_regularizer()
        return super().epoch(batches)

    def after_backward(self) -> None:
        if self.done < self.cut:
            self.peer.regularize(self.model)

    def after_epoch(self, batches: Feed) -> None:
        if self.done + 1 == self.cut:
            self._slice()

    def load(self, path: Path) -> str:
        """Go on from what `save` wrote; where channels are gone, they go again from the weights of then."""
        dense = torch.load(path, map_location=self.settings.device)["remembered"]
        if dense is not None:
            self.model.load_state_dict(dense)
            self._slice()
        return super().load(path)

    def _slice(self) -> None:
        self.remembered = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model = sliced(self.model, self.reduction, self.across)
        self.optimizers = self.fresh_optimizers()


def sliced(model: nn.Module, reduction: float, across: bool) -> nn.Module:
    """The model without channels, by the least ratio that saves the share of the multiply-accumulates.

    Raises:
        ValueError: no ratio saves as much.
    """
    goal = (1 - reduction) * macs_of(model)
    low, high = 0.0, 1.0
    best: nn.Module | None = None
    for _ in range(12):
        ratio = 0.5 * (low + high)
        smaller = copy.deepcopy(model)
        _pruner(smaller, ratio, across).step()
        if macs_of(smaller) <= goal:
            high, best = ratio, smaller
        else:
            low = ratio
    if best is None:
        raise ValueError(f"no ratio below 1 saves {reduction:.1%} of the multiply-accumulates")
    return best


def macs_of(model: nn.Module) -> int:
    """Multiply-accumulates of convolutions and linear layers for one image, by running it."""
    found: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        found.append(module.get_parameter("weight").numel() * math.prod(output.shape[2:]))

    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, 32, 32, device=next(model.parameters()).device))
    model.train(training)
    for hook in hooks:
        hook.remove()
    return sum(found)


def _pruner(model: nn.Module, ratio: float, across: bool, regularisation: float = 0.0) -> Any:
    peer = importlib.import_module("torch_pruning")
    example = torch.zeros(2, 3, 32, 32, device=next(model.parameters()).device)
    return peer.pruner.GroupNormPruner(
        model,
        example,
        importance=peer.importance.GroupMagnitudeImportance(p=2, normalizer=NORMALIZER),
        reg=regularisation,
        global_pruning=across,
        pruning_ratio=ratio,
        ignored_layers=[model.get_submodule("fc")],
    )
