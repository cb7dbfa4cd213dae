"""The nets the demonstration compares, and the training of one of them with one seed."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx.data import Digits
from pdp_fx.demo.flips import FlipCounter, mask_units
from pdp_fx.demo.measure import relative_difference
from pdp_fx.demo.net import DigitNet
from pdp_fx.demo.train import Recipe, accuracy, train
from pdp_fx.spec import NM, Channels, PruneSpec, Rule, Schedule, Unstructured


@dataclass(frozen=True)
class Variant:
    """A name for the table, a name for files, what is asked for in words, and the rule; None stays dense."""

    name: str
    file_name: str
    asked: str
    rule: Rule | None


VARIANTS = (
    Variant("dense", "dense", "-", None),
    Variant("unstructured", "unstructured", "90 % zeros", Unstructured(0.9)),
    Variant("2:4", "two-of-four", "2 of 4 zero", NM(2, 4)),
    Variant("channels", "channels", "50 % fewer MACs", Channels(mac_reduction=0.5)),
)


@dataclass(frozen=True)
class Pruning:
    """What the masks of one run did.

    Attributes:
        difference: largest difference of the converted model's outputs from those of the prepared model in
            eval mode, as a share of the largest output.
        units: share of all units (weights, or channels) that are pruned in the end.
        newly_pruned: for each epoch the share of all units that was kept before and is pruned since.
        restored: for each epoch the share of all units that was pruned before and is kept since.
        before: what the units are ranked by, of all units: weights, or root-mean-square weights of channels.
        after: the same of the units that are kept.
    """

    difference: float
    units: float
    newly_pruned: tuple[float, ...]
    restored: tuple[float, ...]
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Run:
    """One variant trained with one seed; `model` is plain PyTorch, in eval mode."""

    model: nn.Module
    accuracy: float
    seconds: float
    pruning: Pruning | None


def run_variant(variant: Variant, digits: Digits, recipe: Recipe, seed: int) -> Run:
    """Train a fresh net, pruned if the variant says so, convert it, and measure its test accuracy."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    net = DigitNet()
    title = f"{variant.name}, seed {seed}"
    if variant.rule is None:
        train(net, digits.train, recipe, seed, title)
        model, pruning = net, None
    else:
        model, pruning = _train_pruned(net, variant.rule, digits, recipe, seed, title)
    seconds = time.perf_counter() - start
    return Run(model, accuracy(model, digits.test), seconds, pruning)


def _train_pruned(
    net: nn.Module, rule: Rule, digits: Digits, recipe: Recipe, seed: int, title: str
) -> tuple[nn.Module, Pruning]:
    spec = PruneSpec(rule, schedule=Schedule.fit(recipe.epochs))
    prepared = pdp_fx.prepare(net, spec, digits.train.images[:4])
    flips = FlipCounter(prepared)

    def after_epoch() -> None:
        pdp_fx.step(prepared)
        flips.record()

    train(prepared, digits.train, recipe, seed, title, after_epoch)
    converted = pdp_fx.convert(prepared)
    units = mask_units(prepared)
    pruning = Pruning(
        difference=relative_difference(prepared, converted, digits.test.images),
        units=units.pruned.float().mean().item(),
        newly_pruned=tuple(flips.newly_pruned),
        restored=tuple(flips.restored),
        before=units.magnitudes,
        after=units.magnitudes[~units.pruned],
    )
    return converted, pruning
