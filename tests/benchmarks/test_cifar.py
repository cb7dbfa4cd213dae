"""The CIFAR-10 table on a few tiny images: what it runs, writes, resumes and prints."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cifar, results
from benchmarks.cifar_table import as_text
from benchmarks.training import Settings, Trainer
from tests.benchmarks.tiny_data import write_cifar10


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    write_cifar10(tmp_path, 20, 10)
    places = [
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "cifar.jsonl"),
        "--states",
        str(tmp_path / "s"),
    ]
    return [*places, "--epochs", "3", "--batch", "10", "--precision", "fp32"]


def lines(arguments: list[str]) -> list[dict[str, Any]]:
    text = Path(arguments[3]).read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_a_table_has_both_blocks_beside_the_paper(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cifar.main([*arguments, "--methods", "pdp", "dense", "--seeds", "0", "1"])
    printed = capsys.readouterr().out
    records = {record["key"]: record for record in lines(arguments)}
    assert [record["method"] for record in records.values()] == ["dense"] * 2 + ["pdp"] * 4
    for record in records.values():
        if record["method"] == "dense":
            assert record["parameters"] == 272_282
            assert record["macs"] == 40_813_184
            assert record["sparsity"] == 0
            continue
        pruned = sum(size - left for left, size in record["layers"].values())
        assert pruned == round(0.863 * 267_696)
        assert sum(size for _, size in record["layers"].values()) == 267_696
        assert record["converted"] == record["hard"]
        assert record["extra"] == 0
    (common, other) = (r for r in records.values() if r["block"] == "common")
    assert common["layers"] == other["layers"]
    allocation = next(r for r in records.values() if r["method"] == "dense")["allocation"]["0.863"]
    assert {name: size - left for name, (left, size) in common["layers"].items()} == {
        name: gone for name, (gone, _) in allocation.items()
    }
    assert "PDP, the paper" in printed
    assert printed.count("common allocation, 3 epochs, test images") == 1
    assert "epoch 3 of 3" in printed


def test_a_finished_run_is_not_run_again_and_a_stopped_one_goes_on(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = Trainer.epoch

    def stopping(self: Trainer, batches: Any) -> float:
        if self.done == 2:
            raise KeyboardInterrupt
        return epoch(self, batches)

    chosen = [*arguments, "--methods", "st3", "--blocks", "own"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "epoch", stopping)
        with pytest.raises(KeyboardInterrupt):
            cifar.main(chosen)
    assert "epoch 2 of 3" in capsys.readouterr().out
    cifar.main(chosen)
    shown = capsys.readouterr().out
    assert "epoch 3 of 3" in shown
    assert "epoch 2 of 3" not in shown
    assert "st3, batch 10" in shown.partition("own allocation")[2]
    (record,) = lines(arguments)
    assert len(record["losses"]) == 3
    cifar.main(chosen)
    assert "epoch 3 of 3" not in capsys.readouterr().out
    assert len(lines(arguments)) == 1


def test_runs_of_another_precision_are_neither_shown_nor_gone_on_with(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [*arguments, "--methods", "dense"]
    other = [*chosen[: chosen.index("fp32")], "bf16", "--methods", "dense"]
    with monkeypatch.context() as patch:
        patch.setattr(results, "add", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            cifar.main(chosen)
    with pytest.raises(ValueError, match=r"\.pt has 'dense own .* in fp32, but --precision is bf16"):
        cifar.main(other)
    cifar.main(chosen)
    with pytest.raises(ValueError, match=r"\.jsonl has .* give another --out"):
        cifar.main(other)
    assert len(lines(arguments)) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--patterns", "24"], "--patterns: expected a pattern such as 2:4, the kept count first, got '24'"),
        (["--patterns", "4:2"], "the kept count first, got '4:2'"),
        (["--epochs", "0"], "--epochs: expected a whole number above 0, got '0'"),
        (["--batch", "-8"], "--batch: expected a whole number above 0, got '-8'"),
        (["--trials", "few"], "--trials: expected a whole number above 0, got 'few'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    more: list[str], message: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cifar.main([*arguments, "--methods", "dense", *more])
    assert message in capsys.readouterr().err
    assert not Path(arguments[3]).exists()


def test_a_batch_that_is_never_full_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="the training data do not fill a batch; give a smaller --batch"):
        cifar.main([*arguments, "--methods", "dense", "--batch", "1000"])


def test_processes_that_want_the_same_run_train_it_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    epoch = Trainer.epoch

    def noted(self: Trainer, batches: Any) -> float:
        trained.append(threading.current_thread().name)
        return epoch(self, batches)

    monkeypatch.setattr(Trainer, "epoch", noted)
    run = cifar.Run("dense", "own", None, 0, 3, batch=10)
    tables = [cifar.Bench(tmp_path, tmp_path / "cifar.jsonl", tmp_path / "s", Settings()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda table: table.run(run), tables)
    assert len(trained) == 3
    assert len(set(trained)) == 1
    assert first["losses"] == second["losses"]


def test_a_search_tries_knobs_until_the_sparsity_is_met(arguments: list[str]) -> None:
    cifar.main([*arguments, "--methods", "str", "--trials", "3", "--validate"])
    records = lines(arguments)
    assert len(records) == 3
    assert records[0]["knob"] == pytest.approx(-math.exp(0.5 * math.log(20 * 3) - 13 * cifar.DECAYED))
    assert all(record["ratio"] is None and record["extra"] == 19 for record in records)
    sparser = [record["knob"] < after["knob"] for record, after in zip(records, records[1:], strict=False)]
    assert sparser == [record["sparsity"] < 0.863 for record in records[:-1]]


@pytest.mark.long
def test_patterns_have_tables_of_their_own(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cifar.main([*arguments, "--methods", "pdp", "sr-ste", "dense", "--patterns", "2:4", "2:8"])
    records = [record for record in lines(arguments) if record["method"] != "dense"]
    assert [(record["method"], record["block"]) for record in records] == [
        ("pdp", "2:4"),
        ("pdp", "2:8"),
        ("sr-ste", "2:4"),
        ("sr-ste", "2:8"),
    ]
    for record in records:
        for layer, (left, size) in record["layers"].items():
            assert left == size * (1 if layer == "conv1" else 1 - record["ratio"])
    printed = capsys.readouterr().out
    assert "ResNet20 / CIFAR-10, 2:8, 3 epochs, test images" in printed
    with pytest.raises(SystemExit):
        cifar.main([*arguments, "--methods", "optg", "--patterns", "2:4"])


def test_a_table_ends_with_what_is_in_print_of_its_methods() -> None:
    def record(method: str, block: str, ratio: float | None, hard: float) -> dict[str, Any]:
        return {
            "method": method, "block": block, "ratio": ratio, "knob": None, "seed": 0, "epochs": 16,
            "validated": False, "rate": 0.4, "batch": 128, "hard": hard, "soft": hard, "sparsity": 0.5,
            "macs": 4e7, "least": 0.1, "seconds": 1.0, "extra": 0,
        }  # fmt: skip

    records = [
        record("dense", "own", None, 0.84),
        record("acdc", "common", 0.863, 0.82),
        record("acdc", "common", 0.98, 0.70),
        record("sr-ste", "2:4", 0.5, 0.845),
        record("spartan", "common", 0.863, 0.80),
    ]
    printed = as_text(records, 16).split("Beside what is in print")[1].splitlines()
    assert [line.split()[:5] for line in printed[3:]] == [
        ["acdc", "common", "-2.00", "74.7", "75.03"],
        ["sr-ste", "2:4", "+0.50", "74.6", "77"],
    ]
    assert "in print" not in as_text(records[1:], 16)


def test_the_table_takes_the_nearest_knob_and_the_spread_of_seeds() -> None:
    def record(**values: Any) -> dict[str, Any]:
        base = {"method": "str", "block": "own", "ratio": None, "knob": None, "seed": 0, "epochs": 16}
        base |= {"validated": False, "rate": 0.4, "batch": 128, "hard": 0.8, "soft": 0.8, "sparsity": 0.0}
        return base | {"macs": 1e6, "least": 0.1, "seconds": 1.0, "extra": 0} | values

    shown = as_text(
        [
            record(method="dense", hard=0.9),
            record(method="pdp", ratio=0.9, hard=0.85, sparsity=0.9),
            record(method="pdp", ratio=0.9, hard=0.87, sparsity=0.9, seed=1),
            record(method="pdp", ratio=0.9, hard=0.5, sparsity=0.9, rate=0.1),
            record(knob=-6.0, sparsity=0.898, hard=0.7),
            record(knob=-5.0, sparsity=0.901, hard=0.6),
            record(knob=-4.0, sparsity=0.99, hard=0.1),
        ],
        16,
    )
    rows = [line.split() for line in shown.splitlines()]
    assert ["pdp", "86.00", "(85.00", "to", "87.00)"] in [row[:5] for row in rows]
    assert ["str", "60.00"] in [row[:2] for row in rows]
    assert any(row[:3] == ["pdp,", "rate", "0.1"] for row in rows)
    assert not any("70.00" in row for row in rows)


def test_results_keep_the_later_of_two_records_with_one_key(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    assert results.load(path) == {}
    for number in (1, 2):
        results.add(path, {"key": "a", "number": number})
    results.add(path, {"key": "b", "number": 3})
    assert [record["number"] for record in results.load(path).values()] == [2, 3]
    assert results.spread([1.0]) == "1.00"
    assert results.spread([1.0, 2.0]) == "1.50 (1.00 to 2.00)"
