"""Whether a checkpoint's pruning targets are those that the spec asks for, and its masks in the same places.

Once the ramp has begun, the targets are part of the state. If a checkpoint of another spec were loaded, its
targets would silently replace those of the present spec, so `Pruner` refuses it with these reasons. It also
refuses one whose masks were on parameters where those of the present model are on weights that are computed
from them, or the other way round: the trained weights would give something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pdp_fx.allocation import uniform_share
from pdp_fx.granularity import NM, Channels, Rule, Unstructured, rule_text
from pdp_fx.policy import MILLION, UNSET, MaskPolicy, NMPolicy, WeightPolicy
from pdp_fx.policy_names import policy_text

WAY_OUT = (
    "prepare with the spec of the checkpoint, or leave out its keys that begin with '{}' to load the weights "
    "alone"
)

_HALF = 30
"""How many bits of a seal say what the rules are, and how many where the masks are."""


def conflicts(
    masks: Sequence[tuple[str, MaskPolicy]],
    rules: Mapping[str, Rule],
    allocation: str,
    computed: Iterable[str],
    state: Mapping[str, Tensor],
    prefix: str,
) -> list[str]:
    """How a checkpoint contradicts the present masks, one sentence each.

    Args:
        masks: the masks with their names.
        rules: the rule of each mask, by name.
        allocation: that of the spec.
        computed: the names of the parameters in whose place a computed weight is masked.
        state: the state dict.
        prefix: of the pruner's keys in it.
    """
    keys = {name: f"{prefix}masks.{name}.units" for name, _ in masks}
    saved = {name: state[key] for name, key in keys.items() if key in state and not state[key].is_meta}
    if any(saved[name].shape != mask.units.shape for name, mask in masks if name in saved):
        return ["the spec has a tau_end and that of the checkpoint has none, or the other way round"]
    targets = {name: int(units[0]) for name, units in saved.items()}
    found = _other_totals(masks, rules, allocation == "uniform", targets)
    others, elsewhere = _differs(state.get(f"{prefix}seal"), seal(rules, allocation, computed))
    trained = int(state.get(f"{prefix}counter", 0)) > 0
    # Masks of another name are left alone with strict=False, but not what counts the steps.
    renamed = trained and any(name not in targets for name, _ in masks)
    if others and (renamed or any(targets.get(name, UNSET) != UNSET for name, mask in masks if mask.planned)):
        texts = ", ".join(dict.fromkeys(map(rule_text, rules.values())))
        found.insert(
            0,
            "the checkpoint's masks follow other rules, another policy or another allocation, than "
            f"{texts} with allocation={allocation!r}",
        )
    elif elsewhere and trained:
        found.insert(
            0,
            "the checkpoint was trained with masks in other places: here they are on what is computed from "
            f"{', '.join(sorted(computed)) or 'no parameter'}, and on parameters themselves otherwise",
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


def seal(rules: Mapping[str, Rule], allocation: str, computed: Iterable[str]) -> int:
    """A digest of what targets do not tell of the rules, of the allocation, and of where masks are.

    It is odd and has 62 bits, so no floating-point number equals it: if the state is cast to floating point
    and back, or averaged, the seal changes.

    Args:
        rules: the rule of each mask, by name.
        allocation: that of the spec.
        computed: the names of the parameters in whose place a computed weight is masked.
    """
    lines = [allocation, *(f"{name} {_policy(rule)}" for name, rule in rules.items())]
    lines += [
        f"{name} {rule.ratio} {rule.mac_reduction} {rule.round_to} {rule.min_channels}"
        for name, rule in rules.items()
        if isinstance(rule, Channels)
    ]
    lines += [f"{name} {rule.keep}:{rule.of}" for name, rule in rules.items() if isinstance(rule, NM)]
    return ((1 << _HALF | _digest(lines)) << _HALF | _digest(sorted(computed))) << 1 | 1


def _policy(rule: Rule) -> str:
    return policy_text(rule.policy) if callable(rule.policy) else ""


def _digest(lines: Iterable[str]) -> int:
    """A number of half a seal."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 64 - _HALF


def _differs(saved: Tensor | None, expected: int) -> tuple[bool, bool]:
    """Whether the halves of a checkpoint's seal are others; of one that was cast, the first counts so."""
    if saved is None or saved.is_meta:
        return False, False
    if saved.dtype != torch.int64:
        return True, False
    differs = int(saved) ^ expected
    return differs >> 1 + _HALF != 0, differs % (2 << _HALF) != 0


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
