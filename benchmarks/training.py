"""The training loop of all methods: the same batches, optimizer and learning rate for the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

import pdp_fx
from benchmarks.histograms import WeightHistogram, histogram, noted
from benchmarks.methods import Budget, Method
from pdp_fx import MaskPolicy
from pdp_fx.planning import parameters_of
from pdp_fx.pruner import find

State = dict[str, Any]


class Feed(Protocol):
    """Batches of inputs and labels that depend on the number of the epoch only.

    Labels are classes, or the probabilities of all classes, as `cross_entropy` takes them.
    """

    def __len__(self) -> int: ...

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch."""
        ...


AnyData = TypeVar("AnyData", bound=Sized, contravariant=True)


class Plain(Protocol[AnyData]):
    """What makes batches of data to measure on."""

    def plain(self, data: AnyData, /) -> Iterator[tuple[Tensor, Tensor]]:
        """All of the data, unchanged."""
        ...


@dataclass(frozen=True)
class Settings:
    """What is the same for all methods.

    Attributes:
        rate: peak learning rate.
        decay: weight decay: with SGD of all parameters, with AdamW of matrices and embeddings only.
        momentum: of SGD; with AdamW the first beta.
        warmup: share of the epochs in which the learning rate rises to its peak.
        precision: "fp32", or "bf16" under autocast.
        device: "cpu" or "cuda".
        adam: AdamW instead of SGD for the weights.
        clip: what the norm of the weights' gradients is cut to, or None.
    """

    rate: float = 0.4
    decay: float = 1e-4
    momentum: float = 0.9
    warmup: float = 5 / 120
    precision: str = "fp32"
    device: str = "cpu"
    adam: bool = False
    clip: float | None = None


