"""Mask policies: the modules that compute masked weights from weights, in the graph that `prepare` returns.

A policy is a subclass of `WeightPolicy`, `NMPolicy` or `ChannelPolicy`, named in a rule, as in
``Unstructured(0.9, policy=Mine)``. `prepare` calls it once for every weight that the rule covers and puts the
module that it returns between the weight and the layer. PDP's own masks (`pdp_fx.masks`) are policies like
any other; a rule without a policy uses them.
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
from pdp_fx.sharding import refuse_not_whole
from pdp_fx.softness import Softness

UNSET = -1
"""The target of a mask until the ratios are fixed."""

MILLION = 1_000_000
"""What one weight per group counts in the target and count of an N:M mask."""


@dataclass(frozen=True)
class Producer:
    """An axis of a weight whose rows produce the channels of a group.

    Attributes:
        axis: the axis of the weight.
        places: for every row along the axis the index of its channel in the group, or -1 if the row is not
            in the group; None if row i produces channel i.
        spans: how many weights each number is the L2 norm of, as under weight_norm; 1 where it is a weight.
    """

    axis: int
    places: tuple[int, ...] | None
    spans: int = 1


@dataclass(frozen=True, eq=False)
class MaskSite:
    """The weight or the channel group that a mask is made for: the argument of every policy.

    Attributes:
        names: qualified names of the parameters that the mask reads: one, or all producers of a group.
        rule: the spec's rule, which holds the target.
        tau: the spec's softness; a policy is free to ignore it.
        weights: the parameters themselves, for shapes, dtype and device.
        producers: for a channel group, the weight axes that produce its channels.
        width: for a channel group, its number of channels.
        parts: for a channel group, the index sets that the model splits off or picks out of its channels; at
            least one channel of each set must stay.
        pruned_decay: for single weights, the spec's decay of pruned weights.
        axis: for an N:M mask, the axis of the parameter along the input channels; in ``weights`` it has been
            moved to axis 1.
        block: for a channel group, how many channels of a layer go with each of its channels, such as the
            dimensions of a head: the greatest number that divides this count in every layer.
        multiple: for a channel group, the number of channels that a layer keeps is a multiple of this.
        least: for a channel group, how many of its channels stay at least.
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
    multiple: int = 1
    least: int = 1

    @property
    def weight(self) -> Tensor:
        """The one weight of an unstructured or N:M mask."""
        return self.weights[0]


@dataclass(frozen=True)
class Progress:
    """How far the training has come.

    Attributes:
        counter: how often `pdp_fx.step` was called; 0 when the model was prepared.
        share: the share of the target that the schedule prunes now, from 0 to 1.
        schedule: the schedule of the spec.
    """

    counter: int
    share: float
    schedule: Schedule


