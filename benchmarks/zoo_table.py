"""The zoo's results as one line, one table and one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from benchmarks.zoo_models import GRANULARITIES, ZOOS

Result = dict[str, Any]
COLUMNS: tuple[str, ...] = (
    "zoo", "name", "granularity", "double", "status", "difference", "difference_double",
    "parameters", "mmacs", "macs_prunable",
    "macs_removed", "zeros", "groups", "frozen", "reasons", "trace_s", "prepare_s", "convert_s",
    "memory_model_mb", "memory_mb", "seconds", "intact", "peer_status", "peer_difference",
    "peer_macs_removed", "peer_s",
)  # fmt: skip


def line(row: Result) -> str:
    """One model in a few words."""
    ours = f"{row['status'][:110]} {_share(row.get('macs_removed'))}{_in(_compile_seconds(row))}"
    if "peer_status" not in row:
        return ours
    theirs = f"{row['peer_status'][:60]} {_share(row.get('peer_macs_removed'))}{_in(row.get('peer_s'))}"
    return f"{ours}; peer {theirs}"


def write_csv(rows: list[Result], path: Path) -> None:
    """All results, one row for each model."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({column: row.get(column) for column in COLUMNS} for row in rows)


def summary(rows: list[Result]) -> str:
    """Two tables in Markdown: ours by zoo and granularity, then Torch-Pruning on the same models."""
    rows = [row for row in rows if not row["status"].startswith("skipped")]
    kinds: dict[tuple[str, str], list[Result]] = {}
    for row in sorted(rows, key=_place):
        kinds.setdefault((row["zoo"], _granularity(row)), []).append(row)
    ours = [_ours(kind, found) for kind, found in kinds.items()]
    beside = {kind: [row for row in found if "peer_status" in row] for kind, found in kinds.items()}
    both = [_beside(kind, found) for kind, found in beside.items() if found]
    return "\n\n".join(_table(table) for table in (ours, both) if table)


def _table(rows: list[Result]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f")


def _place(row: Result) -> tuple[int, int, bool]:
    return ZOOS.index(row["zoo"]), GRANULARITIES.index(row["granularity"]), row["double"]


def _granularity(row: Result) -> str:
    return f"{row['granularity']}{' float64' if row['double'] else ''}"


def _ours(kind: tuple[str, str], rows: list[Result]) -> Result:
    whole = not kind[1].startswith(("unstructured", "nm"))
    return {
        "zoo": kind[0],
        "granularity": kind[1],
        "models": len(rows),
        **{word: _count(rows, "status", word) for word in ("exact", "refused", "failed", "wrong")},
        "MACs that can go": _median(rows if whole else [], lambda row: row.get("macs_prunable")),
        "MACs removed": _median(rows if whole else [], lambda row: row.get("macs_removed")),
        "zeros": _median([] if whole else rows, lambda row: row.get("zeros")),
        "compile s": _median(rows, _compile_seconds),
        "peak MB": _median(rows, lambda row: row.get("memory_mb")),
    }


def _beside(kind: tuple[str, str], rows: list[Result]) -> Result:
    both = [row for row in rows if row["status"] == "exact" and row.get("peer_status") == "exact"]
    removed = [row for row in both if row["macs_removed"] < row["peer_macs_removed"] - 0.01]
    faster = [row for row in both if (_compile_seconds(row) or 0) < row["peer_s"]]
    return {
        "zoo": kind[0],
        "models": len(rows),
        "exact": _count(rows, "status", "exact"),
        **{
            f"Torch-Pruning {word}": _count(rows, "peer_status", word)
            for word in ("exact", "failed", "wrong")
        },
        "both exact": len(both),
        "MACs removed": _median(both, lambda row: row.get("macs_removed")),
        "its MACs removed": _median(both, lambda row: row.get("peer_macs_removed")),
        "we remove less": len(removed),
        "compile s": _median(both, _compile_seconds),
        "its s": _median(both, lambda row: row.get("peer_s")),
        "times as long": _median(both, _times_as_long),
        "we are faster": len(faster),
    }


def _compile_seconds(row: Result) -> float | None:
    return row["prepare_s"] + row["convert_s"] if "convert_s" in row else None


def _times_as_long(row: Result) -> float | None:
    ours = _compile_seconds(row)
    return None if ours is None else ours / row["peer_s"]


def _count(rows: list[Result], column: str, word: str) -> int:
    return sum(str(row.get(column, "")).startswith(word) for row in rows)


def _median(rows: list[Result], value: Callable[[Result], float | None]) -> float | None:
    known = [found for row in rows if (found := value(row)) is not None]
    return median(known) if known else None


def _in(seconds: float | None) -> str:
    return "" if seconds is None else f" in {seconds:.2f} s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
