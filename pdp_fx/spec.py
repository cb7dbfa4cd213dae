"""What to prune, how much, and when: `PruneSpec`, the one object that a user writes.

Every part is a frozen, hashable dataclass that checks its values when it is built, so that an impossible spec
fails before any training. A spec can be written to a dict or to TOML and read back without loss. The rules
are in `granularity`, the overrides in `overrides`, the reading and writing in `spec_text`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal, Self, TypeAlias, final

from torch import nn

from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described, finite_number, one_of, store
from pdp_fx.granularity import NM as NM
from pdp_fx.granularity import Channels as Channels
from pdp_fx.granularity import Rule as Rule
from pdp_fx.granularity import Unstructured as Unstructured
from pdp_fx.granularity import checked_rule
from pdp_fx.overrides import Override, Overrides, check_all_match, normalised, storable_key, winner
from pdp_fx.schedule import Schedule as Schedule
from pdp_fx.softness import Softness
from pdp_fx.spec_text import (
    Plain,
    build,
    fields_to_plain,
    parse_json,
    parse_toml,
    rule_from_plain,
    rule_to_plain,
    table,
    to_toml,
)

Allocation: TypeAlias = Literal["global", "dynamic", "uniform"]
Forward: TypeAlias = Literal["soft", "hard"]

_PAPER_SCHEDULE = Schedule()


@final
@dataclass(frozen=True, init=False)
class PruneSpec:
    """What `pdp_fx.prepare` does to a model.

    Args:
        default: the rule of every layer that no override matches; None prunes only what the overrides name.
        overrides: rules for some layers, as a mapping or as pairs; None as a rule skips the layer. A key is
            the name of a module (a container's name covers all inside it; the longest matching name wins),
            "re:<regex>" for whole module names (the first match wins), or a module type, also written
            "type:torch.nn.Linear" (subclasses match; the first match wins). Names win over regexes, regexes
            over types, types over the default.
        schedule: when the target is reached.
        tau: softness of the masks in squared units of the weights, m = sigmoid((w^2 - t^2) / tau), above 0
            (paper, section 3.1). "rel:c" stands for c times the mean square of the layer's weights (of a
            group's channel scores) at each step, so that it does not depend on the scale of the weights.
        allocation: "global" ranks the magnitudes of all layers together once, when the ramp starts, and so
            fixes how much of each layer goes (the paper); "dynamic" repeats that ranking while the ramp
            runs, after each call of `step` but about a hundred times at most; "uniform" gives each layer
            its rule's ratio.
        min_keep: unless the allocation is uniform, no layer keeps less than this share of what a uniform
            allocation would keep, rounded down to whole weights or channels, from 0 (the paper's unguarded
            ranking) to 1 (uniform).
        tau_end: the number in tau when the target is reached; tau changes geometrically from its start to
            this end during the ramp. None keeps it constant.
        forward: what layers compute with in training mode. "soft" is w m, as in the paper (equation 1).
            "hard" is the weights of eval mode, with a straight-through gradient to all weights, including
            the pruned ones (Bengio et al., 2013, arXiv:1308.3432); for channels the gradient is that of the
            soft mask of their scores. As tau grows, the gradient of "soft" tends to that of "hard", up to a
            constant factor.
        pruned_decay: lambda in the term 1/2 lambda |w|^2 over the weights that are pruned now, which
            `pdp_fx.penalty` returns for the loss; 0 or more. With ``forward="hard"`` pruned weights keep
            moving, and this term keeps the masks from flipping back and forth (SR-STE, Zhou et al., 2021,
            arXiv:2102.04010, uses 2e-4). It does not apply to channels.

    Raises:
        SpecError: a value is impossible or of the wrong type, a key is given twice, or nothing is pruned.

    Example:
        >>> spec = PruneSpec(Unstructured(0.9), overrides={"fc": None, "re:layer4.*": NM(2, 4)})
        >>> spec.rule_for("layer4.0.conv1", nn.Conv2d)
        NM(keep=2, of=4)
    """

    default: Rule | None
    overrides: tuple[Override, ...]
    schedule: Schedule
    tau: float | str
    allocation: Allocation
    min_keep: float
    tau_end: float | None
    forward: Forward
    pruned_decay: float

    def __init__(
        self,
        default: Rule | None,
        overrides: Overrides = (),
        schedule: Schedule = _PAPER_SCHEDULE,
        tau: float | str = 1e-4,
        allocation: Allocation = "global",
        min_keep: float = 0.25,
        tau_end: float | None = None,
        forward: Forward = "soft",
        pruned_decay: float = 0.0,
    ) -> None:
        store(
            self,
            default=checked_rule("PruneSpec: default", default),
            overrides=normalised(overrides),
            schedule=_checked_schedule(schedule),
            tau=tau if isinstance(tau, str) else finite_number("PruneSpec: tau", tau),
            allocation=one_of("PruneSpec: allocation", allocation, ("global", "dynamic", "uniform")),
            min_keep=finite_number("PruneSpec: min_keep", min_keep),
            tau_end=None if tau_end is None else finite_number("PruneSpec: tau_end", tau_end),
            forward=one_of("PruneSpec: forward", forward, ("soft", "hard")),
            pruned_decay=finite_number("PruneSpec: pruned_decay", pruned_decay),
        )
        self._check_ranges()

    @property
    def softness(self) -> Softness:
        """`tau`, `tau_end` and `forward` as one value."""
        return replace(Softness.parse(self.tau, self.tau_end), hard=self.forward == "hard")

    def rule_for(self, name: str, module: nn.Module | type[nn.Module]) -> Rule | None:
        """The rule for the parameters of the module `name`, an instance or a type; None if it is skipped."""
        module_type = module if isinstance(module, type) else type(module)
        override = winner(self.overrides, name, module_type)
        return self.default if override is None else override[1]

    @property
    def through_norms(self) -> bool:
        """Whether any rule prunes residual streams that LayerNorm, RMSNorm or a mean runs over."""
        rules = [self.default, *(rule for _, rule in self.overrides)]
        return any(isinstance(rule, Channels) and rule.through_norms for rule in rules)

    def check_matches(self, modules: Mapping[str, nn.Module]) -> None:
        """Check that every override matches at least one of a model's modules, which are given by name.

        Raises:
            SpecError: some keys match nothing; the message lists them with the names that come close.

        Example:
            >>> model = nn.Sequential(nn.Linear(2, 2))
            >>> PruneSpec(Unstructured(0.9), {"0": None}).check_matches(dict(model.named_modules()))
        """
        check_all_match([key for key, _ in self.overrides], modules)

    def to_dict(self) -> dict[str, Plain]:
        """The spec as dicts, strings, numbers and None, ready for `json.dump`; None options are left out.

        Raises:
            SpecError: an override's key is a class that cannot be imported by its name.
        """
        return {
            "default": rule_to_plain(self.default),
            "tau": self.tau,
            "allocation": self.allocation,
            "min_keep": self.min_keep,
            **({} if self.tau_end is None else {"tau_end": self.tau_end}),
            **({} if self.forward == "soft" else {"forward": self.forward}),
            **({"pruned_decay": self.pruned_decay} if self.pruned_decay else {}),
            "schedule": fields_to_plain(self.schedule),
            "overrides": {storable_key(key): rule_to_plain(rule) for key, rule in self.overrides},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Read the spec that `to_dict` wrote; "skip" may stand for None. A key "type:..." imports its class.

        Raises:
            SpecError: a key is unknown or missing, or a value is impossible; the message names the key.
        """
        given = table(values, "the spec")
        if "default" in given:
            given["default"] = rule_from_plain(given["default"], "default")
        if "schedule" in given:
            given["schedule"] = build(Schedule, given["schedule"], "schedule")
        if "overrides" in given:
            overrides = table(given["overrides"], "overrides")
            given["overrides"] = {
                key: rule_from_plain(rule, f"overrides[{key!r}]") for key, rule in overrides.items()
            }
        return build(cls, given, "the spec")

    def to_toml(self) -> str:
        """The spec as TOML text, with "skip" for None.

        Raises:
            SpecError: an override's key is a class that cannot be imported by its name.
        """
        return to_toml(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The spec that a TOML text describes.

        Raises:
            SpecError: it is no text or not valid TOML, or as in `from_dict`.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"PruneSpec.from_toml needs a text, got {described(text)}; load reads a file")
        return cls.from_dict(parse_toml(text))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The spec in a .toml or .json file in UTF-8.

        Raises:
            SpecError: it is no path, the file has another suffix, or its text is not a spec; the message
                names the file.
            OSError: the file cannot be read.
        """
        if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"PruneSpec.load needs the path of a file, got {described(path)}")
        readers = {".toml": parse_toml, ".json": parse_json}
        path = Path(path)
        if path.suffix not in readers:
            raise SpecError(f"{path}: a spec is read from a file that ends in .toml or .json")
        try:
            return cls.from_dict(table(readers[path.suffix](path.read_text(encoding="utf-8")), "the spec"))
        except UnicodeDecodeError as err:
            raise SpecError(f"{path}: the text is not UTF-8: {err}") from err
        except SpecError as err:
            raise SpecError(f"{path}: {err}") from err

    def _check_ranges(self) -> None:
        Softness.parse(self.tau, self.tau_end)
        if not 0 <= self.min_keep <= 1:
            raise SpecError(
                f"PruneSpec: min_keep must lie between 0 (unguarded) and 1 (uniform), got {self.min_keep:g}"
            )
        if self.pruned_decay < 0:
            raise SpecError(f"PruneSpec: pruned_decay must be 0 or more, got {self.pruned_decay:g}")
        rules = [rule for rule in (self.default, *(rule for _, rule in self.overrides)) if rule is not None]
        if self.pruned_decay and all(isinstance(rule, Channels) for rule in rules):
            raise SpecError(
                "PruneSpec: pruned_decay is for single weights (Unstructured, NM), and every rule here is of "
                "Channels, which have none; leave it out"
            )
        if self.default is None and all(rule is None for _, rule in self.overrides):
            raise SpecError(
                "PruneSpec: nothing would be pruned, for the default is None and no override has a rule; "
                "write for example PruneSpec(Unstructured(0.9)) or PruneSpec(None, {'fc': Unstructured(0.9)})"
            )


def _checked_schedule(schedule: object) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    raise SpecError(f"PruneSpec: schedule must be a Schedule, got {described(schedule)}; write Schedule()")
