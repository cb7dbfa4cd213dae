"""The channel table on a few tiny images: equal savings, physically smaller, resumable."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pdp_fx
from benchmarks import cifar_channels
from benchmarks.peer_training import macs_of, sliced
from benchmarks.resnet_cifar import ResNet20
from tests.benchmarks.tiny_data import write_cifar10

EXAMPLE = torch.zeros(2, 3, 32, 32)


def test_every_method_saves_what_was_asked_and_is_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_channels, "latency", lambda *_: {"1": 0.5, "64": 0.5})
    write_cifar10(tmp_path, 20, 10)
    out = tmp_path / "channels.jsonl"
    arguments = ["--data", str(tmp_path), "--out", str(out), "--states", str(tmp_path / "s")]
    arguments += ["--epochs", "4", "--batch", "10", "--precision", "fp32"]
    cifar_channels.main(arguments)
    records = {record["method"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert list(records) == list(cifar_channels.METHODS)
    for method, record in records.items():
        saved = 1 - record["macs"] / records["dense"]["macs"]
        assert len(record["losses"]) == 4
        if method == "dense":
            assert record["macs"] == cifar_channels.DENSE_MACS
        elif method == "tp-group-norm":
            # The same whole number of channels everywhere leaves coarse steps.
            assert 0.549 <= saved < 0.62
        else:
            assert 0.549 <= saved < 0.58, method
        assert record["parameters"] <= records["dense"]["parameters"]
    printed = capsys.readouterr().out
    assert "54.9% of the MACs to be saved, 4 epochs" in printed
    cifar_channels.main(arguments)
    assert "epoch 4 of 4" not in capsys.readouterr().out


@pytest.mark.parametrize("across", [False, True])
def test_slicing_by_the_peer_finds_the_least_ratio(across: bool) -> None:
    torch.manual_seed(0)
    model = ResNet20()
    small = sliced(model, 0.3, across)
    macs = pdp_fx.report(small.eval(), EXAMPLE).macs
    assert macs is not None
    assert macs == macs_of(small)
    assert 0.6 * cifar_channels.DENSE_MACS < macs <= 0.7 * cifar_channels.DENSE_MACS
    assert small(EXAMPLE).shape == (2, 10)


def test_slicing_refuses_a_saving_that_no_ratio_reaches() -> None:
    with pytest.raises(ValueError, match="no ratio below 1 saves 100.0%"):
        sliced(ResNet20(), 1.0, across=False)


def test_latency_is_relative_to_the_dense_net() -> None:
    small, dense = (nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 4, 3)) for width in (1, 128))
    found = cifar_channels.latency(small, dense, "cpu", rounds=3)
    assert set(found) == {"1", "64"}
    assert 0 < found["64"] < 1


def test_folding_changes_no_output() -> None:
    torch.manual_seed(0)
    model = ResNet20()
    images = torch.randn(2, 3, 32, 32)
    model.train()(images)
    small = cifar_channels.folded(model)
    torch.testing.assert_close(small(images), model.eval()(images), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in small.modules())
