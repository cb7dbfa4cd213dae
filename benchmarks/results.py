"""Results of long tables: one JSON line for each run, added when it is over, so that none is lost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def load(path: Path) -> dict[str, Record]:
    """All records by their key; of two with one key the later one."""
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[Record] = [json.loads(line) for line in lines if line]
    return {record["key"]: record for record in records}


def add(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(record) + "\n")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean, with the lowest and the highest of several values."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"
