"""Whole channels of ResNet20 on CIFAR-10 at one share of saved multiply-accumulates, physically removed.

PDP beside Torch-Pruning's group norm (one threshold, or the same ratio everywhere) and three scores. PDP
prunes while it trains; the others train densely (group norm with its own regularisation) for the first half,
remove channels, and fine-tune with a new cosine in the second half, so that all have the same epochs.

    python -m benchmarks.cifar_channels --data DATA --short --methods dense pdp tp-group-norm --seeds 0 1 2
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from tabulate import tabulate
from torch import Tensor, nn

import pdp_fx
from benchmarks import results
from benchmarks.cifar_table import name_of
from benchmarks.data import Batches
from benchmarks.methods import CHANNEL_METHODS, Budget, scored_channels
from benchmarks.peer_training import PeerTrainer
from benchmarks.resnet_cifar import ResNet20
from benchmarks.results import Record, spread
from benchmarks.rivals.channel_scores import dcp_style, nisp_style, scp_style
from benchmarks.table_runs import ImageTable, converted, epochs_of, image_parser, parsed
from benchmarks.training import Feed, Settings, Trainer, accuracy
from pdp_fx.compiler import Context, Pipeline
from pdp_fx.passes.fix_mode import FixMode
from pdp_fx.passes.fold_batch_norm import FoldBatchNorm
from pdp_fx.plain import plain
from pdp_fx.trace import trace

SCORES: dict[str, Callable[[nn.Module, Callable[[nn.Module], Tensor]], None]] = {
    "dcp-style": dcp_style,
    "scp-style": scp_style,
    "nisp-style": nisp_style,
}
METHODS = ("dense", *CHANNEL_METHODS, "tp-group-norm", "tp-group-norm-global", *SCORES)
SCORED_BATCHES = 8


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: a name of `METHODS`.
        reduction: share of the multiply-accumulates to save; None for the dense net.
        seed: of the weights and batches.
        epochs: of the whole training.
        validated: whether accuracy is that on held out training images, for tuning.
        rate: peak learning rate.
        batch: images in a batch.
    """

    method: str
    reduction: float | None
    seed: int
    epochs: int
    validated: bool = False
    rate: float = 0.4
    batch: int = 128

    @property
    def key(self) -> str:
        """What tells runs apart in the results."""
        amount = "" if self.reduction is None else f" {self.reduction:g}"
        on = " validation" if self.validated else ""
        how = f"{self.epochs} epochs rate {self.rate:g} batch {self.batch} seed {self.seed}"
        return f"channels {self.method}{amount} {how}{on}"


class ScoringTrainer(Trainer):
    """Scores the channels of the trained net, just before they go.

    How many go in each group does not depend on the scores, and is fixed an epoch earlier.
    """

    score: Callable[[nn.Module, Callable[[nn.Module], Tensor]], None]

    def after_epoch(self, batches: Feed) -> None:
        if self.method is not None and self.done + 1 == self.method.schedule.ramp_end:
            self.score(self.model, lambda model: _mean_loss(model, batches, self.done))
        super().after_epoch(batches)


def _mean_loss(model: nn.Module, batches: Feed, epoch: int) -> Tensor:
    parts = [pair for _, pair in zip(range(SCORED_BATCHES), batches.epoch(epoch), strict=False)]
    losses = [nn.functional.cross_entropy(model(images), labels) for images, labels in parts]
    return torch.stack(losses).mean()


@dataclass
class ChannelTable(ImageTable[Run]):
    """The same data and loop for whole channels."""

    def trainer(self, run: Run, steps: int) -> Trainer:
        """The model of a run, ready to be trained."""
        model = self.network(run.seed)
        budget, settings = Budget(run.epochs, steps), replace(self.settings, rate=run.rate)
        reduction = run.reduction or 0.0
        if run.method == "dense":
            return Trainer(model, None, budget, settings)
        if run.method.startswith("tp-"):
            across = run.method.endswith("global")
            return PeerTrainer(model, None, budget, settings, reduction=reduction, across=across)
        scored = run.method in SCORES
        method = scored_channels(budget) if scored else CHANNEL_METHODS[run.method](budget, None)
        example = torch.zeros(2, 3, 32, 32, device=self.settings.device)
        prepared = pdp_fx.prepare(model, method.channel_spec(reduction), example)
        if not scored:
            return Trainer(prepared, method, budget, settings)
        trainer = ScoringTrainer(prepared, method, budget, settings)
        trainer.score = SCORES[run.method]
        return trainer

    def measured(self, run: Run, trainer: Trainer, feed: Batches) -> Record:
        """What is written down about a run that is over."""
        images = self.split(run.validated)[1]
        pruned = not (run.method == "dense" or run.method.startswith("tp-"))
        small = converted(trainer.model) if pruned else folded(trainer.model)
        dense = folded(ResNet20().to(self.settings.device))
        report = pdp_fx.report(small, torch.zeros(2, 3, 32, 32, device=self.settings.device))
        return {
            "hard": accuracy(small, feed, images),
            "soft": accuracy(trainer.model, feed, images, soft=True),
            "macs": report.macs,
            "parameters": report.parameters,
            "latency": latency(small, dense, self.settings.device),
            "widths": {row.layer: row.shape[0] for row in report.rows},
        }


