"""The results that are committed are those that benchmarks/README.md shows."""

from pathlib import Path

import pytest

from benchmarks import ablations, cifar_table, gpt_shakespeare, overhead, overhead_table, results, sst2
from benchmarks.methods import FULL, SHORT

ROOT = Path(__file__).parents[2] / "benchmarks"


def records(name: str) -> list[results.Record]:
    return list(results.load(ROOT / "results" / f"{name}.jsonl").values())


@pytest.mark.parametrize(
    "tables",
    [
        cifar_table.as_text(records("cifar"), SHORT),
        cifar_table.as_text(records("cifar"), FULL),
        gpt_shakespeare.as_text(records("gpt_shakespeare"), gpt_shakespeare.Run("", None, 0, 20)),
        sst2.as_text(records("sst2"), sst2.Run("", None, 0, 24)),
        ablations.as_text(records("ablations"), 8),
    ],
    ids=["cifar", "cifar, full recipe", "gpt", "sst2", "ablations"],
)
def test_the_tables_are_those_of_the_results(tables: str) -> None:
    assert tables
    readme = (ROOT / "README.md").read_text()
    for table in tables.split("\n\n"):
        assert table.strip() in readme


@pytest.mark.parametrize("name", ["cifar", "gpt_shakespeare", "sst2"])
def test_a_converted_model_does_what_its_masks_did(name: str) -> None:
    for record in records(name):
        assert abs(record.get("converted", record["hard"]) - record["hard"]) <= 1e-3


def test_the_readme_shows_the_cost_of_the_steps_that_were_measured() -> None:
    records = overhead.load(ROOT / "results" / "overhead.json")
    assert overhead_table.summary(records) in (ROOT / "README.md").read_text()
    assert overhead_table.medians(records) in (ROOT.parent / "README.md").read_text()
