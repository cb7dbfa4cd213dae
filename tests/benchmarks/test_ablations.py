"""The ablations on a few tiny images: every setting trains, and its row says what it differs from."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablations
from benchmarks.ablations import ABLATIONS, as_text
from benchmarks.cifar_channels import DENSE_MACS
from tests.benchmarks.tiny_data import write_cifar10

WEIGHTS = [name for name, setting in ABLATIONS.items() if not setting.channels]


@pytest.mark.long
def test_every_setting_trains_and_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar10(tmp_path, 20, 10)
    out = tmp_path / "ablations.jsonl"
    arguments = ["--data", str(tmp_path), "--out", str(out), "--states", str(tmp_path / "s")]
    arguments += ["--epochs", "5", "--batch", "10", "--precision", "fp32"]
    ablations.main(arguments)
    records = {record["name"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert list(records) == list(ABLATIONS)
    for name, record in records.items():
        assert len(record["losses"]) == 5
        assert len(record["weights"]) == 4
        assert record["converted"] == record["hard"] or name == "conv-weight"
        if ABLATIONS[name].channels:
            assert 0.549 <= 1 - record["macs"] / DENSE_MACS < 0.58, name
        else:
            pruned = sum(size - left for left, size in record["layers"].values())
            assert pruned == round(0.863 * 267_696)
            assert record["pruned"] == records["pdp"]["pruned"], name
    assert records["hard"]["undecided"] == records["hard-ste"]["undecided"] == 0
    soft = [records[name]["undecided"] for name in WEIGHTS if name.startswith("tau-rel")]
    assert soft == sorted(soft)
    assert len({records[name]["macs"] for name in ("channels", "conv-weight", "raw-norm")}) == 1
    printed = capsys.readouterr().out
    assert "Ablations, ResNet20 / CIFAR-10, 54.9% of the MACs saved by channels, 5 epochs" in printed
    assert "Ablations, ResNet20 / CIFAR-10, 86.3% of 267,696 weights, 5 epochs" in printed
    ablations.main([*arguments, "--ablations", "raw-norm"])
    assert "epoch 5 of 5" not in capsys.readouterr().out


def test_a_setting_is_trained_with_what_it_is_set_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float, int, bool]] = []
    monkeypatch.setattr(
        ablations.AblationTable,
        "run",
        lambda self, run: asked.append((run.name, run.amount, run.seed, run.validated)),
    )
    chosen = ["--ablations", "through-t-rel-0.1", "raw-norm", "--sparsity", "0.9", "0.95", "--validate"]
    ablations.main(["--out", str(tmp_path / "none.jsonl"), "--seeds", "3", *chosen])
    assert asked == [
        ("pdp", 0.9, 3, True),
        ("pdp", 0.95, 3, True),
        ("tau-rel-0.1", 0.9, 3, True),
        ("tau-rel-0.1", 0.95, 3, True),
        ("through-t-rel-0.1", 0.9, 3, True),
        ("through-t-rel-0.1", 0.95, 3, True),
        ("channels", 0.549, 3, True),
        ("raw-norm", 0.549, 3, True),
    ]
    asked.clear()
    ablations.main(["--out", str(tmp_path / "none.jsonl"), "--table"])
    assert not asked


def test_differences_are_those_of_the_same_seeds() -> None:
    def record(name: str, seed: int, hard: float, **values: Any) -> dict[str, Any]:
        base = {"name": name, "amount": 0.863, "seed": seed, "epochs": 16, "validated": False, "rate": 0.4}
        base |= {"batch": 128, "hard": hard, "soft": hard, "converted": hard, "sparsity": 0.863}
        return base | {"undecided": 0.1, "macs": 1e6, "seconds": 1.0} | values

    shown = as_text(
        [
            record("pdp", 0, 0.80),
            record("pdp", 1, 0.90),
            record("pdp", 2, 0.10),
            record("hard", 0, 0.79),
            record("hard", 1, 0.87),
            record("hard", 5, 0.50),
            record("through-t-rel-0.1", 0, 0.60),
            record("channels", 0, 0.70, amount=0.549),
            record("conv-weight", 0, 0.69, amount=0.549, converted=0.3),
        ],
        16,
    )
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert rows["hard"][5:10] == ["-2.00", "(-3.00", "to", "-1.00)", "pdp"]
    assert rows["through-t-rel-0.1"][1:4] == ["60.00", "60.00", "60.00"]
    assert rows["conv-weight"][1:6] == ["69.00", "-1.00", "channels", "69.00", "30.00"]
    assert shown.count("rate 0.4, batch 128, test images") == 2
