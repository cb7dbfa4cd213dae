"""The table of `cifar.py`: the paper's rows beside ours, one table for each sparsity and block."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tabulate import tabulate

from benchmarks.results import Record, spread

HEADS = (
    "method",
    "accuracy %",
    "with soft masks",
    "pruned %",
    "MACs e6",
    "least layer %",
    "epochs",
    "s/epoch",
    "extra params",
)
PAPER = (
    ("dense, the paper", "91.4", "", "0", "41.0", "", "120", "11.1", "0"),
    ("CS, the paper", "89.1", "", "86.3", "5.80", "", "425", "12.0", "267k"),
    ("PDP, the paper", "90.4", "", "86.3", "5.79", "", "120", "15.2", "0"),
)
"""Top-1, sparsity, MACs, parameters and minutes as printed; epochs are those of its recipes, and minutes are
divided by them. Its 41.0e6 MACs count batch norm, ours of 40.8e6 do not."""

RATE, BATCH = 0.4, 128
"""Of the common recipe."""

NEAR = 0.005
"""How far the sparsity of a method without a target may be off."""


def as_text(records: Sequence[Record], epochs: int, validated: bool = False) -> str:
    """All tables for trainings of this length."""
    fitting = [r for r in records if r["epochs"] == epochs and r["validated"] == validated]
    ratios = sorted({record["ratio"] for record in fitting if record["ratio"] is not None})
    on = "held out training images" if validated else "test images"
    blocks = dict.fromkeys(["own", "common", *sorted(record["block"] for record in fitting)])
    parts = [_table(fitting, ratio, block, epochs, on) for ratio in ratios for block in blocks]
    return "\n".join(part for part in parts if part)


def _table(records: Sequence[Record], ratio: float, block: str, epochs: int, on: str) -> str:
    groups = by_method(records, ratio, block)
    if all(group[0]["method"] == "dense" for group in groups):
        return ""
    rows = [_row(group) for group in groups]
    shown = [*(PAPER if ratio == 0.863 and block == "own" else ()), *rows]
    what = block if ":" in block else f"{ratio:.1%} of 267,696 weights, {block} allocation"
    title = f"ResNet20 / CIFAR-10, {what}, {epochs} epochs, {on}"
    return f"{title}\n{tabulate(shown, HEADS, disable_numparse=True)}\n"


def by_method(records: Sequence[Record], ratio: float, block: str) -> list[list[Record]]:
    """The records of each method of a block, the dense net first."""
    chosen = [record for record in records if record["method"] == "dense"]
    chosen += [record for record in records if record["ratio"] == ratio and record["block"] == block]
    chosen += _nearest(records, ratio) if block == "own" else []
    found: dict[tuple[str, float, int], list[Record]] = {}
    for record in chosen:
        found.setdefault((record["method"], record["rate"], record["batch"]), []).append(record)
    return list(found.values())


def _nearest(records: Sequence[Record], ratio: float) -> list[Record]:
    """Of the methods whose sparsity was searched for, for each seed the run that came closest to it."""
    best: dict[tuple[str, float, int, int], Record] = {}
    for record in records:
        if record["knob"] is None or abs(record["sparsity"] - ratio) > NEAR:
            continue
        place = (record["method"], record["rate"], record["batch"], record["seed"])
        if place not in best or _miss(record, ratio) < _miss(best[place], ratio):
            best[place] = record
    return list(best.values())


def _miss(record: Record, ratio: float) -> float:
    return abs(record["sparsity"] - ratio)


def name_of(record: Record) -> str:
    """The method, with what differs from the common recipe."""
    rate = "" if record["rate"] == RATE else f", rate {record['rate']:g}"
    return record["method"] + rate + ("" if record["batch"] == BATCH else f", batch {record['batch']}")


def _row(records: Sequence[Record]) -> tuple[str, ...]:
    first = records[0]

    def mean(name: str) -> float:
        return statistics.fmean(record[name] for record in records)

    return (
        name_of(first),
        spread([100 * record["hard"] for record in records]),
        "" if first["method"] == "dense" else spread([100 * record["soft"] for record in records]),
        f"{100 * mean('sparsity'):.2f}",
        f"{mean('macs') / 1e6:.2f}",
        f"{100 * mean('least'):.2f}",
        str(first["epochs"]),
        f"{mean('seconds'):.1f}",
        f"{first['extra']:,}",
    )
