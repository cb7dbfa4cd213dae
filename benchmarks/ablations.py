"""What each part of PDP is worth: ResNet20 on CIFAR-10 with one thing changed at a time.

The rows of a table are trained in the tables' loop with the same weights, batches, ramp and target, and each
is set beside the row that it differs from in one thing. Single weights have a table for every sparsity,
whole channels one for every share of saved multiply-accumulates.

    python -m benchmarks.ablations --data DATA --short --seeds 0 1 2
    python -m benchmarks.ablations --data DATA --short --ablations hard through-t --sparsity 0.95
    python -m benchmarks.ablations --short --table
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from tabulate import tabulate
from torch import nn

import pdp_fx
from benchmarks import results
from benchmarks.ablation_masks import (
    RawNorm,
    ThroughThreshold,
    mask_before_norms,
)
from benchmarks.cifar import SKIPPED
from benchmarks.data import Batches
from benchmarks.methods import METHODS, Budget, Method, Policy
from benchmarks.results import Record, spread
from benchmarks.rivals import GMP
from benchmarks.table_runs import ImageTable, converted, epochs_of, image_parser, parsed
from benchmarks.training import Settings, Trainer, accuracy


@dataclass(frozen=True)
class Setting:
    """PDP with one thing changed.

    Attributes:
        beside: the name of the setting that it differs from.
        policy: what makes the masks; None is PDP.
        options: of the spec.
        channels: whether whole channels go, or single weights.
        before_norms: whether the masks of channels multiply the weights of convolutions ahead of batch norm.
    """

    beside: str = "pdp"
    policy: Policy | None = None
    options: Mapping[str, str | float] = field(default_factory=dict[str, str | float])
    channels: bool = False
    before_norms: bool = False


_of_channels = partial(Setting, "channels", channels=True)

ABLATIONS: dict[str, Setting] = {
    "pdp": Setting(),
    "hard": Setting(policy=GMP),
    "hard-ste": Setting(options={"forward": "hard"}),
    **{f"tau-{tau:g}": Setting(options={"tau": tau}) for tau in (1e-6, 1e-5, 1e-3, 1e-2)},
    **{f"tau-rel-{c:g}": Setting(options={"tau": f"rel:{c:g}"}) for c in (0.001, 0.01, 0.1, 1.0)},
    "through-t": Setting(policy=ThroughThreshold),
    "through-t-rel-0.1": Setting("tau-rel-0.1", ThroughThreshold, {"tau": "rel:0.1"}),
    "channels": _of_channels(),
    "conv-weight": _of_channels(before_norms=True),
    "raw-norm": _of_channels(RawNorm),
}
"""Without soft masks: `hard` is their limit for tau to 0, in which a pruned weight has no gradient;
`hard-ste` lets the gradient through."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: of `ABLATIONS`.
        amount: share of the weights that go, or of the multiply-accumulates to save.
        seed: of the weights and batches.
        epochs: of the whole training.
        validated: whether accuracy is that on held out training images, for tuning.
        rate: peak learning rate.
        batch: images in a batch.
    """

    name: str
    amount: float
    seed: int
    epochs: int
    validated: bool = False
    rate: float = 0.4
    batch: int = 128

    @property
    def key(self) -> str:
        """What tells runs apart in the results."""
        on = " validation" if self.validated else ""
        how = f"{self.epochs} epochs rate {self.rate:g} batch {self.batch} seed {self.seed}"
        return f"ablation {self.name} {self.amount:g} {how}{on}"


def method_of(setting: Setting, budget: Budget) -> Method:
    """PDP's method of the tables, with what the setting changes."""
    return replace(METHODS["pdp"](budget, None), policy=setting.policy, options=setting.options)


@dataclass
class AblationTable(ImageTable[Run]):
    """The same data and loop with parts of PDP changed."""

    def trainer(self, run: Run, steps: int) -> Trainer:
        setting, budget = ABLATIONS[run.name], Budget(run.epochs, steps)
        model = self.prepared(run)
        if setting.before_norms:
            mask_before_norms(model)
        return Trainer(model, method_of(setting, budget), budget, replace(self.settings, rate=run.rate))

    def prepared(self, run: Run) -> nn.Module:
        """The net of a run with its masks where `pdp_fx` puts them."""
        setting = ABLATIONS[run.name]
        method = method_of(setting, Budget(run.epochs, 1))
        spec = method.channel_spec(run.amount) if setting.channels else method.spec(run.amount, SKIPPED)
        return pdp_fx.prepare(self.network(run.seed), spec, self.example)

    @property
    def example(self) -> torch.Tensor:
        """Two empty images."""
        return torch.zeros(2, 3, 32, 32, device=self.settings.device)

    def measured(self, run: Run, trainer: Trainer, feed: Batches) -> Record:
        model, images = trainer.model, self.split(run.validated)[1]
        report = pdp_fx.report(model.eval(), self.example)
        rows = [row for row in report.rows if row.soft is not None]
        size = sum(row.weights for row in rows)
        return {
            "hard": accuracy(model, feed, images),
            "soft": accuracy(model, feed, images, soft=True),
            "converted": accuracy(self.converted(run, model), feed, images),
            "sparsity": 1 - sum(row.left for row in rows) / size,
            "undecided": sum((row.soft or 0.0) * row.weights for row in rows) / size,
            "macs": report.macs_left,
            "layers": {row.layer: [row.left, row.weights] for row in rows},
        }

    def converted(self, run: Run, model: nn.Module) -> nn.Module:
        """The model without what was pruned, also where that changes its outputs."""
        if ABLATIONS[run.name].before_norms:
            usual = self.prepared(run)
            usual.load_state_dict(model.state_dict())
            model = usual
        return converted(model)


