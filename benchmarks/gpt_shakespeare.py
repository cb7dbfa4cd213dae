"""A small GPT on the characters of tiny Shakespeare at 75 % sparsity: dense, GMP, OptG, PDP and others.

The recipe is nanoGPT's for this text on a CPU: AdamW, 2,000 steps, a cosine with warm-up. Pruned are the
linear layers of the blocks; the embedding, which is also the output layer, stays. The loss is that of the
last tenth of the text, with hard masks; a tenth of the rest is held out for tuning.

    python -m benchmarks.gpt_shakespeare --data DATA --methods dense gmp optg pdp --seeds 0 1 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tabulate import tabulate
from torch import Tensor, nn

import pdp_fx
from benchmarks import results
from benchmarks.data import load_shakespeare
from benchmarks.gpt2 import GPT2, Config
from benchmarks.methods import METHODS, Budget
from benchmarks.results import Record, spread
from benchmarks.table_runs import Table, converted, parsed, positive, table_parser
from benchmarks.training import Settings, Trainer, evaluating

STEPS = 100
"""Optimizer steps that count as an epoch."""

HEADS = 4
"""Of attention."""

SKIPPED = {"lm_head": None}
CHOSEN = ("dense", *(name for name in METHODS if name not in ("str", "cs", "st3-sigma")))
PAPER = (
    ("dense, the paper: GPT-2, OpenWebText", f"{math.log(22.4):.3f}", "", "0", "163M", "0", ""),
    ("GMP, the paper", f"{math.log(37.7):.3f}", "", "75", "163M", "0", ""),
    ("OptG, the paper", f"{math.log(33.7):.3f}", "", "75", "163M", "124M", ""),
    ("PDP, the paper", f"{math.log(33.7):.3f}", "", "75", "163M", "0", ""),
)
"""Its perplexities as losses, of another model on another text: only the order can be compared."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: a name of `METHODS`, or "dense".
        ratio: share of the weights of linear layers that go; None for the dense net.
        seed: of the weights and batches.
        epochs: of 100 steps.
        validated: whether the loss is that on held out training text, for tuning.
        layers, width, positions, batch: sizes.
        rate: peak learning rate.
    """

    method: str
    ratio: float | None
    seed: int
    epochs: int
    validated: bool = False
    layers: int = 4
    width: int = 128
    positions: int = 128
    batch: int = 12
    rate: float = 1e-3

    @property
    def key(self) -> str:
        """What tells runs apart in the results."""
        amount = "" if self.ratio is None else f" {self.ratio:g}"
        size = f"{self.layers}x{self.width} block {self.positions} batch {self.batch} rate {self.rate:g}"
        on = " validation" if self.validated else ""
        return f"gpt {self.method}{amount} {size} {self.epochs * STEPS} steps seed {self.seed}{on}"


@dataclass
class TextBatches:
    """Random pieces of a text, which depend on the seed and the epoch only.

    Attributes:
        ids: of the characters.
        positions: length of a piece.
        size: pieces in a batch.
        seed: of their places.
    """

    ids: Tensor
    positions: int
    size: int
    seed: int

    def __len__(self) -> int:
        return STEPS

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch: characters, and the ones after them, each (size, positions)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        last = len(self.ids) - self.positions
        span = torch.arange(self.positions, device=self.ids.device)
        for _ in range(STEPS):
            starts = torch.randint(0, last, (self.size, 1), generator=generator).to(self.ids.device)
            yield self.ids[starts + span], self.ids[starts + span + 1]


def text_loss(model: nn.Module, ids: Tensor, positions: int, soft: bool = False, size: int = 64) -> float:
    """Mean loss of a text in whole pieces, in float32; with the masks of training mode if ``soft``."""
    evaluating(model, soft)
    count = (len(ids) - 1) // positions
    inputs, labels = (ids[shift : shift + count * positions].view(count, positions) for shift in (0, 1))
    total = 0.0
    with torch.no_grad():
        for first in range(0, count, size):
            outputs = model(inputs[first : first + size]).float().flatten(0, 1)
            part = nn.functional.cross_entropy(
                outputs, labels[first : first + size].flatten(), reduction="sum"
            )
            total += part.item()
    return total / (count * positions)


class TextTable(Table[Run, TextBatches]):
    """Trains on the text."""

    @cached_property
    def text(self) -> tuple[Tensor, Tensor, int]:
        """The training text, the rest, and the number of characters."""
        train, rest, characters = load_shakespeare(self.data)
        return train.to(self.settings.device), rest.to(self.settings.device), characters

    def split(self, validated: bool) -> tuple[Tensor, Tensor]:
        """What to train on and what to measure on."""
        train, rest, _ = self.text
        cut = len(train) * 9 // 10
        return (train[:cut], train[cut:]) if validated else (train, rest)

    def feed(self, run: Run) -> TextBatches:
        return TextBatches(self.split(run.validated)[0], run.positions, run.batch, run.seed)

    def trainer(self, run: Run, steps: int) -> Trainer:
        torch.manual_seed(run.seed)
        config = Config(run.positions, self.text[2], run.layers, HEADS, run.width)
        model, budget = GPT2(config).to(self.settings.device), Budget(run.epochs, steps)
        if run.method == "dense" or run.ratio is None:
            return Trainer(model, None, budget, self.settings)
        method = METHODS[run.method](budget, None)
        example = torch.zeros(2, run.positions, dtype=torch.int64, device=self.settings.device)
        prepared = pdp_fx.prepare(model, method.spec(run.ratio, SKIPPED), example)
        return Trainer(prepared, method, budget, self.settings)

    def measured(self, run: Run, trainer: Trainer, feed: TextBatches) -> Record:
        model, ids = trainer.model, self.split(run.validated)[1]
        example = torch.zeros(2, run.positions, dtype=torch.int64, device=self.settings.device)
        report = pdp_fx.report(model.eval(), example)
        rows = [row for row in report.rows if row.layer.startswith("blocks.")]
        hard = text_loss(model, ids, run.positions)
        dense = run.method == "dense"
        return {
            "hard": hard,
            "soft": hard if dense else text_loss(model, ids, run.positions, soft=True),
            "converted": hard if dense else text_loss(converted(model), ids, run.positions),
            "sparsity": 1 - sum(row.left for row in rows) / sum(row.weights for row in rows),
            "least": min(row.left / row.weights for row in rows),
            "parameters": sum(p.numel() for p in model.parameters()),
        }


def as_text(records: Sequence[Record], like: Run) -> str:
    """One table for each ratio of the trainings that are as long and as large as ``like``."""
    same = ("epochs", "validated", "layers", "width", "positions", "batch", "rate")
    fitting = [r for r in records if all(r[name] == getattr(like, name) for name in same)]
    heads = ("method", "loss", "with soft masks", "pruned %", "parameters", "extra", "s / 100 steps")
    parts: list[str] = []
    for ratio in sorted({r["ratio"] for r in fitting if r["ratio"] is not None}):
        found: dict[str, list[Record]] = {}
        for record in fitting:
            if record["ratio"] in (None, ratio):
                found.setdefault(record["method"], []).append(record)
        shown = [*(PAPER if ratio == 0.75 else ()), *map(_row, found.values())]
        title = f"GPT, tiny Shakespeare, {ratio:.0%} of the linear layers, {like.epochs * STEPS} steps"
        parts.append(f"{title}\n{tabulate(shown, heads, disable_numparse=True)}\n")
    return "\n".join(parts)


def _row(records: Sequence[Record]) -> tuple[str, ...]:
    first = records[0]
    return (
        first["method"],
        spread([record["hard"] for record in records], 4),
        spread([record["soft"] for record in records], 4),
        f"{100 * sum(record['sparsity'] for record in records) / len(records):.2f}",
        f"{first['parameters']:,}",
        f"{first['extra']:,}",
        f"{sum(record['seconds'] for record in records) / len(records):.1f}",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser(
        "A small GPT on tiny Shakespeare.", "gpt_shakespeare",
        data="tinyshakespeare.txt", states="out/gpt", rate=1e-3, batch=12, precision="fp32",
    )  # fmt: skip
    parser.add_argument("--methods", nargs="+", default=["dense", "gmp", "optg", "pdp"], choices=CHOSEN)
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.75])
    parser.add_argument("--steps", type=positive, default=2000, help="of the optimizer, in hundreds")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=128, help=f"a multiple of its {HEADS} heads")
    parser.add_argument("--positions", type=positive, default=128)
    options = parsed(parser, arguments)
    if options.steps % STEPS or options.steps < 2 * STEPS:
        parser.error(f"--steps: expected a multiple of {STEPS}, {2 * STEPS} or more, got {options.steps}")
    if options.width % HEADS:
        parser.error(f"--width: expected a multiple of the {HEADS} heads, got {options.width}")
    settings = Settings(options.rate, 0.1, 0.9, 0.05, options.precision, options.device, adam=True, clip=1.0)
    table = TextTable(options.data, options.out, options.states, settings)
    sizes = (options.layers, options.width, options.positions, options.batch, options.rate)
    like = Run("", None, 0, options.steps // STEPS, options.validate, *sizes)
    for method in () if options.table else options.methods:
        for seed in options.seeds:
            for ratio in [None] if method == "dense" else options.sparsity:
                table.run(replace(like, method=method, ratio=ratio, seed=seed))
    print(as_text(list(results.load(options.out).values()), like))


if __name__ == "__main__":
    main()
