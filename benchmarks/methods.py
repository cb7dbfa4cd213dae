"""How each method of the tables is trained, scaled to a number of epochs and steps.

What a method needs besides its policy is here: its ramp, whether layers share one target, how its own
parameters are trained. Weights, learning rate, batches and seeds are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.rivals import (
    ACDC,
    CS,
    DNW,
    GMP,
    SRSTE,
    ST3,
    STR,
    Feather,
    GraNet,
    Movement,
    OptG,
    ScoredChannels,
    Spartan,
)
from benchmarks.rivals.acdc import phases
from benchmarks.rivals.optg import ramp
from pdp_fx import NM, Channels, PruneSpec, Schedule, ShrinkMask, Unstructured
from pdp_fx.spec import Allocation, Rule

FULL = 120
"""Epochs of the paper's recipe for CIFAR-10."""

SHORT = 16
"""Epochs of the short one."""

Policy = Callable[[Any], Any]
Counts = Mapping[str, tuple[int, int]]
"""For each layer how many of its weights go, and how many it has."""


@dataclass(frozen=True)
class Budget:
    """How long a training is.

    Attributes:
        epochs: all of them, rounds and fine-tuning included.
        steps: of the optimizer in each.
    """

    epochs: int
    steps: int

    @property
    def total(self) -> int:
        """All steps of the optimizer."""
        return self.epochs * self.steps


def _always(epoch: float) -> float:
    return 1.0


@dataclass(frozen=True)
class Scores:
    """How the parameters that a method adds are trained.

    Attributes:
        rate: learning rate at its peak; it falls with that of the weights. None: that of the weights, and
            Adam where the weights have AdamW.
        adam: Adam instead of SGD with momentum.
        decayed: whether the weight decay of the weights holds for them, too.
        nesterov: of SGD.
        factor: a further factor of the learning rate, by epoch.
    """

    rate: float | None = None
    adam: bool = False
    decayed: bool = False
    nesterov: bool = False
    factor: Callable[[float], float] = _always


@dataclass(frozen=True)
class Method:
    """A method at one length of training.

    Attributes:
        policy: what makes the masks; None is PDP.
        schedule: when the target is reached, and whether `pdp_fx.step` counts epochs or steps.
        allocation: of the method's own block.
        options: of the spec, such as tau.
        begun: whether the schedule advances once before the training.
        scores: how the method's own parameters are trained.
        restarts: epochs at which the learning rate starts anew.
        rewind: (epoch whose start is remembered, epoch at which the weights go back to it), or None.
        searched: whether the sparsity follows from a knob that has to be searched for.
        told: whether the policy is told the share of all weights that go, as ``overall``.
    """

    policy: Policy | None
    schedule: Schedule
    allocation: Allocation = "global"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begun: bool = False
    scores: Scores = field(default_factory=Scores)
    restarts: tuple[int, ...] = ()
    rewind: tuple[int, int] | None = None
    searched: bool = False
    told: bool = False

    def spec(self, ratio: float, skipped: Mapping[str, None], common: Counts | None = None) -> PruneSpec:
        """The spec for a ratio over all layers, or for given counts in each layer.

        Args:
            ratio: the share of the weights that go.
            skipped: overrides for layers that stay dense.
            common: counts per layer, for the block in which all methods have the same.
        """
        policy: Any = self.policy
        if self.told and policy is not None:
            policy = partial(policy, overall=ratio)
        if common is None:
            rule = Unstructured(ratio, policy=policy)
            return PruneSpec(rule, skipped, self.schedule, allocation=self.allocation, **self.options)
        rules: dict[str, Rule | None] = {
            layer: Unstructured(gone / size, policy=policy) if gone else None
            for layer, (gone, size) in common.items()
        }
        return PruneSpec(None, rules, self.schedule, allocation="uniform", **self.options)

    def pattern_spec(self, keep: int, of: int, skipped: Mapping[str, None]) -> PruneSpec:
        """The spec for an N:M pattern in all layers but the skipped ones."""
        return PruneSpec(NM(keep, of, policy=self.policy), skipped, self.schedule, **self.options)

    def channel_spec(self, reduction: float) -> PruneSpec:
        """The spec that saves a share of the multiply-accumulates by whole channels."""
        rule = Channels(mac_reduction=reduction, policy=self.policy)
        return PruneSpec(rule, (), self.schedule, allocation=self.allocation, **self.options)


def _pdp(budget: Budget, knob: float | None, **options: Any) -> Method:
    if budget.epochs == FULL:
        return Method(None, Schedule(length=FULL), options=options)
    return Method(None, Schedule.fit(budget.epochs), options=options)


def _pdp_hard(budget: Budget, knob: float | None, **options: Any) -> Method:
    """Hard masks in training, the gradient straight through, and the target reached in the middle of it."""
    schedule = Schedule.fit(budget.total, 0.05, 0.5, per="step", shape="cubic")
    return Method(None, schedule, options={"forward": "hard", **options})