Found = dict[str, dict[int, Record]]
"""Records by setting and seed."""

HEADS = (
    "setting",
    "accuracy %",
    "difference",
    "to",
    "with soft masks",
    "after removal",
    "pruned %",
    "undecided %",
    "MACs e6",
    "s/epoch",
)


def as_text(records: Sequence[Record], epochs: int, validated: bool = False) -> str:
    """One table for each amount of single weights, then of channels."""
    tables: dict[tuple[bool, float, float, int], Found] = {}
    for record in records:
        if record["epochs"] == epochs and record["validated"] == validated:
            kind = ABLATIONS[record["name"]].channels, record["amount"], record["rate"], record["batch"]
            tables.setdefault(kind, {}).setdefault(record["name"], {})[record["seed"]] = record
    on = "held out training images" if validated else "test images"
    parts: list[str] = []
    for (channels, amount, rate, batch), found in sorted(tables.items(), key=lambda table: table[0]):
        rows = [_row(name, found) for name in ABLATIONS if name in found]
        what = "of the MACs saved by channels" if channels else "of 267,696 weights"
        how = f"{epochs} epochs, rate {rate:g}, batch {batch}, {on}"
        title = f"Ablations, ResNet20 / CIFAR-10, {amount:.1%} {what}, {how}"
        parts.append(f"{title}\n{tabulate(rows, HEADS, disable_numparse=True)}\n")
    return "\n".join(parts)


def _row(name: str, found: Found) -> tuple[str, ...]:
    records, beside = list(found[name].values()), ABLATIONS[name].beside

    def mean(field: str, digits: int, factor: float = 1.0) -> str:
        return f"{factor * statistics.fmean(record[field] for record in records):.{digits}f}"

    def percent(field: str) -> str:
        return spread([100 * record[field] for record in records])

    others = found.get(beside, {}) if beside != name else {}
    pairs = [(record, others[seed]) for seed, record in found[name].items() if seed in others]
    gains = [100 * (record["hard"] - other["hard"]) for record, other in pairs]
    return (
        name,
        percent("hard"),
        spread(gains) if gains else "",
        beside if gains else "",
        percent("soft"),
        percent("converted"),
        mean("sparsity", 2, 100),
        mean("undecided", 2, 100),
        mean("macs", 2, 1e-6),
        mean("seconds", 1),
    )


def wanted(options: argparse.Namespace) -> Iterator[Run]:
    """The runs that the options ask for, with those that they are set beside."""
    chosen = {*options.ablations, *(ABLATIONS[name].beside for name in options.ablations)}
    # A setting may stand beside one that is itself set beside another.
    chosen |= {ABLATIONS[name].beside for name in chosen}
    for seed in options.seeds:
        for name in (name for name in ABLATIONS if name in chosen):
            for amount in options.reduction if ABLATIONS[name].channels else options.sparsity:
                on, rate, batch = options.validate, options.rate, options.batch
                yield Run(name, amount, seed, epochs_of(options), on, rate, batch)


def main(arguments: list[str] | None = None) -> None:
    parser = image_parser("ResNet20 on CIFAR-10: PDP with one thing changed at a time.", "ablations")
    parser.add_argument("--ablations", nargs="+", default=list(ABLATIONS), choices=ABLATIONS)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.863], help="of single weights")
    parser.add_argument("--reduction", nargs="+", type=float, default=[0.549], help="of MACs, by channels")
    options = parsed(parser, arguments)
    settings = Settings(precision=options.precision, device=options.device)
    bench = AblationTable(options.data, options.out, options.states, settings)
    for run in () if options.table else wanted(options):
        bench.run(run)
    print(as_text(list(results.load(options.out).values()), epochs_of(options), options.validate))


if __name__ == "__main__":
    main()
