"""How many units of each mask are pruned at the end of the ramp, by the spec and the present weights.

`Planner` groups the masks by rule and applies the algorithms of `allocation` to their weights or scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx, nn

from pdp_fx.allocation import MacModel, allocate, most_prunable, reach_macs, rounded, uniform_share
from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.errors import SpecError, StateError
from pdp_fx.granularity import rule_text
from pdp_fx.ops.finite import all_finite
from pdp_fx.policy import MaskPolicy, NMPolicy, to_inputs
from pdp_fx.sharding import whole
from pdp_fx.spec import Channels, PruneSpec, Rule, Unstructured
from pdp_fx.weights.sources import computed

logger = logging.getLogger(__name__)

CHILD = "pdp"
"""The name of the child module that `prepare` adds to a model."""


@dataclass(frozen=True)
class Planner:
    """Computes the targets of all masks.

    Attributes:
        gm: the prepared model, whose present weights are ranked.
        spec: the user's spec.
        masks: all masks by name, in graph order.
        rules: the rule of each mask.
        mac_model: multiply-accumulates as a function of kept channels, with the groups in the order of the
            channel masks; None without example inputs.
    """

    gm: nn.Module
    spec: PruneSpec
    masks: Mapping[str, MaskPolicy]
    rules: Mapping[str, Rule]
    mac_model: MacModel | None

    def plan(self) -> dict[str, int]:
        """The target of every planned mask but those of N:M, by name.

        Raises:
            SpecError: weights are not finite, a target cannot be reached, or two MAC targets are given.
        """
        pools: dict[Rule, list[str]] = {}
        for name, mask in self.masks.items():
            if mask.planned and not isinstance(mask, NMPolicy):
                pools.setdefault(self.rules[name], []).append(name)
        if sum(_aims_at_macs(rule) for rule in pools) > 1:
            raise SpecError(
                "the spec has two different mac_reduction targets, but each is meant for the whole model; "
                "give one mac_reduction, and ratios to the layers that shall differ"
            )
        targets: dict[str, int] = {}
        for rule, names in sorted(pools.items(), key=lambda pool: _aims_at_macs(pool[0])):
            if isinstance(rule, Unstructured):
                targets |= self._plan_weights(rule, names)
            elif isinstance(rule, Channels):
                targets |= self._plan_channels(rule, names, targets)
        return targets

    def _plan_weights(self, rule: Unstructured, names: list[str]) -> dict[str, int]:
        weights = [parameters_of(self.gm, self.masks[name])[0].detach() for name in names]
        sizes = [weight.numel() for weight in weights]
        _refuse_unfit([self.masks[name].parameters_read[0] for name in names], weights)
        if self.spec.allocation == "uniform":
            return {name: uniform_share(n, rule.ratio) for name, n in zip(names, sizes, strict=True)}
        most = [most_prunable(size, rule.ratio, self.spec.min_keep) for size in sizes]
        counts = allocate([weight.abs() for weight in weights], round(rule.ratio * sum(sizes)), most)
        return dict(zip(names, counts, strict=True))

    def _plan_channels(self, rule: Channels, names: list[str], others: dict[str, int]) -> dict[str, int]:
        masks = [cast(ChannelPolicy, self.masks[name]) for name in names]
        scores = [mask.scores(*parameters_of(self.gm, mask)).detach() for mask in masks]
        _refuse_unfit(names, scores)
        widths = [mask.width for mask in masks]
        if rule.ratio is not None:
            most = self._limits(masks, rule, rule.ratio)
            wanted = round(rule.ratio * sum(widths))
            if wanted > sum(most):
                logger.warning("%s: of %d channels only %d can go", rule_text(rule), wanted, sum(most))
            counts = _rounded(self._channel_counts(wanted, scores, most), masks, rule, most)
        else:
            counts = self._counts_for_macs(rule, names, masks, scores, others)
        return dict(zip(names, counts, strict=True))

    def _limits(self, masks: list[ChannelPolicy], rule: Channels, ratio: float) -> list[int]:
        """How many channels each group may lose."""
        keep = self.spec.min_keep
        return [most_prunable(m.width, ratio, keep, m.fewest(rule.min_channels)) for m in masks]

    def _channel_counts(self, total: int, scores: list[Tensor], most: list[int]) -> list[int]:
        """How many channels each group loses if ``total`` are to go, by the spec's allocation.

        Under global allocation the scores of each group are first divided by their root mean square.
        """
        widths = [len(score) for score in scores]
        if self.spec.allocation == "uniform":
            return _uniform(total, widths, most)
        normal = [score / score.square().mean().sqrt().clamp(min=1e-30) for score in scores]
        return allocate(normal, min(total, sum(most)), most)

    def _counts_for_macs(
        self,
        rule: Channels,
        names: list[str],
        masks: list[ChannelPolicy],
        scores: list[Tensor],
        others: dict[str, int],
    ) -> list[int]:
        """How many channels each group loses to meet a MAC target; ``others`` are targets of other masks."""
        if self.mac_model is None or rule.mac_reduction is None:
            raise StateError(
                f"{rule_text(rule)} needs the multiply-accumulates of the model, which are not known; "
                "prepare it with example_inputs"
            )
        model, reduction = self.mac_model, rule.mac_reduction
        widths = [len(score) for score in scores]
        order = [name for name, mask in self.masks.items() if isinstance(mask, ChannelPolicy)]

        def macs(counts: list[int]) -> float:
            gone = others | dict(zip(names, counts, strict=True))
            return model.macs([gone.get(name, 0) for name in order])

        def counts_at(total: int) -> list[int]:
            most = self._limits(masks, rule, total / sum(widths))
            return _rounded(self._channel_counts(total, scores, most), masks, rule, most)

        return reach_macs(counts_at, sum(widths), macs, model.macs([0] * len(order)), reduction)


def _rounded(counts: list[int], masks: list[ChannelPolicy], rule: Channels, most: list[int]) -> list[int]:
    """The nearest counts that leave every layer a multiple of ``round_to`` channels; a head is several."""
    steps = [mask.step_of(math.lcm(rule.round_to, mask.multiple)) for mask in masks]
    return [
        rounded(count, mask.width, step, limit)
        for count, mask, step, limit in zip(counts, masks, steps, most, strict=True)
    ]


def _uniform(total: int, widths: list[int], most: list[int]) -> list[int]:
    ratio = total / sum(widths)
    return [min(round(ratio * width), limit) for width, limit in zip(widths, most, strict=True)]


def _aims_at_macs(rule: Rule) -> bool:
    return isinstance(rule, Channels) and rule.mac_reduction is not None


def _refuse_unfit(names: list[str], tensors: list[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if not all_finite(tensor):
            raise SpecError(
                f"{name}: weights are NaN or infinite, so they cannot be ranked; check the training"
            )


def parameters_of(gm: nn.Module, mask: MaskPolicy) -> list[Tensor]:
    """The weights that ``mask`` is computed from, in the axis order it expects, gathered if sharded."""
    weights = [weight_of(gm, name) for name in mask.parameters_read]
    return [to_inputs(weight, mask.axis) for weight in weights] if isinstance(mask, NMPolicy) else weights


def check_parameters(gm: nn.Module, mask: MaskPolicy) -> None:
    """Raise StateError if the model no longer has the parameters that ``mask`` is computed from."""
    for name in mask.parameters_read:
        parameter_of(gm, name)


def weight_of(gm: nn.Module, name: str) -> Tensor:
    """The parameter ``name``, or the computed weight that is pruned in its place; gathered if sharded."""
    node_name: str | None = getattr(getattr(gm, CHILD, None), "computed", {}).get(name)
    if node_name is None or not isinstance(gm, fx.GraphModule):
        return whole(parameter_of(gm, name))
    return whole(computed(gm, next(node for node in gm.graph.nodes if node.name == node_name)))


def parameter_of(gm: nn.Module, name: str) -> nn.Parameter:
    """The parameter ``name``.

    Raises:
        StateError: the model no longer has it, or in another shape than when it was prepared.
    """
    try:
        found = gm.get_parameter(name)
    except AttributeError as err:
        raise StateError(
            f"{name} is masked, but is no parameter any more: its layer was replaced, or the weight is "
            "computed since; do that before prepare"
        ) from err
    noted = getattr(getattr(gm, CHILD, None), "noted", None)
    shape: tuple[int, ...] = found.shape if noted is None else noted.shapes.get(name, found.shape)
    if tuple(found.shape) != tuple(shape):
        raise StateError(
            f"{name} has changed its shape after prepare, from {tuple(shape)} to {tuple(found.shape)}; "
            "change layers before prepare, and shard what prepare returns by fully_shard instead of "
            "FullyShardedDataParallel, which flattens parameters"
        )
    return found
