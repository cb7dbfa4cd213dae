"""One short run of the whole demonstration, through the command line."""

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pdp_fx.cli import main
from pdp_fx.data import split_digits

PLOTS = ("accuracy", "sparsity", "weights", "flips")
MODELS = ("dense", "unstructured", "two-of-four", "channels")


@dataclass(frozen=True)
class Finished:
    """What one run printed and wrote."""

    text: str
    progress: str
    out: Path
    results: dict[str, Any]

    def variant(self, name: str) -> dict[str, Any]:
        (row,) = (row for row in self.results["variants"] if row["variant"] == name)
        return row


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    text, progress = StringIO(), StringIO()
    with redirect_stdout(text), redirect_stderr(progress):
        assert main(["demo", "--out", str(out), "--epochs", "3", "--seeds", "1"]) == 0
    return Finished(text.getvalue(), progress.getvalue(), out, json.loads((out / "results.json").read_text()))


def test_the_run_prints_graphs_groups_and_the_table(finished: Finished) -> None:
    assert "block1_conv1_weight_masked" in finished.text
    assert "block2.conv2, block2.shortcut.0, block3.project.0" in finished.text
    assert "the model returns these channels" in finished.text
    assert "max diff" in finished.text
    assert "channels, seed 0: 100%" in finished.progress


def test_the_plots_are_pictures(finished: Finished) -> None:
    for name in PLOTS:
        with Image.open(finished.out / f"{name}.png") as picture:
            assert min(picture.size) > 400
            assert len(picture.convert("RGB").getcolors(maxcolors=1 << 24) or ()) > 20


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_and_classifies_as_reported(finished: Finished, name: str) -> None:
    model = torch.export.load(finished.out / f"{name}.pt2").module()
    row = finished.results["variants"][MODELS.index(name)]
    digits = split_digits()
    with torch.inference_mode():
        right = model(digits.test.images).argmax(1) == digits.test.labels
    assert row["accuracy"] == [right.sum().item() / len(digits.test.labels)]
    assert row["size"]["plain"] == (finished.out / f"{name}.pt2").stat().st_size


def test_the_dense_net_is_whole(finished: Finished) -> None:
    dense = finished.variant("dense")
    assert dense["parameters"] == dense["nonzero"] == 84_874
    assert dense["macs"] == 840_320
    assert dense["latency"] == 1
    assert set(dense["layers"].values()) == {0}


def test_unstructured_pruning_reaches_nine_tenths_to_the_weight(finished: Finished) -> None:
    row = finished.variant("unstructured")
    masked = 83_792
    assert row["reached"] * masked == pytest.approx(round(0.9 * masked), abs=0.01)
    assert row["macs"] == finished.variant("dense")["macs"]
    assert row["nonzero"] < 0.12 * row["parameters"]


def test_two_of_four_are_zero_wherever_four_inputs_form_a_group(finished: Finished) -> None:
    layers = finished.variant("2:4")["layers"]
    assert {name for name, share in layers.items() if share == 0} == {"stem.0", "block3.depthwise.0"}
    assert set(layers.values()) == {0, 0.5}


def test_channel_pruning_halves_the_work_and_the_net_is_smaller(finished: Finished) -> None:
    dense, row = finished.variant("dense"), finished.variant("channels")
    assert 0.5 <= row["reached"] < 0.55
    assert row["macs"] == round((1 - row["reached"]) * dense["macs"])
    assert row["parameters"] == row["nonzero"] < 0.8 * dense["parameters"]
    assert row["size"]["plain"] < dense["size"]["plain"]


def test_the_flips_of_a_run_add_up_to_what_is_pruned(finished: Finished) -> None:
    row = finished.variant("unstructured")
    ((newly, restored),) = zip(row["newly_pruned"], row["restored"], strict=True)
    assert len(newly) == 3
    assert sum(newly) - sum(restored) == pytest.approx(row["reached"], abs=1e-6)


@pytest.mark.parametrize("name", ["unstructured", "2:4", "channels"])
def test_every_pruned_net_is_what_was_trained_and_learns(finished: Finished, name: str) -> None:
    row = finished.variant(name)
    assert 0 <= row["difference"] <= 1e-5
    assert min(row["accuracy"]) > 0.8
