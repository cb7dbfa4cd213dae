"""MiniLM on SST-2 at 90 % sparsity with a teacher: dense, GMP, movement pruning, OptG, PDP and others.

The recipe is the paper's for BERT: AdamW, peak rate 1e-4, cosine; 0.95 of the loss come from the outputs of
a teacher and 0.05 from the labels. The teacher is the same model, trained densely on the labels for 2/7 of
the epochs, once for each seed. Students start where the teacher started, from the pretrained weights, as in
the paper and in movement pruning, whose scores would learn nothing from a loss that starts at its minimum.
Pruned are the linear layers of the encoder; embeddings, norms, biases and the last layer stay.

    python -m benchmarks.sst2 --data DATA --threads 1 --methods dense gmp optg movement pdp --seeds 0 1 2
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

import pdp_fx
from benchmarks import results
from benchmarks.data import load_sst2, split_off
from benchmarks.methods import METHODS, Budget
from benchmarks.minilm import find_weights, pretrained, tokens
from benchmarks.results import Record, spread
from benchmarks.sentences import SentenceBatches, Sentences, taught
from benchmarks.table_runs import Table, converted, mean_seconds, parsed, positive, table_parser
from benchmarks.training import Settings, Trainer, accuracy, evaluating, save_whole

PARTS = 4
"""Parts of a pass over the sentences that count as epochs, so that a ramp has more than a few steps."""

LENGTH = 64
"""Tokens of a sentence that count at most; of the training sentences 4 are longer."""

TOKENS = 24
"""Of the sentence whose multiply-accumulates are counted: SST-2's mean is 23."""

SKIPPED = {"head": None}
DENSE = ("teacher", "dense", "dense-distilled")
"""Dense nets: the teacher, one that sees labels only, and one with the teacher."""

CHOSEN = (*DENSE, *(name for name in METHODS if name not in ("str", "cs", "st3-sigma")))
PAPER = {
    0.9: {"dense": "84.5 / 84.9 / 91.2", "OptG": "78.5 / 78.3 / 89.8", "movement": "81.2 / 81.8 / 90.2",
          "POFA": "81.5 / 82.4 / 90.9", "PDP": "83.1 / 83.0 / 91.0"},
    0.94: {"dense": "84.5 / 84.9", "GMP": "74.8 / 75.6", "OptG": "76.9 / 76.5", "movement": "80.7 / 81.2",
           "PDP": "82.0 / 82.4"},
}  # fmt: skip
"""BERT-base on MNLI matched, MNLI mismatched and QQP: of another model and task, so only the order and the
distance to the dense net can be compared."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: a name of `CHOSEN`.
        ratio: share of the weights of the encoder's linear layers that go; None for a dense net.
        seed: of the last layer, the batches and dropout.
        epochs: of a quarter of the sentences each.
        validated: whether accuracy is that on held out training sentences, for tuning.
        rate: peak learning rate.
        batch: sentences in a batch.
    """

    method: str
    ratio: float | None
    seed: int
    epochs: int
    validated: bool = False
    rate: float = 1e-4
    batch: int = 32

    @property
    def key(self) -> str:
        """What tells runs apart in the results."""
        amount = "" if self.ratio is None else f" {self.ratio:g}"
        how = f"{self.epochs / PARTS:g} epochs rate {self.rate:g} batch {self.batch} seed {self.seed}"
        return f"sst2 {self.method}{amount} {how}{' validation' if self.validated else ''}"

    @property
    def teacher(self) -> Run:
        """The run that makes the teacher: the paper's is from the first 40 of 140 epochs."""
        return replace(self, method="teacher", ratio=None, epochs=max(round(self.epochs * 2 / 7), 1))


