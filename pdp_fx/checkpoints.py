"""Whether a checkpoint's pruning targets are those that the spec asks for.

Once the ramp has begun, the targets are part of the state. If a checkpoint of another spec were loaded, its
targets would silently replace those of the present spec, so `Pruner` refuses it with these reasons.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdp_fx.allocation import uniform_share
from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.granularity import Channels, Rule, Unstructured, rule_text
from pdp_fx.policy import MILLION, UNSET, MaskPolicy, NMPolicy, WeightPolicy

WAY_OUT = (
    "prepare with the spec of the checkpoint, or leave out its keys that begin with '{}' to load the weights "
    "alone"
)


def conflicts(
    masks: Sequence[tuple[str, MaskPolicy]],
    rules: Mapping[str, Rule],
    allocation: str,
    state: Mapping[str, Tensor],
    prefix: str,
) -> list[str]:
    """How a checkpoint contradicts the rules of the present masks, one sentence each.

    Args:
        masks: the masks with their names.
        rules: the rule of each mask, by name.
        allocation: "global" or "uniform".
        state: the state dict.
        prefix: of the pruner's keys in it.
    """
    keys = {name: f"{prefix}masks.{name}.units" for name, _ in masks}
    saved = {name: state[key] for name, key in keys.items() if key in state and not state[key].is_meta}
    if any(saved[name].shape != mask.units.shape for name, mask in masks if name in saved):
        return ["the spec has a tau_end and that of the checkpoint has none, or the other way round"]
    targets = {name: int(units[0]) for name, units in saved.items()}
    found = _other_totals(masks, rules, allocation == "uniform", targets)
    sealed = state.get(f"{prefix}seal")
    begun = any(isinstance(mask, ChannelPolicy) and targets.get(name, UNSET) != UNSET for name, mask in masks)
    if begun and sealed is not None and not is_seal(sealed, rules, allocation):
        texts = dict.fromkeys(rule_text(rule) for rule in rules.values() if isinstance(rule, Channels))
        found.insert(
            0,
            "the checkpoint's channels follow other rules, or another allocation, than " + ", ".join(texts),
        )
    return [f"{conflict}; {WAY_OUT.format(prefix)}" for conflict in found]


def _other_totals(
    masks: Sequence[tuple[str, MaskPolicy]],
    rules: Mapping[str, Rule],
    uniform: bool,
    targets: Mapping[str, int],
) -> list[str]:
    """The rules of single weights whose targets in the checkpoint do not sum up to the rule's target.

    The targets of channels also depend on the weights and on the limits of every group, so their rules are
    compared by `seal` instead. A rule is not checked if a target of one of its masks is missing.
    """
    pools: dict[Rule, list[tuple[WeightPolicy, int]]] = {}
    for name, mask in masks:
        if isinstance(mask, WeightPolicy) and mask.planned:
            pools.setdefault(rules[name], []).append((mask, targets.get(name, UNSET)))
    found: list[str] = []
    for rule, pool in pools.items():
        expected, saved = _expected(rule, [mask for mask, _ in pool], uniform), [target for _, target in pool]
        if UNSET not in saved and sum(expected) != sum(saved):
            found.append(
                f"the checkpoint's targets are {_amount(saved, pool[0][0])}, but {rule_text(rule)} asks for "
                f"{_amount(expected, pool[0][0])}"
            )
    return found


def seal(rules: Mapping[str, Rule], allocation: str) -> int:
    """A digest of what the targets of channels follow from: the rule of each mask, and the allocation.

    It is odd and has 62 bits, so no floating-point number equals it: if the state is cast to floating point
    and back, or averaged, the seal changes.
    """
    lines = [
        f"{name} {rule.ratio} {rule.mac_reduction} {rule.round_to} {rule.min_channels}\n"
        for name, rule in rules.items()
        if isinstance(rule, Channels)
    ]
    digest = hashlib.sha256("".join([f"{allocation}\n", *lines]).encode()).digest()
    return 1 << 61 | int.from_bytes(digest[:8], "big") >> 3 | 1


def is_seal(number: Tensor, rules: Mapping[str, Rule], allocation: str) -> bool:
    """Whether ``number`` is an int64 tensor that holds the seal of these rules."""
    return number.dtype == torch.int64 and int(number) == seal(rules, allocation)


def _expected(rule: Rule, masks: list[WeightPolicy], uniform: bool) -> list[int]:
    """The target of each mask under the present rule; under global allocation only their sum, as one."""
    if not isinstance(rule, Unstructured):
        return [(mask.of - mask.keep) * MILLION for mask in masks if isinstance(mask, NMPolicy)]
    if not uniform:
        return [round(rule.ratio * sum(mask.size for mask in masks))]
    return [uniform_share(mask.size, rule.ratio) for mask in masks]


def _amount(targets: list[int], mask: WeightPolicy) -> str:
    if isinstance(mask, NMPolicy):
        return f"{targets[0] // MILLION} of every {mask.of} weights"
    return f"{sum(targets)} weights"
