"""The GPT table on a few words: what it runs, writes and prints."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpt_shakespeare
from benchmarks.gpt_shakespeare import TextBatches, text_loss


@pytest.mark.long
def test_a_table_has_every_method_beside_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt_shakespeare, "STEPS", 4)
    (tmp_path / "tinyshakespeare.txt").write_text("to be or not to be, that is the question. " * 20)
    out = tmp_path / "gpt.jsonl"
    arguments = ["--data", str(tmp_path), "--out", str(out), "--states", str(tmp_path / "s"), "--steps", "24"]
    arguments += ["--layers", "1", "--width", "16", "--positions", "8", "--rate", "0.01"]
    gpt_shakespeare.main([*arguments, "--methods", "dense", "gmp", "optg", "pdp", "movement"])
    records = {record["method"]: record for record in map(json.loads, out.read_text().splitlines())}
    linear = 12 * 16 * 16
    for method, record in records.items():
        assert record["losses"][-1] < record["losses"][0]
        assert record["converted"] == pytest.approx(record["hard"], rel=1e-5)
        if method != "dense":
            assert record["sparsity"] == pytest.approx(0.75, abs=1.5 / linear)
            assert record["extra"] == (linear if method in ("optg", "movement") else 0)
    printed = capsys.readouterr().out
    assert "PDP, the paper" in printed
    assert "GPT, tiny Shakespeare, 75% of the linear layers, 24 steps" in printed
    gpt_shakespeare.main([*arguments, "--methods", "gmp"])
    assert "epoch 6 of 6" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "150"], "--steps: expected a multiple of 100, 200 or more, got 150"),
        (["--steps", "100"], "--steps: expected a multiple of 100, 200 or more, got 100"),
        (["--width", "30"], "--width: expected a multiple of the 4 heads, got 30"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpt_shakespeare.main(["--data", str(tmp_path), "--out", str(tmp_path / "gpt.jsonl"), *more])
    assert message in capsys.readouterr().err


def test_batches_are_pieces_and_what_follows_them() -> None:
    batches = TextBatches(torch.arange(50), 5, 3, seed=1)
    inputs, labels = next(batches.epoch(2))
    assert inputs.shape == labels.shape == (3, 5)
    assert torch.equal(inputs + 1, labels)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(5).expand(3, 5))
    assert torch.equal(inputs, next(batches.epoch(2))[0])
    assert not torch.equal(inputs, next(batches.epoch(3))[0])
    assert len(list(batches.epoch(0))) == len(batches)


def test_the_loss_is_the_mean_over_whole_pieces() -> None:
    model = nn.Embedding(4, 4)
    ids = torch.tensor([0, 1, 2, 3, 0, 2, 1, 1])
    whole = torch.log_softmax(model.weight, 1)
    expected = -sum(float(whole[ids[i], ids[i + 1]].detach()) for i in range(6)) / 6
    assert text_loss(model, ids, 3, size=1) == pytest.approx(expected, rel=1e-5)
