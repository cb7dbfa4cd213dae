"""The rules of a spec: `Unstructured` for single weights, `NM` for N:M patterns, `Channels` for channels."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, final

from torch import nn

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, finite_number, store, truth, whole_number
from pdp_fx.policy_names import policy_text, resolved

Policy: TypeAlias = Callable[[Any], nn.Module]
"""The mask policy of a rule: a subclass of one of the classes in `pdp_fx.policy`, or any other callable that
makes a mask from a `pdp_fx.policy.MaskSite`, such as a `functools.partial` of such a class."""


@final
@dataclass(frozen=True)
class Unstructured:
    """Prune the single weights of smallest magnitude.

    Args:
        ratio: share of the weights to prune, over all layers that have this rule, 0 < ratio < 1; 0.9 keeps
            one weight in ten.
        policy: the mask policy, a subclass of `WeightPolicy` or its import path; None is PDP's soft mask.

    Raises:
        SpecError: the ratio is not a number strictly between 0 and 1, or the policy is not callable.

    Example:
        >>> Unstructured(0.9)
        Unstructured(ratio=0.9)
    """

    ratio: float
    policy: Policy | str | None = None

    def __post_init__(self) -> None:
        store(self, ratio=_share("Unstructured", "ratio", self.ratio))
        store(self, policy=resolved("Unstructured: policy", self.policy))

    def __repr__(self) -> str:
        return _text(self)


@final
@dataclass(frozen=True)
class NM:
    """Keep `keep` weights of every `of` consecutive ones along the input channels (paper, section 3.4).

    Args:
        keep: how many weights of each group stay, 1 <= keep < of. NM(2, 4) keeps 2 of 4.
        of: how many weights a group has.
        policy: the mask policy, a subclass of `NMPolicy` or its import path; None is PDP's soft mask.

    Raises:
        SpecError: keep or of is not a whole number, the group would be left empty or full, or the policy is
            not callable.

    Example:
        >>> NM(2, 4)
        NM(keep=2, of=4)
    """

    keep: int
    of: int
    policy: Policy | str | None = None

    def __post_init__(self) -> None:
        keep = whole_number("NM: keep", self.keep, 1)
        of = whole_number("NM: of", self.of, 2)
        if keep == of:
            raise SpecError(f"NM({keep}, {of}) keeps every weight; write None as the rule to skip a layer")
        if keep > of:
            raise SpecError(
                f"NM({keep}, {of}) would keep {keep} of {of}; the kept count comes first: NM({of}, {keep})"
            )
        store(self, keep=keep, of=of, policy=resolved("NM: policy", self.policy))

    def __repr__(self) -> str:
        return _text(self)


@final
@dataclass(frozen=True)
class Channels:
    """Prune whole channels, so that the converted model has smaller layers. Give one of the two targets.

    Channels are ranked by the root mean square of the weights that produce them. Rows of weights that the
    model standardises, as those of BiT's convolutions, all have the same: rounding ranks these.

    Args:
        ratio: share of the channels to prune, over all groups that have this rule, 0 < ratio < 1.
        mac_reduction: share of the multiply-accumulates to save, 0 < mac_reduction < 1; 0.5 halves them.
        round_to: the kept channel count is a multiple of this (16 suits AVX-512), where the layer allows it.
        min_channels: the smallest number of channels that a layer keeps.
        through_norms: whether to prune the channels of a residual stream that LayerNorm, RMSNorm, a mean
            or a variance runs over, too. These norms then compute their statistics over the kept channels in
            training; GroupNorm and norms inside a block always do.
        policy: the mask policy, a subclass of `ChannelPolicy` or its import path; None is PDP's soft mask.

    Raises:
        SpecError: neither or both targets are given, a value is out of its range, or the policy is not
            callable.

    Example:
        >>> Channels(mac_reduction=0.5, round_to=16)
        Channels(ratio=None, mac_reduction=0.5, round_to=16, min_channels=1, through_norms=False)
    """

    ratio: float | None = None
    mac_reduction: float | None = None
    round_to: int = 1
    min_channels: int = 1
    through_norms: bool = False
    policy: Policy | str | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.mac_reduction is None):
            found = "neither" if self.ratio is None else "both"
            raise SpecError(
                f"Channels needs exactly one of ratio and mac_reduction, got {found}; "
                "write Channels(ratio=0.5) or Channels(mac_reduction=0.5)"
            )
        if self.ratio is not None:
            store(self, ratio=_share("Channels", "ratio", self.ratio))
        if self.mac_reduction is not None:
            store(self, mac_reduction=_share("Channels", "mac_reduction", self.mac_reduction))
        store(
            self,
            round_to=whole_number("Channels: round_to", self.round_to, 1),
            min_channels=whole_number("Channels: min_channels", self.min_channels, 1),
            through_norms=truth("Channels: through_norms", self.through_norms),
            policy=resolved("Channels: policy", self.policy),
        )

    def __repr__(self) -> str:
        return _text(self)


Rule: TypeAlias = Unstructured | NM | Channels
"""The rule of a layer; where None is allowed in its place, it skips the layer."""


def rule_text(rule: Rule) -> str:
    """The rule as a person would write it, without the options that have their default value.

    Example:
        >>> rule_text(Channels(mac_reduction=0.5)), rule_text(NM(2, 4))
        ('Channels(mac_reduction=0.5)', 'NM(2, 4)')
    """
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    given = [f"{f.name}={_shown(values[f.name])}" for f in fields(rule) if values[f.name] != f.default]
    if isinstance(rule, NM):
        given[:2] = [str(rule.keep), str(rule.of)]
    return f"{type(rule).__name__}({', '.join(given)})"


def _text(rule: Rule) -> str:
    """The rule with all its options, and the policy if it has one."""
    given = [(field.name, getattr(rule, field.name)) for field in fields(rule)]
    shown = [f"{name}={_shown(value)}" for name, value in given if name != "policy" or value is not None]
    return f"{type(rule).__name__}({', '.join(shown)})"


def _shown(value: object) -> str:
    return policy_text(value) if callable(value) else repr(value)


def checked_rule(where: str, rule: object) -> Rule | None:
    """Return `rule` if it is a rule or None; else raise a `SpecError` that names `where` it was given."""
    if rule is None or isinstance(rule, Unstructured | NM | Channels):
        return rule
    hint = f"Unstructured({rule})" if isinstance(rule, float) else "for example Unstructured(0.9)"
    raise SpecError(
        f"{where} must be Unstructured, NM, Channels or None (skip), got {described(rule)}; write {hint}"
    )


def _share(owner: str, field: str, value: object) -> float:
    """`value` as a float strictly between 0 and 1."""
    share = finite_number(f"{owner}: {field}", value)
    if share <= 0:
        raise SpecError(
            f"{owner}({field}={share:g}) prunes nothing; expected 0 < {field} < 1, "
            "or write None as the rule to skip a layer"
        )
    if share >= 1:
        percent = f"; {share:g} % is written {share / 100:g}" if 1 < share < 100 else ""
        raise SpecError(f"{owner}({field}={share:g}) would leave nothing; expected 0 < {field} < 1{percent}")
    return share