def own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What a method adds to the model."""
    return [parameter for name, parameter in model.named_parameters() if name.startswith("pdp.")]


def pruned_units(model: nn.Module) -> Tensor | None:
    """What the hard masks prune now, all of them in one row; None for a dense model."""
    found = find(model)
    if found is None:
        return None
    gm, pruner = found
    with torch.no_grad():
        marks = [mask.pruned(*parameters_of(gm, mask)).flatten() for _, mask in pruner.mask_items()]
    return torch.cat(marks)


def _weight_optimizer(weights: list[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    if not settings.adam:
        return torch.optim.SGD(weights, settings.rate, settings.momentum, weight_decay=settings.decay)
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": settings.decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, settings.rate, betas=(settings.momentum, 0.99), fused=True)


def falling(step: int, first: int, last: int, warmup: int) -> float:
    """The factor of the learning rate from step ``first`` to ``last``: a linear rise, then half a cosine."""
    if step - first < warmup:
        return (step - first + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - first - warmup) / max(last - first - warmup, 1)))


@dataclass
class Trainer:
    """A model in training, which can be written to a file after any epoch and go on from it.

    Attributes:
        model: prepared, or dense where the method is None.
        method: how it is pruned.
        budget: how long the training is.
        settings: the rest.
        seed: of what is random in the model, such as dropout.
        done: epochs that are over.
        seconds: of training, by epoch.
        losses: mean losses, by epoch.
        flips: share of the units that the hard masks treat otherwise than an epoch before, by epoch.
        pruned: share of the units that they prune, by epoch.
        weights: what all prunable weights looked like after some of the epochs.
        remembered: the weights that a method goes back to, once they are known.
    """

    model: nn.Module
    method: Method | None
    budget: Budget
    settings: Settings
    seed: int = 0
    done: int = 0
    seconds: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    flips: list[float] = field(default_factory=list[float])
    pruned: list[float] = field(default_factory=list[float])
    weights: list[WeightHistogram] = field(default_factory=list[WeightHistogram])
    remembered: State | None = None

    def __post_init__(self) -> None:
        if self.method is not None and self.method.begun:
            pdp_fx.step(self.model)
        self.optimizers = self.fresh_optimizers()
        self.gone = pruned_units(self.model)

    def fresh_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers without any memory, for the parameters as they are now."""
        settings, own = self.settings, own_parameters(self.model)
        theirs = {id(parameter) for parameter in own}
        weights = [parameter for parameter in self.model.parameters() if id(parameter) not in theirs]
        found = [_weight_optimizer(weights, settings)]
        if own and self.method is not None:
            scores = self.method.scores
            decay = settings.decay if scores.decayed else 0.0
            rate = settings.rate if scores.rate is None else scores.rate
            if scores.adam or (scores.rate is None and settings.adam):
                found.append(torch.optim.Adam(own, rate, weight_decay=decay))
            else:
                sgd = torch.optim.SGD(
                    own, rate, settings.momentum, weight_decay=decay, nesterov=scores.nesterov
                )
                found.append(sgd)
        for optimizer in found:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
        return found

    @property
    def restarts(self) -> tuple[int, ...]:
        """Epochs at which the learning rate starts anew."""
        return self.method.restarts if self.method else ()

    def rate_factor(self, step: int) -> float:
        """The share of the peak learning rate at a step of the whole training."""
        restarts = [0, *self.restarts, self.budget.epochs]
        place = max(i for i, epoch in enumerate(restarts[:-1]) if step >= epoch * self.budget.steps)
        first, last = (restarts[place + offset] * self.budget.steps for offset in (0, 1))
        return falling(step, first, last, round(self.settings.warmup * (last - first)))

    def epoch(self, batches: Feed) -> float:
        """Train one epoch and return the mean loss, without the methods' own terms."""
        method, self.model = self.method, self.model.train()
        self._rewind()
        torch.manual_seed(self.seed * 1_000_003 + self.done)
        started, losses = time.perf_counter(), list[Tensor]()
        for number, (inputs, labels) in enumerate(batches.epoch(self.done)):
            self._set_rates(self.done * self.budget.steps + number)
            losses.append(self._step(inputs, labels))
            if method is not None and method.schedule.per == "step":
                pdp_fx.step(self.model)
        self.after_epoch(batches)
        self._compare_masks()
        self.losses.append(torch.stack(losses).mean().item())
        self.seconds.append(time.perf_counter() - started)
        self.done += 1
        if self.done in noted(self.budget.epochs):
            self.weights.append(histogram(self.model, self.done))
        return self.losses[-1]

    def _compare_masks(self) -> None:
        """Note what the masks of eval mode have become in this epoch."""
        before, self.gone = self.gone, pruned_units(self.model)
        if self.gone is not None and before is not None:
            self.flips.append((before != self.gone).float().mean().item())
            self.pruned.append(self.gone.float().mean().item())

    def after_epoch(self, batches: Feed) -> None:
        """Advance a schedule that counts epochs."""
        if self.method is not None and self.method.schedule.per == "epoch":
            pdp_fx.step(self.model)

    def after_backward(self) -> None:
        """Change gradients before the optimizer's step."""
        if self.settings.clip is not None:
            weights = [p for group in self.optimizers[0].param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(weights, self.settings.clip)

    def _step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.settings.device, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            outputs = self.model(inputs)
        places = outputs.ndim - 2
        loss = nn.functional.cross_entropy(outputs.float().flatten(0, places), labels.flatten(0, places))
        whole = loss if self.method is None else loss + pdp_fx.penalty(self.model)
        whole.backward()
        self.after_backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def _set_rates(self, step: int) -> None:
        factor = self.rate_factor(step)
        own = self.method.scores.factor(step // self.budget.steps) if self.method else 1.0
        for place, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor * (own if place else 1.0)

    def _rewind(self) -> None:
        """Remember the weights of an early epoch, or go back to them with fresh optimizers."""
        if self.method is None or self.method.rewind is None:
            return
        early, late = self.method.rewind
        if self.done == early:
            state = self.model.state_dict()
            self.remembered = {k: v.clone() for k, v in state.items() if not k.startswith("pdp.")}
        if self.done == late and self.remembered is not None:
            self.model.load_state_dict(self.remembered, strict=False)
            self.optimizers = self.fresh_optimizers()

    def save(self, path: Path) -> None:
        """Write everything that the next epoch depends on."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "remembered": self.remembered,
            "done": self.done,
            "precision": self.settings.precision,
            "seconds": self.seconds,
            "losses": self.losses,
            "flips": self.flips,
            "pruned": self.pruned,
            "weights": self.weights,
        }
        save_whole(state, path)

    def load(self, path: Path) -> str:
        """Go on from what `save` wrote; the precision of the training so far."""
        state: State = torch.load(path, map_location=self.settings.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.remembered, self.done = state["remembered"], state["done"]
        self.seconds, self.losses = state["seconds"], state["losses"]
        self.flips, self.pruned, self.weights = state["flips"], state["pruned"], state.get("weights", [])
        self.gone = pruned_units(self.model)
        return state.get("precision", self.settings.precision)


def save_whole(value: Any, path: Path) -> None:
    """Write a file that is there as a whole or not at all, whenever the process is killed."""
    part = path.with_suffix(".part")
    torch.save(value, part)
    part.replace(path)


def evaluating(model: nn.Module, soft: bool) -> None:
    """Put the model into eval mode, but its masks into training mode if ``soft``."""
    model.eval()
    for module in model.modules():
        if isinstance(module, MaskPolicy):
            module.train(soft)


def accuracy(model: nn.Module, batches: Plain[AnyData], data: AnyData, soft: bool = False) -> float:
    """Share of the data that gets its label, in float32; with the masks of training mode if ``soft``."""
    evaluating(model, soft)
    with torch.no_grad():
        right = _right(model, batches.plain(data))
    return right / len(data)


def _right(model: nn.Module, parts: Iterable[tuple[Tensor, Tensor]]) -> int:
    return sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in parts)
