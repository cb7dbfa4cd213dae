"""The zoo's results as one line, one table and one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

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
    peer = (
        f"; peer {row['peer_status'][:60]} {_share(row.get('peer_macs_removed'))}"
        if "peer_status" in row
        else ""
    )
    return f"{row['status'][:110]} {_share(row.get('macs_removed'))} in {row.get('seconds', 0):.0f} s{peer}"


def write_csv(rows: list[Result], path: Path) -> None:
    """All results, one row for each model."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({column: row.get(column) for column in COLUMNS} for row in rows)


def summary(rows: list[Result]) -> str:
    """Counts and medians by zoo and granularity, the peer's in columns of their own."""
    kinds = dict.fromkeys((row["zoo"], row["granularity"], row["double"]) for row in rows)
    table = [_summed(kind, [row for row in rows if (row["zoo"], row["granularity"], row["double"]) == kind])
             for kind in kinds]  # fmt: skip
    return tabulate(table, headers="keys", floatfmt=".2f")


def _summed(kind: tuple[str, str, bool], rows: list[Result]) -> Result:
    rows = [row for row in rows if not row["status"].startswith("skipped")]
    both = [row for row in rows if row["status"] == "exact" and row.get("peer_status") == "exact"]
    return {
        "zoo": kind[0],
        "granularity": f"{kind[1]}{' float64' if kind[2] else ''}",
        "models": len(rows),
        **{word: _count(rows, "status", word) for word in ("exact", "refused", "failed", "wrong")},
        "MACs removed": _median(rows, lambda row: row.get("macs_removed")),
        "compile s": _median(both or rows, _compile_seconds),
        **{f"peer {word}": _count(rows, "peer_status", word) for word in ("exact", "failed", "wrong")},
        "both: MACs removed": _median(both, lambda row: row.get("macs_removed")),
        "peer's": _median(both, lambda row: row.get("peer_macs_removed")),
        "peer s": _median(both, lambda row: row.get("peer_s")),
    }


def _compile_seconds(row: Result) -> float | None:
    return row["prepare_s"] + row["convert_s"] if "convert_s" in row else None


def _count(rows: list[Result], column: str, word: str) -> int:
    return sum(str(row.get(column, "")).startswith(word) for row in rows)


def _median(rows: list[Result], value: Callable[[Result], float | None]) -> float | None:
    known = [found for row in rows if (found := value(row)) is not None]
    return median(known) if known else None


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
