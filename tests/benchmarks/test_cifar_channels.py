"""The channel table on a few tiny images: equal savings, physically smaller, resumable."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from benchmarks import cifar_channels
from benchmarks.methods import Budget
from benchmarks.peer_training import PeerTrainer, macs_of, sliced
from benchmarks.resnet_cifar import ResNet20
from benchmarks.rivals import ScoredChannels
from benchmarks.training import Settings
from tests.benchmarks.tiny_data import write_cifar10
from tests.nets import mask_of

EXAMPLE = torch.zeros(2, 3, 32, 32)


@pytest.mark.long
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


class Nothing:
    """Empty images, whose loss has no gradient at weights before a batch norm."""

    def __len__(self) -> int:
        return 2

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(2):
            yield torch.zeros(4, 3, 32, 32), torch.arange(4)


class Noise(Nothing):
    """The same noise in every batch."""

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            yield torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)


@pytest.mark.parametrize("across", [False, True])
def test_the_peer_draws_weights_to_zero_by_its_regularisation_alone_until_it_slices(across: bool) -> None:
    torch.manual_seed(0)
    settings = Settings(rate=0.1, decay=1e-2, momentum=0.0, warmup=0.0)
    run = PeerTrainer(ResNet20(), None, Budget(4, 2), settings, reduction=0.3, across=across)
    rates = [0.1 * run.rate_factor(step) for step in range(8)]
    before = run.model.get_parameter("conv1.weight").detach().clone()
    sparse = run.epoch(Nothing())
    assert sparse > 0
    after = run.model.get_parameter("conv1.weight").detach()
    left = (after / before).flatten(1)
    # Its factors reach from 1 to 16, and are the same for all weights of a channel.
    torch.testing.assert_close(left, left[:, :1].expand_as(left), rtol=0, atol=2e-6)
    reg = run.regularisation
    assert reg * sum(rates[:4]) == pytest.approx(5e-4 * 391 * 0.622)
    most, least = ((1 - rates[0] * reg * f) * (1 - rates[1] * reg * f) for f in (1, 16))
    assert float(left.max()) == pytest.approx(most, abs=2e-6)
    assert float(left.min()) == pytest.approx(least, abs=2e-5)
    run.epoch(Nothing())
    before = run.model.get_parameter("conv1.weight").detach().clone()
    run.epoch(Nothing())
    after = run.model.get_parameter("conv1.weight").detach()
    decayed = (1 - rates[4] * 1e-2) * (1 - rates[5] * 1e-2)
    torch.testing.assert_close(after, before * decayed, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [1, 3])
def test_the_peer_goes_on_before_and_after_the_slicing_as_if_it_had_not_stopped(
    stopped: int, tmp_path: Path
) -> None:
    def begun() -> PeerTrainer:
        torch.manual_seed(0)
        settings = Settings(rate=0.1, warmup=0.0)
        return PeerTrainer(ResNet20(), None, Budget(4, 2), settings, reduction=0.3, across=True)

    def trained(run: PeerTrainer, until: int) -> PeerTrainer:
        while run.done < until:
            run.epoch(Noise())
        return run

    whole = trained(begun(), 4).model.state_dict()
    trained(begun(), stopped).save(tmp_path / "state.pt")
    other = begun()
    other.load(tmp_path / "state.pt")
    resumed = trained(other, 4).model.state_dict()
    assert len(whole["blocks.0.conv1.weight"]) < 16
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_the_peer_ranks_groups_together_by_scores_over_their_largest() -> None:
    torch.manual_seed(0)
    run = PeerTrainer(ResNet20(), None, Budget(4, 2), Settings(), across=True)
    run.peer.update_regularizer()
    for group in run.peer._groups:
        assert float(run.peer.estimate_importance(group).max()) == pytest.approx(1.0)


def test_channels_go_by_the_scores_of_the_net_as_it_is_when_they_go(tmp_path: Path) -> None:
    table = cifar_channels.ChannelTable(tmp_path, tmp_path, tmp_path, Settings())
    run = table.trainer(cifar_channels.Run("scp-style", 0.5, 0, 6, rate=0.1), 2)
    noise = Noise()
    for _ in range(3):
        run.epoch(noise)
    mask = mask_of(run.model, "blocks_0_conv1")
    assert isinstance(mask, ScoredChannels)
    assert int(mask.count) > 0
    gamma, beta = (run.model.get_parameter(f"blocks.0.bn1.{name}").detach() for name in ("weight", "bias"))
    passed = torch.distributions.Normal(0.0, 1.0).cdf(beta / gamma.abs())
    torch.testing.assert_close(mask.given, passed, rtol=1e-5, atol=1e-6)


def test_a_table_tells_batch_sizes_apart_and_says_what_it_was_measured_on() -> None:
    def record(batch: int, hard: float) -> dict[str, object]:
        return {
            "method": "pdp", "reduction": 0.5, "seed": 0, "epochs": 4, "validated": True, "rate": 0.4,
            "batch": batch, "hard": hard, "macs": 2e7, "parameters": 1, "seconds": 1.0,
            "latency": {"1": 0.5, "64": 0.5},
        }  # fmt: skip

    shown = cifar_channels.as_text([record(128, 0.9), record(64, 0.7)], 4, validated=True)
    assert "4 epochs, held out training images" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["pdp", "90.00"] in [row[:2] for row in rows]
    assert ["pdp,", "batch", "64", "70.00"] in [row[:4] for row in rows]


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
