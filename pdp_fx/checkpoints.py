"""Whether the targets in a checkpoint are those of a spec.

The targets of a ramp that has begun are part of the state, and would silently take the place of what another
spec asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor

from pdp_fx.allocation import uniform_share
from pdp_fx.granularity import Channels, Rule, Unstructured, rule_text
from pdp_fx.policy import MILLION, UNSET, MaskPolicy, NMPolicy, WeightPolicy


def other_targets(
    masks: Iterable[tuple[str, MaskPolicy]],
    rules: Mapping[str, Rule],
    uniform: bool,
    targets: Mapping[str, Tensor],
) -> list[str]:
    """What is wrong with the targets of a checkpoint, as sentences.

    Those of channels follow from the weights and the limits of every group, so that their rules are compared
    instead (`seal`); those of a rule some of whose masks are not in the checkpoint are taken as they are.

    Args:
        masks: by name.
        rules: the rule of each.
        uniform: whether every layer has its rule's ratio for itself.
        targets: by the name of the mask.
    """
    pools: dict[Rule, list[tuple[WeightPolicy, int]]] = {}
    for name, mask in masks:
        if isinstance(mask, WeightPolicy) and mask.planned:
            target = int(targets[name]) if name in targets else UNSET
            pools.setdefault(rules[name], []).append((mask, target))
    found: list[str] = []
    for rule, pool in pools.items():
        expected, saved = _expected(rule, [mask for mask, _ in pool], uniform), [target for _, target in pool]
        if UNSET in saved:
            continue
        if sum(expected) != sum(saved):
            found.append(
                f"the checkpoint's targets are {_amount(saved, pool[0][0])}, but {rule_text(rule)} asks for "
                f"{_amount(expected, pool[0][0])}"
            )
    return found


def seal(rules: Mapping[str, Rule], allocation: str) -> int:
    """A number for what the targets of channels follow from: the rule of each mask, and the allocation.

    It is odd, and has 62 bits, so that a floating-point number cannot hold it.
    """
    lines = [
        f"{name} {rule.ratio} {rule.mac_reduction} {rule.round_to} {rule.min_channels}\n"
        for name, rule in rules.items()
        if isinstance(rule, Channels)
    ]
    digest = hashlib.sha256("".join([f"{allocation}\n", *lines]).encode()).digest()
    return 1 << 61 | int.from_bytes(digest[:8], "big") >> 3 | 1


def _expected(rule: Rule, masks: list[WeightPolicy], uniform: bool) -> list[int]:
    if not isinstance(rule, Unstructured):
        return [(mask.of - mask.keep) * MILLION for mask in masks if isinstance(mask, NMPolicy)]
    if not uniform:
        return [round(rule.ratio * sum(mask.size for mask in masks))]
    return [uniform_share(mask.size, rule.ratio) for mask in masks]


def _amount(targets: list[int], mask: WeightPolicy) -> str:
    if isinstance(mask, NMPolicy):
        return f"{targets[0] // MILLION} of every {mask.of} weights"
    return f"{sum(targets)} weights"