class MaskPolicy(nn.Module):
    """The mask of one weight or one channel group, and how it changes while the model trains.

    In training mode the layer gets what `soft` returns, in eval mode what `hard` returns, and `convert`
    writes the result of `hard` into the parameter. The parameters of a policy are trained with the model and
    removed by `convert`; its buffers are saved with the model. A *unit* is what is pruned or kept as a whole:
    a weight, or a channel.

    Attributes:
        parameters_read: qualified names of the parameters that the mask is computed from.
        units: the int64 buffer that holds `target` and `count`. The count follows from the target and the
            schedule; it is saved nevertheless, for averages of models that copy a state dict.
        planned: whether the package fixes the target by the spec's allocation. If a policy sets this to
            False, its method `pruned` alone decides what is pruned, and `target` and `count` are not used.
    """

    planned: ClassVar[bool] = True

    units: Tensor

    def __init__(self, site: MaskSite) -> None:
        super().__init__()
        self.parameters_read = site.names
        self.register_buffer("units", torch.tensor([UNSET, 0]))

    @property
    def target(self) -> Tensor:
        """How many units are pruned at the end of the ramp: a 0-dim view; `UNSET` until that is fixed."""
        return self.units[0]

    @property
    def count(self) -> Tensor:
        """How many units are pruned now: a 0-dim view."""
        return self.units[1]

    @property
    def allocated(self) -> bool:
        """Whether the target is fixed."""
        return int(self.target) != UNSET

    def forget_target(self) -> None:
        """Let the target be as it was before the ramp."""
        self.target.fill_(UNSET)

    def advance(self, share: float) -> None:
        """Prune ``share`` of the target, in [0, 1], from now on; nothing while the target is not fixed."""
        # Computed on the device, so that no mask waits for a GPU.
        self.count.copy_((self.target.clamp(min=0).double() * share).round())

    def known_count(self, weight: Tensor) -> int | None:
        """`count`, if it and the weight can be read without waiting for a device, else None."""
        units = self.units
        return units.tolist()[1] if readable(weight) and readable(units) else None

    def idle(self, weight: Tensor) -> bool:
        """Whether nothing is pruned now; False if that cannot be read without waiting for a device."""
        return self.known_count(weight) == 0

    @property
    def pruned_now(self) -> int:
        """How many units (for N:M: of every group) the hard mask prunes now by the schedule."""
        return int(self.count)

    @abstractmethod
    def pruned(self, *weights: Tensor) -> Tensor:
        """Which units the hard mask prunes now: booleans, one for each unit, in the shape of the units."""

    def values(self, *weights: Tensor) -> Tensor:
        """The soft mask in [0, 1] for reports, in the shape of the units; by default the hard mask."""
        return (~self.pruned(*weights)).float()

    def penalty(self, *weights: Tensor) -> Tensor | None:
        """A term for the loss, 0-dim and differentiable, or None; `pdp_fx.penalty` adds up all of them."""
        return None

    @classmethod
    def update(cls, masks: Sequence[Any], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        """Change the state of the masks; called by `prepare`, and by `step` after it has set the counts.

        With ``Schedule(per="step")`` it runs after every step of the optimizer. It runs without gradients
        and may change the weights in place, except those that the model computes from its parameters.

        Args:
            masks: all masks of one rule, so that layers can be ranked together; a single mask if the spec's
                allocation is "uniform".
            weights: for each mask the parameters that it reads.
            now: how far the training has come.
        """


Mask = TypeVar("Mask", bound=MaskPolicy)


def make_mask(site: MaskSite, default: type[Mask], kind: type[Mask]) -> Mask:
    """Make the mask for ``site`` by the policy of its rule, or by ``default`` if the rule has none.

    Raises:
        SpecError: the policy does not return a ``kind``, or its class lacks a method, or its ``update`` is
            not a classmethod.
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
    """Unstructured: every weight is a unit. A subclass must define `soft`.

    Attributes:
        size: number of weights.
        pruned_decay: the factor lambda in `penalty`.
    """

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.size = sum(weight.numel() for weight in site.weights)
        self.pruned_decay = site.pruned_decay
        self.ranking = Ranking()

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight that the layer uses, in the shape and dtype of ``weight``."""
        refuse_not_whole(weight)
        return self.soft(weight) if self.training else self.hard(weight)

    @abstractmethod
    def soft(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses in training; autograd computes its gradient."""

    def hard(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses in eval mode and after `convert`: exactly 0 where `pruned`."""
        if self.planned and self.idle(weight):
            return weight
        return torch.where(self.pruned(weight), torch.zeros_like(weight), weight)

    def pruned(self, *weights: Tensor) -> Tensor:
        """The `count` weights of smallest magnitude."""
        magnitude = weights[0].detach().abs()
        count = self.known_count(weights[0])
        if count is not None and 0 < count < magnitude.numel():
            largest_pruned, smallest_kept = self.ranking.around(weights[0], count)
            if largest_pruned < smallest_kept:
                return magnitude <= float(largest_pruned)
        return smallest(magnitude, self.count)

    def penalty(self, *weights: Tensor) -> Tensor | None:
        """1/2 lambda times the sum of squares of the pruned weights; its gradient there is lambda w.

        It is the decay of SR-STE (Zhou et al., 2021, arXiv:2102.04010), written as a term of the loss so
        that it is scaled with the loss. None if lambda is 0.
        """
        if self.pruned_decay == 0 or self.idle(weights[0]):
            return None
        return self.pruned_decay * half_squares(weights[0], self.pruned(weights[0]))

    def extra_repr(self) -> str:
        return f"pruned_decay={self.pruned_decay:g}" if self.pruned_decay else ""


def may_add_penalty(mask: MaskPolicy) -> bool:
    """Whether `MaskPolicy.penalty` may return a term, so that the weights have to be read for it."""
    if isinstance(mask, WeightPolicy) and type(mask).penalty is WeightPolicy.penalty:
        return mask.pruned_decay != 0
    return type(mask).penalty is not MaskPolicy.penalty


class NMPolicy(WeightPolicy):
    """N:M: of every ``of`` consecutive weights along the input channels, ``keep`` stay.

    ``count`` and ``target`` are in millionths of a weight per group, so that the ramp can interpolate between
    whole weights. All methods but `forward` get the weight with its input channels moved to axis 1, where
    conv and linear layers have them.

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
        self.forget_target()

    def forget_target(self) -> None:
        self.target.fill_((self.of - self.keep) * MILLION)

    def forward(self, weight: Tensor) -> Tensor:
        return from_inputs(super().forward(to_inputs(weight, self.axis)), self.axis)

    @property
    def pruned_now(self) -> int:
        return int(self.count) // MILLION

    def pruned(self, *weights: Tensor) -> Tensor:
        """The smallest weights of each group; their number follows from the schedule."""
        whole = self.count.div(MILLION, rounding_mode="floor")
        return nm_pruned(weights[0].detach(), self.keep, self.of, whole)

    def extra_repr(self) -> str:
        axis = f"axis={self.axis}" if self.axis != 1 else ""
        return ", ".join(filter(None, (f"keep={self.keep}, of={self.of}", axis, super().extra_repr())))


def to_inputs(weight: Tensor, axis: int) -> Tensor:
    """The weight with the axis of its input channels moved to axis 1; the same tensor if it is there."""
    return weight if axis == 1 else weight.movedim(axis, 1)


def from_inputs(weight: Tensor, axis: int) -> Tensor:
    """The inverse of `to_inputs`."""
    return weight if axis == 1 else weight.movedim(1, axis)
