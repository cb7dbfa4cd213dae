"""Every model of torchvision, timm and transformers through the compiler, with Torch-Pruning beside it.

Each model runs in a process of its own with a limit on time and memory. Results are appended to
`results.jsonl` in the output folder, one line for each model as it ends; models that have a line
are not run again. The table and `zoo.csv` are made from that file.

    python -m benchmarks.zoo --zoo torchvision --out out/zoo
    python -m benchmarks.zoo --out out/zoo --table
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import zoo_models, zoo_table

Result = dict[str, Any]
KEY = ("zoo", "name", "granularity", "double")
"""The fields that identify a measurement."""


def main() -> None:
    """Measure what is not measured yet, then print the table."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    for job in [] if options.table else _missing(options, results):
        row = job | run(job | {"peer": options.peer, "gigabytes": options.gigabytes}, options.seconds)
        print(f"{job['zoo']} {job['name']}: {zoo_table.line(row)}", flush=True)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = read(results)
    zoo_table.write_csv(rows, options.out / "zoo.csv")
    print(zoo_table.summary(rows))


def _missing(options: argparse.Namespace, results: Path) -> list[Result]:
    """The measurements that the options ask for and the results file lacks, by the fields of `KEY`."""
    names = [
        (zoo, name) for zoo in options.zoo for name in options.models or zoo_models.names(zoo, options.out)
    ]
    jobs = [(zoo, name, options.granularity, options.double) for zoo, name in names]
    done = {tuple(row[part] for part in KEY) for row in read(results)}
    return [dict(zip(KEY, job, strict=True)) for job in jobs if job not in done]


def read(path: Path) -> list[Result]:
    """The rows of a results file; none if there is no file yet."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def run(job: Result, seconds: float) -> Result:
    """Measure one model in a process of its own; what it reported before it was stopped counts."""
    command = [sys.executable, "-m", "benchmarks.zoo_measure", json.dumps(job)]
    started = time.perf_counter()
    ended = "failed: "
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=seconds)
        ended += (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        ended += f"more than {seconds:g} s"
    row: Result = {"seconds": time.perf_counter() - started}
    for text in printed.splitlines():
        if text.startswith("RESULT "):
            row |= json.loads(text.removeprefix("RESULT "))
    if row.get("peer_status") == "killed":
        row["peer_status"] = ended
    return {"status": ended} | row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--zoo", nargs="+", choices=zoo_models.ZOOS, default=list(zoo_models.ZOOS))
    parser.add_argument("--models", nargs="+", help="only these models")
    told = "streams: channels that norms run over, too"
    parser.add_argument("--granularity", choices=zoo_models.GRANULARITIES, default="channels", help=told)
    parser.add_argument("--double", action="store_true", help="in float64, where 1e-9 is a proof")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave Torch-Pruning out")
    parser.add_argument("--out", type=Path, default=Path("out/zoo"))
    parser.add_argument("--seconds", type=float, default=600, help="limit for each model")
    parser.add_argument("--gigabytes", type=float, default=8, help="limit for each model")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
