import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import zoo, zoo_measure, zoo_models, zoo_peer, zoo_table
from benchmarks.zoo_measure import Job
from benchmarks.zoo_models import Subject
from benchmarks.zoo_outputs import mmacs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo"


class Small(nn.Module):
    """A residual net with an attention-free head: the peer can prune it too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head((x + self.inner(x)).mean((2, 3)))


class Cumulative(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).cumsum(1).mean((2, 3)))


def measured(
    job: Job, model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    subject = Subject(model, lambda batch: (torch.randn(2, 3, 6, 6),))

    def build(zoo: str, name: str) -> Subject:
        return subject

    monkeypatch.setattr(zoo_measure, "build", build)
    zoo_measure.measure(job)
    row: dict[str, Any] = {}
    for text in capsys.readouterr().out.splitlines():
        row |= json.loads(text.removeprefix("RESULT "))
    return row


@pytest.mark.parametrize("double", [False, True])
def test_a_model_is_measured_from_trace_to_comparison(
    double: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measured(Job("some", "small", double=double, peer=False), Small(), monkeypatch, capsys)
    assert row["status"] == "exact"
    assert row["difference"] <= (1e-9 if double else 1e-4)
    assert row["intact"]
    assert row["macs_prunable"] == 1.0
    assert 0.5 < row["macs_removed"] < 0.8
    assert row["frozen"] == 1
    assert {"trace_s", "prepare_s", "convert_s", "memory_mb", "reasons"} <= set(row)


def test_a_model_of_which_nothing_can_go_is_refused_with_its_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measured(Job("some", "cumulative", peer=False), Cumulative(), monkeypatch, capsys)
    assert row["status"].startswith("refused: nothing")
    assert "cumsum" in row["status"]


@pytest.mark.parametrize("granularity", ["unstructured", "nm"])
def test_single_weights_are_measured_by_their_zeros(
    granularity: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measured(Job("some", "small", granularity, peer=False), Small(), monkeypatch, capsys)
    assert row["status"] == "exact"
    assert 0.2 < row["zeros"] <= 0.5
    assert row["macs_removed"] == 0


class Attention(nn.Module):
    """Fused attention of a sequence with itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_the_products_of_fused_attention_are_counted() -> None:
    assert mmacs(Attention(), (torch.randn(2, 3, 10, 8),)) == pytest.approx(2 * (2 * 3 * 10 * 10 * 8) / 1e6)


def test_the_peer_keeps_the_size_of_the_outputs() -> None:
    model = Small()
    assert zoo_peer.output_layers(model, (torch.randn(2, 3, 6, 6),)) == [model.head]


def test_the_peer_is_compared_with_its_own_masked_model() -> None:
    pytest.importorskip("torch_pruning")
    example, other = (torch.randn(2, 3, 6, 6),), (torch.randn(2, 3, 6, 6),)
    found = zoo_peer.measure_peer(Small().double(), (example[0].double(),), (other[0].double(),))
    assert found["peer_status"] == "exact"
    assert found["model"].stem.out_channels == 4


def test_results_are_kept_and_measured_models_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(job: dict[str, Any], seconds: float) -> dict[str, Any]:
        ran.append(job["name"])
        return {"status": "exact", "seconds": 1.0, "prepare_s": 1.0, "convert_s": 0.5, "macs_removed": 0.5}

    monkeypatch.setattr(zoo, "run", run)
    monkeypatch.setattr(sys, "argv", ["zoo", "--zoo", "timm", "--models", "a", "b", "--out", str(tmp_path)])
    zoo.main()
    monkeypatch.setattr(sys, "argv", ["zoo", "--zoo", "timm", "--models", "b", "c", "--out", str(tmp_path)])
    zoo.main()
    assert ran == ["a", "b", "c"]
    assert "exact 50 %" in capsys.readouterr().out
    assert len((tmp_path / "zoo.csv").read_text().splitlines()) == 4


def test_a_model_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    row = zoo.run({"zoo": "transformers", "name": "bert"}, 0.05)
    assert row["status"] == "failed: more than 0.05 s"


def test_the_summary_counts_by_zoo_and_leaves_skipped_models_out() -> None:
    key = {"zoo": "timm", "granularity": "channels", "double": False}
    rows: list[dict[str, Any]] = [
        key | {"name": "a", "status": "exact", "macs_removed": 0.6, "prepare_s": 2.0, "convert_s": 1.0,
               "peer_status": "exact", "peer_macs_removed": 0.5, "peer_s": 4.0},
        key | {"name": "b", "status": "refused: it is so", "peer_status": "failed: IndexError"},
        key | {"name": "c", "status": "skipped: too large"},
    ]  # fmt: skip
    ours, beside = zoo_table.summary(rows).split("\n\n")
    cells = [cell.strip() for cell in ours.splitlines()[2].strip("|").split("|")]
    assert cells[:7] == ["timm", "channels", "2", "1", "1", "0", "0"]
    cells = [cell.strip() for cell in beside.splitlines()[2].strip("|").split("|")]
    assert cells == ["timm", "2", "1", "1", "1", "0", "1", "0.60", "0.50", "0", "3.00", "4.00", "0.75", "1"]


@pytest.mark.parametrize(
    "name", ["distilbert", "bart", "whisper", "clip", "llava", "detr", "patchtst", "hubert"]
)
def test_the_transformers_of_the_zoo_have_inputs_that_fit(name: str) -> None:
    pytest.importorskip("transformers")
    subject = zoo_models.build("transformers", name)
    for batch in (1, 2):
        inputs = subject.inputs(batch)
        assert isinstance(inputs, dict)
        assert len(subject.model(**inputs)[0]) == batch


def test_chains_double_in_depth_and_run() -> None:
    models = [zoo_models.build("synthetic", name).model for name in zoo_models.names("synthetic", Path())]
    depths = [sum(isinstance(module, nn.ReLU) for module in model.modules()) for model in models]
    assert all(later == 2 * earlier for earlier, later in zip(depths, depths[1:], strict=False))
    subject = zoo_models.build("synthetic", "chain_250")
    inputs = subject.inputs(2)
    assert isinstance(inputs, tuple)
    assert subject.model(*inputs).shape == (2, 10)


def test_a_step_with_gradients_that_overflow_is_left_out() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    zoo_measure.train(model, [(torch.full((1, 2), 1e30),)])
    assert torch.equal(model.weight, before)


def test_the_readmes_show_the_results_that_are_kept() -> None:
    rows = zoo.read(RESULTS / "results.jsonl")
    ours, beside = zoo_table.summary(rows).split("\n\n")
    assert ours in (RESULTS.parents[1] / "README.md").read_text()
    assert beside in (RESULTS.parents[2] / "README.md").read_text()
    assert len((RESULTS / "zoo.csv").read_text().splitlines()) >= len(rows) + 1
