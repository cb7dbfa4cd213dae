"""Mask policies: what turns a weight into the weight that a layer uses, and what `prepare` puts into a graph.

A policy is a subclass of `WeightPolicy`, `NMPolicy` or `ChannelPolicy`, named in a rule, as in
``Unstructured(0.9, policy=Mine)``. `prepare` calls it once for every weight that the rule covers and puts the
module that it returns between the weight and the layer. PDP's own masks (`pdp_fx.masks`) are policies like
any other: they are what a rule without a policy stands for.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described
from pdp_fx.granularity import NM, Rule
from pdp_fx.ops.decay import half_squares
from pdp_fx.ops.nm import nm_pruned
from pdp_fx.ops.ranking import Ranking
from pdp_fx.ops.select import readable, smallest
from pdp_fx.schedule import Schedule
from pdp_fx.sharding import refuse_shard
from pdp_fx.softness import Softness

UNSET = -1
MILLION = 1_000_000


@dataclass(frozen=True)
class Producer:
    """A weight axis that makes the channels of a group.

    Attributes:
        axis: the axis of the weight.
        places: for every row along the axis its channel in the group, or -1 for a row outside it;
            None when row i makes channel i.
    """

    axis: int
    places: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class MaskSite:
    """What a mask is made for.

    Attributes:
        names: qualified names of the parameters that the mask reads: one, or all producers of a group.
        rule: the rule of the spec, which has the target.
        tau: the softness that the spec asks for; a policy is free to ignore it.
        weights: the parameters themselves, for shapes, dtype and device.
        producers: of a channel group, the weight axes that make its channels.
        width: of a channel group, its number of channels.
        parts: of a channel group, channels that are cut apart from the others, of which one must stay.
        pruned_decay: of single weights, the decay of pruned ones that the spec asks for.
        axis: of an N:M mask, the axis of the parameter along the input channels; of ``weights`` it is axis 1.
        block: of a channel group, how many channels of a layer each of its channels is, such as those of a
            head: the greatest number that divides what it is in every layer.
    """

    names: tuple[str, ...]
    rule: Rule
    tau: Softness | float
    weights: tuple[Tensor, ...] = ()
    producers: tuple[Producer, ...] = ()
    width: int = 0
    parts: tuple[tuple[int, ...], ...] = ()
    pruned_decay: float = 0.0
    axis: int = 1
    block: int = 1

    @property
    def weight(self) -> Tensor:
        """The one weight of an unstructured or N:M mask."""
        return self.weights[0]


@dataclass(frozen=True)
class Progress:
    """How far the training is.

    Attributes:
        counter: how often `pdp_fx.step` was called; 0 when the model was prepared.
        share: the share of the target that holds now by the schedule, from 0 to 1.
        schedule: the schedule of the spec.
    """

    counter: int
    share: float
    schedule: Schedule


class MaskPolicy(nn.Module):
    """The mask of one weight or one channel group, and how it changes while the model trains.

    In training mode the layer gets what `soft` returns, in eval mode what `hard` returns, and `convert`
    writes the latter into the parameter. Parameters of a policy are trained with the model and go with
    `convert`; its buffers are saved with the model.

    Attributes:
        parameters_read: qualified names of the parameters that the mask is computed from.
        units: the buffer of whole numbers with `target` and `count`. The count follows from the target and
            the schedule, and is saved all the same, for averages that copy what a state dict holds.
        planned: whether the package fixes the target by the allocation of the spec. A policy that says
            False decides by itself what goes, in `pruned`; `target` and `count` then mean nothing.
    """

    planned: ClassVar[bool] = True

    units: Tensor

    def __init__(self, site: MaskSite) -> None:
        super().__init__()
        self.parameters_read = site.names
        self.register_buffer("units", torch.tensor([UNSET, 0]))

    @property
    def target(self) -> Tensor:
        """How many units are pruned in the end, 0-dim, a view; -1 until the ratios are fixed."""
        return self.units[0]

    @property
    def count(self) -> Tensor:
        """How many units are pruned now, 0-dim, a view."""
        return self.units[1]

    @property
    def allocated(self) -> bool:
        """Whether the final count is fixed."""
        return int(self.target) != UNSET

    def advance(self, share: float) -> None:
        """Prune ``share`` of the target, in [0, 1], from now on; nothing while there is no target."""
        # Where it is: a GPU is not waited for once for each mask.
        self.count.copy_((self.target.clamp(min=0).double() * share).round())

    def idle(self, weight: Tensor) -> bool:
        """Whether nothing is pruned now, as far as that can be told without waiting for a device."""
        return readable(weight) and readable(self.count) and int(self.count) == 0

    @property
    def pruned_now(self) -> int:
        """How many units (N:M: of every group) the hard mask prunes now, by the schedule."""
        return int(self.count)

    @abstractmethod
    def pruned(self, *weights: Tensor) -> Tensor:
        """The units that the hard mask prunes now, as booleans in the shape of the units."""

    def values(self, *weights: Tensor) -> Tensor:
        """The soft mask in [0, 1] for reports, in the shape of the units; the hard mask where none is."""
        return (~self.pruned(*weights)).float()

    def penalty(self, *weights: Tensor) -> Tensor | None:
        """A term of the loss, 0-dim and differentiable, or None; `pdp_fx.penalty` adds them all up."""
        return None

    @classmethod
    def update(cls, masks: Sequence[Any], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        """Change the state of the masks; called by `prepare`, and by `step` after it has set the counts.

        With ``Schedule(per="step")`` it is a hook after the step of the optimizer. It runs without
        gradients and may change the weights in place.

        Args:
            masks: all masks of one rule, so that layers can be ranked together; one at a time where the
                spec's allocation is "uniform".
            weights: for each mask the parameters that it reads.
            now: how far the training is.
        """


Made = TypeVar("Made", bound=MaskPolicy)


def made(site: MaskSite, default: type[Made], kind: type[Made]) -> Made:
    """The mask that the rule's policy makes for ``site``, or that of ``default`` without one.

    Raises:
        SpecError: the policy gives something else than a ``kind``, or one that lacks a method or whose
            ``update`` is that of a single mask.
    """
    policy = site.rule.policy or default
    mask: object = policy(site) if callable(policy) else None
    if not isinstance(mask, kind):
        raise SpecError(
            f"{site.names[0]}: the policy of {site.rule} must give a {kind.__name__}, got {described(mask)}; "
            f"derive it from pdp_fx.{kind.__name__}"
        )
    methods = {name: getattr(type(mask), name) for name in ("soft", "pruned")}
    missing = [name for name, method in methods.items() if getattr(method, "__isabstractmethod__", False)]
    if missing:
        raise SpecError(
            f"the policy {type(mask).__name__} does not define {missing[0]}, which every policy needs"
        )
    if not inspect.ismethod(type(mask).update):
        raise SpecError(f"{type(mask).__name__}.update must be a classmethod: it gets all masks of a rule")
    return mask


class WeightPolicy(MaskPolicy):
    """Unstructured: every weight is a unit. A subclass says at least what `soft` returns.

    Attributes:
        size: number of weights.
        pruned_decay: lambda of `penalty`.
    """

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.size = sum(weight.numel() for weight in site.weights)
        self.pruned_decay = site.pruned_decay
        self.ranking = Ranking()

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight that the layer uses, same shape and dtype."""
        refuse_shard(weight)
        return self.soft(weight) if self.training else self.hard(weight)

    @abstractmethod
    def soft(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses in training; gradients are those of autograd."""

    def hard(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses in eval mode and after `convert`: 0 exactly where `pruned`."""
        if self.planned and self.idle(weight):
            return weight
        return torch.where(self.pruned(weight), torch.zeros_like(weight), weight)

    def pruned(self, *weights: Tensor) -> Tensor:
        """The `count` weights of least magnitude."""
        magnitude = weights[0].detach().abs()
        if readable(weights[0]) and 0 < int(self.count) < magnitude.numel():
            largest_pruned, smallest_kept = self.ranking.around(weights[0], int(self.count))
            if largest_pruned < smallest_kept:
                return magnitude <= float(largest_pruned)
        return smallest(magnitude, self.count)

    def penalty(self, *weights: Tensor) -> Tensor | None:
        """Half of lambda times the sum of squares of what is pruned, whose gradient is lambda w there.

        It is the decay of SR-STE (Zhou et al., 2021, arXiv:2102.04010) as a term of the loss, so
        that it follows whatever the loss is scaled by. None where lambda is 0.
        """
        if self.pruned_decay == 0 or self.idle(weights[0]):
            return None
        return self.pruned_decay * half_squares(weights[0], self.pruned(weights[0]))

    def extra_repr(self) -> str:
        return f"pruned_decay={self.pruned_decay:g}" if self.pruned_decay else ""


class NMPolicy(WeightPolicy):
    """N:M: of every ``of`` consecutive weights along the input channels, ``keep`` stay.

    ``count`` and ``target`` are millionths of a weight per group, so that a ramp can interpolate
    between whole weights. All methods get the weight with its input channels on axis 1, as conv and linear
    layers have it, whatever axis of the parameter that is.

    Attributes:
        axis: the axis of the parameter that runs along the input channels.
    """

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        if not isinstance(site.rule, NM):
            raise SpecError(f"{type(self).__name__} is a policy for NM rules, not for {site.rule}")
        self.keep = site.rule.keep
        self.of = site.rule.of
        self.axis = site.axis
        self.target.fill_((self.of - self.keep) * MILLION)

    def forward(self, weight: Tensor) -> Tensor:
        return from_inputs(super().forward(to_inputs(weight, self.axis)), self.axis)

    @property
    def pruned_now(self) -> int:
        return int(self.count) // MILLION

    def pruned(self, *weights: Tensor) -> Tensor:
        """The smallest of each group, as many as the schedule asks for."""
        whole = self.count.div(MILLION, rounding_mode="floor")
        return nm_pruned(weights[0].detach(), self.keep, self.of, whole)

    def extra_repr(self) -> str:
        axis = f"axis={self.axis}" if self.axis != 1 else ""
        return ", ".join(filter(None, (f"keep={self.keep}, of={self.of}", axis, super().extra_repr())))


def to_inputs(weight: Tensor, axis: int) -> Tensor:
    """A weight with the axis of its input channels as axis 1; the same tensor if it is."""
    return weight if axis == 1 else weight.movedim(axis, 1)


def from_inputs(weight: Tensor, axis: int) -> Tensor:
    """The inverse of `to_inputs`."""
    return weight if axis == 1 else weight.movedim(1, axis)
