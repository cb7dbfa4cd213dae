"""Whether a checkpoint's pruning targets are those that the spec asks for, and its masks in the same places.

Once the ramp has begun, the targets are part of the state. If a checkpoint of another spec were loaded, its
targets would silently replace those of the present spec, so `Pruner` refuses it with these reasons. It also
refuses one whose masks were on parameters where those of the present model are on weights that are computed
from them, or the other way round: the trained weights would give something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdp_fx.allocation import uniform_share
from pdp_fx.granularity import NM, Channels, Rule, Unstructured, rule_text
from pdp_fx.policy import MILLION, UNSET, MaskPolicy, NMPolicy, WeightPolicy
from pdp_fx.policy_names import policy_text
from pdp_fx.spec import PruneSpec

WAY_OUT = (
    "prepare with the spec of the checkpoint, or leave out its keys that begin with '{}' to load the weights "
    "alone"
)

_RULES, _PLACES = 30, 29
"""How many bits of a seal say what the rules are, and how many where the masks are."""


def conflicts(
    masks: Sequence[tuple[str, MaskPolicy]],
    rules: Mapping[str, Rule],
    spec: PruneSpec,
    computed: Iterable[str],
    state: Mapping[str, Any],
    prefix: str,
) -> list[str]:
    """How a checkpoint contradicts the present masks, one sentence each.

    Args:
        masks: the masks with their names.
        rules: the rule of each mask, by name.
        spec: the present spec.
        computed: the names of the parameters in whose place a computed weight is masked.
        state: the state dict.
        prefix: of the pruner's keys in it.
    """
    # Of anything else that is not a tensor, and of other shapes, torch tells what is wrong.
    numbers = {key: held for key, held in state.items() if isinstance(held, Tensor) and not held.is_meta}
    keys = {name: f"{prefix}masks.{name}.units" for name, _ in masks}
    saved = {name: numbers[key] for name, key in keys.items() if key in numbers}
    if any(saved[name].shape != mask.units.shape for name, mask in masks if name in saved):
        return ["the spec has a tau_end and that of the checkpoint has none, or the other way round"]
    whole = {f"{prefix}{name}": numbers.get(f"{prefix}{name}") for name in ("counter", "seal")}
    whole |= {keys[name]: units for name, units in saved.items()}
    cast = {held.dtype for held in whole.values() if held is not None} - {torch.int64}
    if cast:
        return [
            f"the whole numbers of the schedule are {cast.pop()} in the checkpoint, where they are rounded: "
            f"leave the keys that begin with '{prefix}' out of casts, or out of the checkpoint to load the "
            "weights alone"
        ]
    targets = {name: int(units[0]) for name, units in saved.items()}
    found = _other_totals(masks, rules, spec.allocation == "uniform", targets)
    counter = whole[f"{prefix}counter"]
    trained = counter is not None and int(counter) > 0
    differs = _differs(whole[f"{prefix}seal"], seal(rules, spec, computed))
    # Masks of another name are left alone with strict=False, but not what counts the steps.
    renamed = trained and any(name not in targets for name, _ in masks)
    fixed = renamed or any(targets.get(name, UNSET) != UNSET for name, mask in masks if mask.planned)
    if differs.rules and fixed:
        texts = ", ".join(dict.fromkeys(map(rule_text, rules.values())))
        found.insert(
            0,
            "the checkpoint's masks follow other rules, another policy or another way of allocation, than "
            f"{texts} with allocation={spec.allocation!r} and min_keep={spec.min_keep:g}",
        )
    elif differs.places and trained:
        found.insert(
            0,
            "the checkpoint was trained with masks in other places: here they are on what is computed from "
            f"{', '.join(sorted(computed)) or 'no parameter'}, and on parameters themselves otherwise",
        )
    if differs.unit and trained:
        other = "steps" if spec.schedule.per == "epoch" else "epochs"
        found.append(f"the checkpoint's schedule counts {other}, and the spec's per={spec.schedule.per!r}")
    return [f"{conflict}; {WAY_OUT.format(prefix)}" for conflict in found]


def _other_totals(
    masks: Sequence[tuple[str, MaskPolicy]],
    rules: Mapping[str, Rule],
    uniform: bool,
    targets: Mapping[str, int],
) -> list[str]:
    """The rules of single weights whose targets in the checkpoint are not those that the rule asks for.

    Under global allocation their sum is compared: which layer has how many depends on the weights. The
    targets of channels also depend on the limits of every group, so their rules are compared by `seal`
    alone. A rule is not checked if a target of one of its masks is missing.
    """
    pools: dict[Rule, list[tuple[str, WeightPolicy]]] = {}
    for name, mask in masks:
        if isinstance(mask, WeightPolicy) and mask.planned:
            pools.setdefault(rules[name], []).append((name, mask))
    found: list[str] = []
    for rule, pool in pools.items():
        together = isinstance(rule, Unstructured) and not uniform
        for part in [pool] if together else [[each] for each in pool]:
            saved = [targets.get(name, UNSET) for name, _ in part]
            name, mask = part[0]
            wanted, got = _expected(rule, [mask for _, mask in part], uniform), sum(saved)
            if UNSET not in saved and wanted != got:
                place = "" if together else f" in {name}"
                found.append(
                    f"the checkpoint's targets{place} are {_amount(got, mask)}, but {rule_text(rule)} asks "
                    f"for {_amount(wanted, mask)}"
                )
                break
    return found


def seal(rules: Mapping[str, Rule], spec: PruneSpec, computed: Iterable[str]) -> int:
    """A digest of what targets do not tell: the rules, the allocation, where masks are, and what is counted.

    It is odd and has 62 bits, so no floating-point number equals it: if the state is cast to floating point
    and back, or averaged, the seal changes.

    Args:
        rules: the rule of each mask, by name.
        spec: the spec, whose schedule counts epochs or steps.
        computed: the names of the parameters in whose place a computed weight is masked.
    """
    guard = None if spec.allocation == "uniform" else spec.min_keep
    lines = [f"{spec.allocation} {guard}", *(f"{name} {_policy(rule)}" for name, rule in rules.items())]
    lines += [
        f"{name} {rule.ratio} {rule.mac_reduction} {rule.round_to} {rule.min_channels}"
        for name, rule in rules.items()
        if isinstance(rule, Channels)
    ]
    lines += [f"{name} {rule.keep}:{rule.of}" for name, rule in rules.items() if isinstance(rule, NM)]
    lines += [f"{name} {rule.ratio}" for name, rule in rules.items() if isinstance(rule, Unstructured)]
    parts = (_RULES, _digest(lines)), (_PLACES, _digest(sorted(computed))), (1, spec.schedule.per == "step")
    number = 1
    for bits, digest in parts:
        number = number << bits | digest % (1 << bits)
    return number << 1 | 1


def _policy(rule: Rule) -> str:
    return policy_text(rule.policy) if callable(rule.policy) else ""


def _digest(lines: Iterable[str]) -> int:
    """A number of 64 bits."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big")


class _Differs(NamedTuple):
    """Which parts of a checkpoint's seal are others."""

    rules: bool
    places: bool
    unit: bool


def _differs(saved: Tensor | None, expected: int) -> _Differs:
    bits = 0 if saved is None else (int(saved) ^ expected) >> 1
    return _Differs(bits >> 1 + _PLACES != 0, (bits >> 1) % (1 << _PLACES) != 0, bits % 2 != 0)


def _expected(rule: Rule, masks: Sequence[WeightPolicy], uniform: bool) -> int:
    """The sum of the targets of these masks under the present rule."""
    if isinstance(rule, Unstructured):
        size = sum(mask.size for mask in masks)
        return uniform_share(size, rule.ratio) if uniform else round(rule.ratio * size)
    return sum((mask.of - mask.keep) * MILLION for mask in masks if isinstance(mask, NMPolicy))


def _amount(target: int, mask: WeightPolicy) -> str:
    if isinstance(mask, NMPolicy):
        return f"{target // MILLION} of every {mask.of} weights"
    return f"{target} weights"
