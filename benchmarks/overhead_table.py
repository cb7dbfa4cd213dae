"""The tables of `overhead.py`: one for each setting, and summaries with one line for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from benchmarks.overhead_models import METHODS

Record = dict[str, Any]

SHOWN = {
    "pdp": "unstructured",
    "pdp-nm": "2:4",
    "pdp-channels": "channels",
    "fixed": "fixed mask",
    "optg": "OptG",
    "cs": "CS",
    "str": "STR",
    "sr-ste": "SR-STE, 2:4",
}
"""The columns of the summary."""


def ratios(record: Record, method: str) -> list[float]:
    """This method's step over the dense step, round by round."""
    return [
        mine / dense
        for mine, dense in zip(record["seconds"][method], record["seconds"]["dense"], strict=True)
    ]


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def as_table(title: str, record: Record) -> str:
    """The record as text: medians with quartiles, and megabytes over dense."""
    rows: list[list[str]] = []
    dense = record["bytes"]["dense"]
    for method in (method for method in METHODS if method in record["seconds"]):
        seconds = record["seconds"][method]
        low, middle, high = quartiles(ratios(record, method))
        extra = [_extra(record, method, spot) for spot in dense]
        rows.append(
            [method, f"{1e3 * statistics.median(seconds):.1f}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}"]
            + [f"{megabytes:+.2f}" for megabytes in extra]
        )
    heads = ["method", "ms", "x dense", "quartiles", "MB created", "after forward", "after backward", "peak"]
    base = ", ".join(f"{spot} {size / 1e6:.1f}" for spot, size in dense.items())
    return f"{title}\n{tabulate(rows, heads, disable_numparse=True)}\ndense MB: {base}\n"


def summary(records: Mapping[str, Record]) -> str:
    """All records in Markdown: steps over the dense step, and what unstructured masks keep in memory."""
    rows = [[_setting(title, record), *_cells(record)] for title, record in sorted(records.items())]
    heads = ["setting", *SHOWN.values(), "MB after forward", "MB after backward"]
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def medians(records: Mapping[str, Record]) -> str:
    """The eager records in fp32 in Markdown, with medians only."""
    shown = [method for method in SHOWN if method != "fixed"]
    rows = [
        [title.split(" fp32")[0].replace(" b", ", batch ")]
        + [f"{quartiles(ratios(record, m))[1]:.2f}" if m in record["seconds"] else "" for m in shown]
        for title, record in sorted(records.items())
        if " fp32 eager " in title
    ]
    return tabulate(
        rows, ["step over the dense step", *(SHOWN[m] for m in shown)], "github", disable_numparse=True
    )


def _setting(title: str, record: Record) -> str:
    dense, threads = record["seconds"]["dense"], record["machine"]["threads"]
    how = f"{title.replace(', wall clock', '')}, threads {threads}"
    return f"{how}, {statistics.median(dense):.2f} s, {len(dense)} rounds"


def _cells(record: Record) -> list[str]:
    steps: list[str] = []
    for method in SHOWN:
        low, middle, high = quartiles(ratios(record, method)) if method in record["seconds"] else (0, 0, 0)
        steps.append(f"{middle:.2f} ({low:.2f} to {high:.2f})" if middle else "")
    return [*steps, *(f"{_extra(record, 'pdp', spot):+.1f}" for spot in ("after_forward", "after_backward"))]


def _extra(record: Record, method: str, spot: str) -> float:
    return (record["bytes"][method][spot] - record["bytes"]["dense"][spot]) / 1e6