@dataclass
class SentenceTable(Table[Run, SentenceBatches]):
    """Trains on the sentences."""

    weights: Path | None = None

    @cached_property
    def folder(self) -> Path:
        """Where the pretrained weights are."""
        return find_weights(self.weights)

    def part(self, name: str) -> Sentences:
        """The train, dev or test sentences."""
        texts, labels = load_sst2(self.data, name)
        ids, device = tokens(self.folder, texts, LENGTH), self.settings.device
        return Sentences(ids.to(device), labels.to(device))

    @cached_property
    def parts(self) -> tuple[Sentences, Sentences, Sentences]:
        """The train, dev and test sentences."""
        return self.part("train"), self.part("dev"), self.part("test")

    def split(self, validated: bool) -> tuple[Sentences, Sentences]:
        """What to train on and what to measure on."""
        train, dev, _ = self.parts
        return split_off(train, len(train) // 10) if validated else (train, dev)

    def feed(self, run: Run) -> SentenceBatches:
        train = self.split(run.validated)[0]
        if run.method not in ("teacher", "dense"):
            train = Sentences(train.ids, taught(train.labels, self.opinions(run.teacher)))
        return SentenceBatches(train, run.batch, run.seed, PARTS)

    def opinions(self, teacher: Run) -> Tensor:
        """A teacher's logits for the training sentences, from a file or from training it now."""
        self.run(teacher)
        path = self._opinions_file(teacher)
        if not path.exists():
            self.train(teacher)
        return torch.load(path, map_location=self.settings.device)

    def _opinions_file(self, teacher: Run) -> Path:
        return self.states / f"{teacher.key.replace(' ', '_')}.logits.pt"

    def trainer(self, run: Run, steps: int) -> Trainer:
        torch.manual_seed(run.seed)
        model, budget = pretrained(self.folder).to(self.settings.device), Budget(run.epochs, steps)
        if run.ratio is None:
            return Trainer(model, None, budget, self.settings, run.seed)
        method = METHODS[run.method](budget, None)
        prepared = pdp_fx.prepare(model, method.spec(run.ratio, SKIPPED), self.example())
        return Trainer(prepared, method, budget, self.settings, run.seed)

    def example(self) -> Tensor:
        """Two sentences, one of them with padding."""
        ids = torch.ones(2, TOKENS, dtype=torch.int64, device=self.settings.device)
        ids[1, TOKENS // 2 :] = 0
        return ids

    def measured(self, run: Run, trainer: Trainer, feed: SentenceBatches) -> Record:
        model, dense = trainer.model, run.ratio is None
        train, held = self.split(run.validated)
        if run.method == "teacher":
            save_whole(logits(model, train.ids), self._opinions_file(run))
        report = pdp_fx.report(model.eval(), self.example())
        rows = [row for row in report.rows if row.layer.startswith("encoder.")]
        hard = accuracy(model, feed, held)
        return {
            "hard": hard,
            "soft": hard if dense else accuracy(model, feed, held, soft=True),
            "converted": hard if dense else accuracy(converted(model), feed, held),
            "test": None if run.validated else accuracy(model, feed, self.parts[2]),
            "sparsity": 1 - sum(row.left for row in rows) / sum(row.weights for row in rows),
            "least": min(row.left / row.weights for row in rows),
            "macs": report.macs_left,
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": PARTS * mean_seconds(trainer),
        }


def logits(model: nn.Module, ids: Tensor, size: int = 64) -> Tensor:
    """A model's logits for sentences, (n, classes), in float32 and eval mode."""
    evaluating(model, soft=False)
    numbered = Sentences(ids, torch.arange(len(ids), device=ids.device))
    with torch.no_grad():
        parts = [
            (places, model(cut)) for cut, places in SentenceBatches(numbered, size, 0).plain(numbered, size)
        ]
    found = torch.cat([outputs for _, outputs in parts])
    return found[torch.cat([places for places, _ in parts]).argsort()]


def as_text(records: Sequence[Record], like: Run) -> str:
    """One table for each ratio of the trainings that are like ``like``, and of their teachers."""
    names = ("rate", "batch", "validated")
    fitting = [r for r in records if all(r[name] == getattr(like, name) for name in names)]
    fitting = [r for r in fitting if r["epochs"] == _like(r, like).epochs]
    heads = ("method", "accuracy %", "with soft masks", "on the test set", "pruned %", "MACs e6",
             "least layer %", "extra params", "epochs", "s/epoch")  # fmt: skip
    on = "held out training sentences" if like.validated else "dev set"
    parts: list[str] = []
    for ratio in sorted({r["ratio"] for r in fitting if r["ratio"] is not None}):
        found: dict[str, list[Record]] = {name: [] for name in CHOSEN}
        for record in fitting:
            if record["ratio"] in (None, ratio):
                found[record["method"]].append(record)
        paper = [
            (
                f"{name}, the paper: BERT, MNLI / QQP",
                reached,
                "",
                "",
                "" if name == "dense" else f"{100 * ratio:g}",
            )
            for name, reached in PAPER.get(ratio, {}).items()
        ]
        rows = [_row(group) for group in found.values() if group]
        size = f"{ratio:.0%} of the encoder's linear layers, {like.epochs / PARTS:g} epochs"
        title = f"MiniLM / SST-2, {size}, {on}"
        parts.append(f"{title}\n{tabulate([*paper, *rows], heads, disable_numparse=True)}\n")
    return "\n".join(parts)


def _like(record: Record, like: Run) -> Run:
    return like.teacher if record["method"] == "teacher" else like


def _row(records: Sequence[Record]) -> tuple[str, ...]:
    first = records[0]

    def mean(name: str) -> float:
        return statistics.fmean(record[name] for record in records)

    def percent(name: str) -> str:
        return spread([100 * record[name] for record in records])

    return (
        first["method"],
        percent("hard"),
        "" if first["ratio"] is None else percent("soft"),
        "" if first["test"] is None else percent("test"),
        f"{100 * mean('sparsity'):.2f}",
        f"{mean('macs') / 1e6:.1f}",
        f"{100 * mean('least'):.2f}",
        f"{first['extra']:,}",
        f"{first['epochs'] / PARTS:g}",
        f"{mean('seconds'):.0f}",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser(
        "MiniLM on SST-2 with a teacher.", "sst2",
        data="sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv", states="out/sst2",
        rate=1e-4, batch=32, precision="bf16",
    )  # fmt: skip
    parser.add_argument("--weights", type=Path, help="folder of the pretrained weights, if not in a package")
    default = ["dense", "dense-distilled", "gmp", "movement", "optg", "pdp"]
    parser.add_argument("--methods", nargs="+", default=default, choices=CHOSEN)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.9])
    parser.add_argument("--epochs", type=positive, default=6)
    options = parsed(parser, arguments)
    settings = Settings(
        options.rate, 0.01, 0.9, 5 / 140, options.precision, options.device, adam=True, clip=1.0
    )  # fmt: skip
    table = SentenceTable(options.data, options.out, options.states, settings, options.weights)
    like = Run("", None, 0, PARTS * options.epochs, options.validate, options.rate, options.batch)
    for seed in () if options.table else options.seeds:
        for method in options.methods:
            run = replace(like, method=method, seed=seed)
            for ratio in [None] if method in DENSE else options.sparsity:
                table.run(run.teacher if method == "teacher" else replace(run, ratio=ratio))
    print(as_text(list(results.load(options.out).values()), like))


if __name__ == "__main__":
    main()