def _pdp_shrink(budget: Budget, knob: float | None) -> Method:
    """Masks that rise from 0 at the threshold, and layers that are ranked anew all along the same ramp."""
    schedule = Schedule.fit(budget.total, 0.05, 0.5, per="step", shape="cubic")
    return Method(ShrinkMask, schedule, "dynamic")


def _gmp(budget: Budget, knob: float | None) -> Method:
    return Method(GMP, Schedule.fit(budget.epochs, 0.2, 0.8, shape="cubic"), "uniform")


def _dnw(budget: Budget, knob: float | None) -> Method:
    return Method(DNW, Schedule(0, 1.0, length=max(budget.epochs, 2)), "uniform", begun=True)


def _str(budget: Budget, knob: float | None) -> Method:
    policy = partial(STR, start=-6.0 if knob is None else knob)
    return Method(policy, Schedule.fit(budget.epochs), scores=Scores(decayed=True), searched=True)


def _cs(budget: Budget, knob: float | None, rounds: int = 1) -> Method:
    each = budget.epochs // (rounds + 1)
    start = -0.02 if knob is None else knob
    drawn = rounds * each
    return Method(
        partial(CS, start=start, epochs=each, rounds=rounds),
        Schedule.fit(budget.epochs),
        scores=Scores(rate=0.1, nesterov=True),
        restarts=tuple(each * place for place in range(1, rounds + 1)),
        rewind=(min(2, each - 1), drawn),
        searched=True,
    )


def _optg(budget: Budget, knob: float | None) -> Method:
    # 1 in the original's 160 epochs, a ramp of some ten epochs in their middle. Shorter trainings have a
    # steeper one that still takes a few epochs, for scores only learn while it rises.
    beta = max(40 / budget.epochs, 1.0)
    scores = Scores(factor=partial(ramp, epochs=budget.epochs, beta=beta))
    return Method(partial(OptG, beta=beta), Schedule.fit(budget.epochs), scores=scores)


def _acdc(budget: Budget, knob: float | None) -> Method:
    return Method(partial(ACDC, sparse=phases(budget.epochs)), Schedule.fit(budget.epochs))


def _granet(budget: Budget, knob: float | None) -> Method:
    every = max(round(1000 * budget.total / (160 * 391)), 1)
    return Method(partial(GraNet, every=every), Schedule.fit(budget.total, per="step"))


def _movement(budget: Budget, knob: float | None) -> Method:
    ramp_ = Schedule.fit(budget.total, 0.2, 0.8, per="step", shape="cubic")
    return Method(Movement, ramp_, "uniform", scores=Scores(rate=1e-2, adam=True))


def _st3(budget: Budget, knob: float | None, scaled: bool = False) -> Method:
    ramp_ = Schedule.fit(budget.total, 0.05, 0.5, per="step", shape="cubic")
    return Method(partial(ST3, scaled=scaled), ramp_)


def _feather(budget: Budget, knob: float | None) -> Method:
    return Method(Feather, Schedule.fit(budget.total, 0.0, 0.5, per="step", shape="cubic"), told=True)


def _spartan(budget: Budget, knob: float | None) -> Method:
    return Method(Spartan, Schedule.fit(budget.total, per="step"))


def _sr_ste(budget: Budget, knob: float | None) -> Method:
    return Method(SRSTE, Schedule.fit(budget.epochs))


PATTERN_METHODS: dict[str, Callable[[Budget, float | None], Method]] = {
    "pdp": _pdp,
    "pdp-relative": partial(_pdp, tau="rel:0.1"),
    "pdp-hard": _pdp_hard,
    "pdp-hard-decay": partial(_pdp_hard, pruned_decay=2e-4),
    "sr-ste": _sr_ste,
}
"""The same for N:M patterns."""


def scored_channels(budget: Budget) -> Method:
    """Channels that go in the middle of the training, by scores from elsewhere."""
    cut = max(budget.epochs // 2, 2)
    schedule = Schedule(cut - 1, 1.0, length=budget.epochs)
    return Method(ScoredChannels, schedule, "uniform", restarts=(cut,))


METHODS: dict[str, Callable[[Budget, float | None], Method]] = {
    "pdp-paper": partial(_pdp, min_keep=0.0),
    "pdp": _pdp,
    "pdp-relative": partial(_pdp, tau="rel:0.1"),
    "pdp-hard": _pdp_hard,
    "pdp-hard-decay": partial(_pdp_hard, pruned_decay=2e-4),
    "pdp-shrink": _pdp_shrink,
    "cs": _cs,
    "gmp": _gmp,
    "dnw": _dnw,
    "str": _str,
    "optg": _optg,
    "acdc": _acdc,
    "granet": _granet,
    "movement": _movement,
    "st3": _st3,
    "st3-sigma": partial(_st3, scaled=True),
    "feather": _feather,
    "spartan": _spartan,
}
"""What makes a method for a budget and, where its sparsity follows from one, a knob."""

CHANNEL_METHODS: dict[str, Callable[[Budget, float | None], Method]] = {
    "pdp": _pdp,
    "pdp-hard": _pdp_hard,
}
"""The same for whole channels that are chosen in training."""
