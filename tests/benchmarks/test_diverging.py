"""A training whose weights become NaN is written down like any other, so that the table goes on."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ablations, cifar, cifar_channels
from benchmarks.training import Trainer
from tests.benchmarks.tiny_data import write_cifar10


@pytest.fixture(autouse=True)
def diverging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every training diverge in its third epoch."""
    epoch = Trainer.epoch

    def train(self: Trainer, batches: Any) -> float:
        if self.done == 2:
            torch.nn.init.constant_(self.model.get_parameter("conv1.weight"), torch.nan)
        return epoch(self, batches)

    monkeypatch.setattr(Trainer, "epoch", train)
    monkeypatch.setattr(cifar_channels, "latency", lambda *_: {"1": 1.0, "64": 1.0})


@pytest.mark.long
@pytest.mark.parametrize(
    ("main", "chosen", "name"),
    [
        (cifar.main, ["--methods", "dense", "pdp", "--blocks", "own"], "pdp"),
        (cifar.main, ["--methods", "dense", "--blocks", "own"], "dense"),
        (cifar_channels.main, ["--methods", "pdp"], "pdp"),
        (ablations.main, ["--ablations", "pdp"], "pdp"),
        (ablations.main, ["--ablations", "through-t-rel-0.1"], "through-t-rel-0.1"),
        (ablations.main, ["--ablations", "raw-norm"], "raw-norm"),
        (ablations.main, ["--ablations", "conv-weight"], "conv-weight"),
    ],
)
def test_it_comes_to_its_record(
    tmp_path: Path, main: Callable[[list[str]], None], chosen: list[str], name: str
) -> None:
    write_cifar10(tmp_path, 20, 10)
    out = tmp_path / "out.jsonl"
    arguments = ["--data", str(tmp_path), "--out", str(out), "--states", str(tmp_path / "s")]
    main([*arguments, "--epochs", "3", "--batch", "10", "--precision", "fp32", *chosen])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    record = next(r for r in records if name in (r.get("name"), r.get("method")))
    assert math.isnan(record["losses"][-1])
    assert 0 <= record["hard"] <= 1
