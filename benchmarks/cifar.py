"""ResNet20 on CIFAR-10: PDP, the dense net and the rivals, with one data pipeline, loop, seed and budget.

Two blocks: in "own" each method allocates sparsity to layers as it was published; in "common" all get the
counts of one magnitude ranking of the trained dense net of seed 0. N:M patterns have tables of their own,
where the stem stays dense for its three input channels. Only the 3x3 convolutions are pruned, the
267,696 weights of the paper's table. Every run is written to the results when it is over; a run that is
stopped goes on after its last whole epoch.

    python -m benchmarks.cifar --data DATA --short --methods dense pdp st3 --seeds 0 1 2
    python -m benchmarks.cifar --data DATA --sparsity 0.863 0.98 --device cuda
    python -m benchmarks.cifar --data DATA --short --methods dense pdp sr-ste --patterns 2:4 4:8 1:4 2:8
    python -m benchmarks.cifar --short --table
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

import pdp_fx
from benchmarks import results
from benchmarks.cifar_table import as_text
from benchmarks.data import Batches
from benchmarks.methods import METHODS, PATTERN_METHODS, Budget, Counts
from benchmarks.results import Record
from benchmarks.table_runs import ImageTable, converted, epochs_of, image_parser, parsed, positive
from benchmarks.training import Settings, Trainer, accuracy
from pdp_fx.allocation import allocate, most_prunable

SKIPPED = {"fc": None, r"re:.*\.shortcut": None}
SPARSITIES = (0.863, 0.9, 0.95, 0.98)
DECAYED = 0.078
"""By how much an epoch decays the logarithm of STR's score: 391 steps of weight decay, 0.2 the mean rate."""
KNOBS: dict[str, tuple[float, float, Callable[[float, int], float]]] = {
    "str": (math.log(20), math.log(3), lambda place, epochs: -math.exp(place + DECAYED * (epochs - 16))),
    "cs": (0.003, -0.02, lambda place, epochs: place),
}
"""Between the first two, from too little to too much, the place of a searched method's knob is looked for;
the third makes the knob from the place and the epochs. STR's first score is decayed all along, so its
magnitude is searched on a logarithmic scale; in 16 epochs at half the resolution it prunes 21 % from -20 and
84 % from -6. CS prunes 63 % in its part of the 16 epochs from a first score of 0,
and 88 % from -0.01."""

