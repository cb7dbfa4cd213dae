"""The table of `cifar.py`: the paper's rows beside ours, one table for each sparsity and block."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

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


class Print(NamedTuple):
    """What is in print of a method: top-1 of ResNet50 on ImageNet, %.

    Attributes:
        paper: in the tables of the PDP paper, at 89.8 % or the pattern; its dense net has 76.1.
        authors: where its authors publish it, at 90 % or the pattern.
        note: what is special about the latter.
    """

    paper: float | None = None
    authors: float | None = None
    note: str = ""


IN_PRINT = {
    "weights": {
        "pdp": Print(74.7),
        "gmp": Print(73.6),
        "dnw": Print(70.7),
        "granet": Print(72.5),
        "str": Print(72.8, 74.31, "at 90.2 %"),
        "optg": Print(72.1, 74.55),
        "acdc": Print(74.7, 75.03),
        "st3": Print(None, 76.03),
        "st3-sigma": Print(None, 75.28),
        "feather": Print(None, 76.93, "from a list of results"),
    },
    "2:4": {"pdp": Print(75.9), "sr-ste": Print(74.6, 77.0, "its dense net 77.3")},
    "4:8": {"pdp": Print(75.8), "sr-ste": Print(75.1, 77.4, "its dense net 77.3")},
    "1:4": {"pdp": Print(75.0), "sr-ste": Print(74.1, 75.9, "its dense net 77.3")},
    "2:8": {"pdp": Print(75.3), "sr-ste": Print(75.0, 76.4, "its dense net 77.3")},
}
"""By what is pruned and by method."""

PRINTED = {"own": 0.863, "common": 0.863, "2:4": 0.5, "4:8": 0.5, "1:4": 0.75, "2:8": 0.75}
"""The blocks, and the ratio in each, that stand beside what is in print."""

PRINT_HEADS = (
    "method", "block", "accuracy - dense, points", "ResNet50 / ImageNet %: the PDP paper", "its authors", "",
)  # fmt: skip

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
    return "\n".join(part for part in [*parts, _in_print(fitting)] if part)


def _in_print(records: Sequence[Record]) -> str:
    """What our trainings lose against the dense net, beside what is in print of the same methods."""
    dense = [record["hard"] for record in records if record["method"] == "dense"]
    rows: list[tuple[str, ...]] = []
    for block, ratio in PRINTED.items():
        printed = IN_PRINT.get(block, IN_PRINT["weights"])
        for group in by_method(records, ratio, block) if dense else ():
            known = printed.get(group[0]["method"])
            if known is not None:
                lost = statistics.fmean(record["hard"] for record in group) - statistics.fmean(dense)
                numbers = ("" if top is None else f"{top:g}" for top in known[:2])
                rows.append((name_of(group[0]), block, f"{100 * lost:+.2f}", *numbers, known.note))
    return f"Beside what is in print\n{tabulate(rows, PRINT_HEADS, disable_numparse=True)}\n" if rows else ""


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