def folded(model: nn.Module) -> nn.Module:
    """The model in eval mode with its batch norms folded, as `convert` leaves one."""
    gm = trace(copy.deepcopy(model).eval())
    Pipeline((FixMode(), FoldBatchNorm())).run(gm, Context(pdp_fx.PruneSpec(pdp_fx.Channels(0.5))))
    return plain(gm)


def latency(model: nn.Module, dense: nn.Module, device: str, rounds: int = 15) -> dict[str, float]:
    """Median time of a forward pass over that of the dense net in the same round, by batch size."""
    found: dict[str, float] = {}
    for batch in (1, 64):
        images = torch.zeros(batch, 3, 32, 32, device=device)
        pairs = [(_seconds(model, images), _seconds(dense, images)) for _ in range(rounds)]
        found[str(batch)] = statistics.median(mine / theirs for mine, theirs in pairs)
    return found


def _seconds(model: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        _wait(images)
        started = time.perf_counter()
        model(images)
        _wait(images)
    return time.perf_counter() - started


def _wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


def as_text(records: Sequence[Record], epochs: int, validated: bool = False) -> str:
    """One table for each share of saved multiply-accumulates, the dense net first."""
    fitting = [r for r in records if r["epochs"] == epochs and r["validated"] == validated]
    on = "held out training images" if validated else "test images"
    heads = ["method", "accuracy %", "MACs e6", "saved %", "parameters", "latency, batch 1", "batch 64"]
    parts: list[str] = []
    for reduction in sorted({r["reduction"] for r in fitting if r["reduction"] is not None}):
        found: dict[str, list[Record]] = {}
        for record in fitting:
            if record["reduction"] in (None, reduction):
                found.setdefault(name_of(record), []).append(record)
        dense_first = sorted(found.values(), key=lambda rows: rows[0]["method"] != "dense")
        body = [_row(rows) for rows in dense_first]
        what = f"channels, {reduction:.1%} of the MACs to be saved, {epochs} epochs"
        title = f"ResNet20 / CIFAR-10, {what}, {on}"
        parts.append(f"{title}\n{tabulate(body, [*heads, 's/epoch'], disable_numparse=True)}\n")
    return "\n".join(parts)


DENSE_MACS = 40_813_184


def _row(records: Sequence[Record]) -> list[str]:
    def mean(name: str) -> float:
        return statistics.fmean(record[name] for record in records)

    times = [f"{statistics.fmean(r['latency'][batch] for r in records):.2f}x" for batch in ("1", "64")]
    return [
        name_of(records[0]),
        spread([100 * record["hard"] for record in records]),
        f"{mean('macs') / 1e6:.2f}",
        f"{100 * (1 - mean('macs') / DENSE_MACS):.1f}",
        f"{mean('parameters'):,.0f}",
        *times,
        f"{mean('seconds'):.1f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = image_parser("Whole channels of ResNet20 on CIFAR-10.", "cifar_channels")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--reduction", nargs="+", type=float, default=[0.549])
    options = parsed(parser, arguments)
    settings = Settings(precision=options.precision, device=options.device)
    bench = ChannelTable(options.data, options.out, options.states, settings)
    epochs = epochs_of(options)
    for method in () if options.table else options.methods:
        for seed in options.seeds:
            for reduction in [None] if method == "dense" else options.reduction:
                bench.run(Run(method, reduction, seed, epochs, options.validate, options.rate, options.batch))
    print(as_text(list(results.load(options.out).values()), epochs, options.validate))


if __name__ == "__main__":
    main()