MIN_KEEP = 0.25


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: a name of `METHODS` or, for a pattern, of `PATTERN_METHODS`; or "dense".
        block: "own", "common", or an N:M pattern such as "2:4".
        ratio: share of the weights that go; None for the dense net and for a method with a knob.
        seed: of the weights and batches.
        epochs: of the whole training.
        validated: whether accuracy is that on held out training images, for tuning.
        knob: what the sparsity of a searched method follows from.
        rate: peak learning rate.
        batch: images in a batch.
    """

    method: str
    block: str
    ratio: float | None
    seed: int
    epochs: int
    validated: bool = False
    knob: float | None = None
    rate: float = 0.4
    batch: int = 128

    @property
    def key(self) -> str:
        """What tells runs apart in the results."""
        amount = "" if self.ratio is None else f" {self.ratio:g}"
        knob = "" if self.knob is None else f" knob {self.knob:.6g}"
        on = " validation" if self.validated else ""
        how = f"{self.epochs} epochs rate {self.rate:g} batch {self.batch} seed {self.seed}"
        return f"{self.method} {self.block}{amount}{knob} {how}{on}"


@dataclass
class Bench(ImageTable[Run]):
    """Single weights and N:M patterns."""

    def trainer(self, run: Run, steps: int) -> Trainer:
        model = self.network(run.seed)
        budget, settings = Budget(run.epochs, steps), replace(self.settings, rate=run.rate)
        if run.method == "dense":
            return Trainer(model, None, budget, settings)
        if ":" in run.block:
            method = PATTERN_METHODS[run.method](budget, run.knob)
            spec = method.pattern_spec(*pattern(run.block), SKIPPED)
        else:
            method = METHODS[run.method](budget, run.knob)
            common = self._common(run) if run.block == "common" else None
            spec = method.spec(0.5 if run.ratio is None else run.ratio, SKIPPED, common)
        example = torch.zeros(2, 3, 32, 32, device=self.settings.device)
        return Trainer(pdp_fx.prepare(model, spec, example), method, budget, settings)

    def _common(self, run: Run) -> Counts:
        """The counts of the common block: those of the dense net of seed 0, which is trained if need be."""
        dense = self.run(replace(run, method="dense", block="own", ratio=None, seed=0))
        return {layer: (gone, size) for layer, (gone, size) in dense["allocation"][f"{run.ratio:g}"].items()}

    def measured(self, run: Run, trainer: Trainer, feed: Batches) -> Record:
        model, images = trainer.model, self.split(run.validated)[1]
        # The report of a dense net in training mode would be of another graph.
        report = pdp_fx.report(model.eval(), torch.zeros(2, 3, 32, 32, device=self.settings.device))
        rows = [row for row in report.rows if not _skipped(row.layer)]
        hard = accuracy(model, feed, images)
        record: Record = {
            "hard": hard,
            "soft": hard if run.method == "dense" else accuracy(model, feed, images, soft=True),
            "sparsity": 1 - sum(row.left for row in rows) / sum(row.weights for row in rows),
            "least": min(row.left / row.weights for row in rows),
            "macs": report.macs_left,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": {row.layer: [row.left, row.weights] for row in rows},
        }
        if run.method == "dense":
            record["allocation"] = {f"{ratio:g}": _allocation(model, ratio) for ratio in SPARSITIES}
        elif record["sparsity"] > 0:
            record["converted"] = accuracy(converted(model), feed, images)
        return record

    def search(self, run: Run, trials: int) -> None:
        """Narrow the range of a knob until the sparsity is met, each time with a whole training."""
        little, much, knob_at = KNOBS[run.method]
        goal = run.ratio or 0.0
        low, high = End(little), End(much)
        for _ in range(trials):
            place = between(low, high, goal)
            record = self.run(replace(run, ratio=None, knob=knob_at(place, run.epochs)))
            found = record["sparsity"]
            print(f"{record['key']}: sparsity {found:.4f}, wanted {goal}", flush=True)
            if abs(goal - found) < 0.002:
                return
            if found < goal:
                low = End(place, found)
            else:
                high = End(place, found)


class End(NamedTuple):
    """An end of the range of a search: its place, and the sparsity there once it is known."""

    place: float
    sparsity: float | None = None


def between(low: End, high: End, goal: float) -> float:
    """Where to look next between a place with too little sparsity and one with too much.

    Returns:
        The middle, or where a straight line through the logarithms of the shares that stay meets the goal,
        at least a tenth of the range away from both ends, so that the range shrinks from either side.

    Example:
        >>> between(End(0.0), End(1.0, 0.99), 0.9)
        0.5
        >>> round(between(End(0.0, 0.5), End(1.0, 0.99), 0.9), 3)
        0.411
    """
    share = 0.5
    if low.sparsity is not None and high.sparsity is not None:
        most, wanted, least = (math.log(max(1 - s, 1e-3)) for s in (low.sparsity, goal, high.sparsity))
        share = min(max((most - wanted) / (most - least), 0.1), 0.9)
    return low.place + share * (high.place - low.place)


def pattern(text: str) -> tuple[int, int]:
    """The numbers of an N:M pattern.

    Raises:
        ValueError: the text is none.

    Example:
        >>> pattern("2:4")
        (2, 4)
    """
    keep, _, of = text.partition(":")
    if not (keep.isdecimal() and of.isdecimal() and 0 < int(keep) < int(of)):
        raise ValueError(f"expected a pattern such as 2:4, the kept count first, got {text!r}")
    return int(keep), int(of)


def _skipped(layer: str) -> bool:
    return layer == "fc" or layer.endswith("shortcut")


def _allocation(model: nn.Module, ratio: float) -> dict[str, tuple[int, int]]:
    """How many weights of each layer are among the least of all, with a share of each layer that stays."""
    convs = {
        name: module.weight.detach().abs()
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and not _skipped(name)
    }
    sizes = [weight.numel() for weight in convs.values()]
    most = [most_prunable(size, ratio, MIN_KEEP) for size in sizes]
    counts = allocate(list(convs.values()), round(ratio * sum(sizes)), most)
    return {name: (gone, size) for name, gone, size in zip(convs, counts, sizes, strict=True)}


def wanted(options: argparse.Namespace) -> Iterator[Run]:
    """The runs that the options ask for, the dense ones first."""
    common = Run(
        "",
        "own",
        None,
        seed=0,
        epochs=epochs_of(options),
        validated=options.validate,
        rate=options.rate,
        batch=options.batch,
    )
    for method in sorted(options.methods, key=lambda name: name != "dense"):
        for seed in options.seeds:
            if method == "dense":
                yield replace(common, method="dense", seed=seed)
                continue
            for text in options.patterns:
                keep, of = pattern(text)
                yield replace(common, method=method, block=text, ratio=1 - keep / of, seed=seed)
            for ratio in () if options.patterns else options.sparsity:
                for block in options.blocks if method not in KNOBS else ["own"]:
                    yield replace(common, method=method, block=block, ratio=ratio, seed=seed)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = image_parser("ResNet20 on CIFAR-10: PDP and its rivals.", "cifar")
    names = ["dense", *dict.fromkeys([*METHODS, *PATTERN_METHODS])]
    parser.add_argument("--methods", nargs="+", default=["dense", "pdp"], choices=names)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.863], choices=SPARSITIES)
    parser.add_argument("--blocks", nargs="+", default=["own", "common"], choices=["own", "common"])
    parser.add_argument(
        "--patterns", nargs="+", default=[], metavar="N:M", help="N:M patterns instead of --sparsity"
    )
    parser.add_argument("--trials", type=positive, default=8, help="trainings of a search for a sparsity")
    options = parsed(parser, arguments)
    known = PATTERN_METHODS if options.patterns else METHODS
    unknown = [name for name in options.methods if name != "dense" and name not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)}: only with{'out' if options.patterns else ''} --patterns")
    for text in options.patterns:
        try:
            pattern(text)
        except ValueError as err:
            parser.error(f"--patterns: {err}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    settings = Settings(precision=options.precision, device=options.device)
    bench = Bench(options.data, options.out, options.states, settings)
    for run in () if options.table else wanted(options):
        if run.method in KNOBS:
            bench.search(run, options.trials)
        else:
            bench.run(run)
    epochs = epochs_of(options)
    print(as_text(list(results.load(options.out).values()), epochs, options.validate))


if __name__ == "__main__":
    main()
