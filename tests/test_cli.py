"""The commands of ``python -m pdp_fx``; the demonstration has a test of its own."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor, nn

from pdp_fx.cli import main
from tests.nets import Mlp

CONV = "tests.nets:ConvNet"
IMAGES = "2x3x8x8"

SPEC = """
[default.unstructured]
ratio = 0.5
"""


class TwoInputs(nn.Module):
    """Words (n, 5) and vectors (n, 5, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, words: Tensor, vectors: Tensor) -> Tensor:
        return self.head(self.table(words) + vectors)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "spec.toml").write_text(SPEC)
    return str(tmp_path / "spec.toml")


def test_graph_prints_a_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "graph", CONV, "--input", IMAGES)
    assert "Conv2d conv1" in text
    assert "2x16x3x3" in text
    assert "*" not in text


def test_graph_with_a_spec_shows_the_masks(capsys: pytest.CaptureFixture[str], spec: str) -> None:
    assert "* WeightMask" in output(capsys, "graph", CONV, "--spec", spec)


def test_explain_asks_for_channels_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    assert "Channel groups, Channels(ratio=0.5)" in output(capsys, "explain", CONV, "--input", IMAGES)
    assert "Weights, Unstructured(ratio=0.5)" in output(capsys, "explain", CONV, "--spec", spec)


def test_report_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "report", CONV, "--input", IMAGES).splitlines()[-1].startswith("total")
    read = json.loads(output(capsys, "report", CONV, "--input", IMAGES, "--json"))
    assert read["macs"] == 64 * 216 + 9 * 1152 + 80


def test_draw_writes_every_file_it_is_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("channels.svg", "channels.png")]
    assert output(capsys, "draw", CONV, "--input", IMAGES, "--out", *paths) == f"wrote {', '.join(paths)}\n"
    assert "conv2" in Path(paths[0]).read_text()
    with Image.open(paths[1]) as image:
        assert image.format == "PNG"


def test_draw_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(("draw", CONV, "--input", IMAGES, "--out", str(tmp_path / "channels.svg"))) == 1
    assert "drawing needs matplotlib; write: pip install" in capsys.readouterr().err


def test_whole_numbers_and_several_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(
        capsys, "report", "tests.test_cli:TwoInputs", "--input", "3x5:int64", "--input", "3x5x8", "--json"
    )
    assert json.loads(text)["macs"] == 5 * 8 * 4


def test_a_model_may_be_named_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_cli.TwoInputs", Mlp())
    assert "fc1" in output(capsys, "report", "tests.test_cli:TwoInputs")
    monkeypatch.setattr("tests.test_cli.TwoInputs", int)
    assert main(["graph", "tests.test_cli:TwoInputs"]) == 1
    assert "must be a torch.nn.Module, got 0 (int)" in capsys.readouterr().err


def test_a_refusal_is_told_in_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONV]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("pdp_fx explain: Channels needs example_inputs")


def test_a_spec_that_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", CONV, "--spec", str(tmp_path / "missing.toml")]) == 1
    assert "missing.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "tests.nets"], "write module:name"),
        (["explain", "tests.nets:Missing"], "Missing"),
        (["explain", "no_such_module:Net"], "no_such_module"),
        (["report", "tests.test_cli:SPEC"], "neither a model nor something that makes one"),
        (["graph", CONV, "--input", "2x3x"], "write the shape as"),
        (["graph", CONV, "--input", "2x3:nothing"], "write the shape as"),
        (["graph", CONV, "--input", "0x3"], "write the shape as"),
        (["graph", CONV, "--input", "1x3:qint8"], "no such tensor can be made"),
        (["demo", "--epochs", "0"], "no whole number from 1 on"),
        (["demo", "--seeds", "-1"], "no whole number from 1 on"),
        (["draw", CONV, "--out", "channels.gif"], "ends neither in .svg nor in .png"),
        ([], "required"),
    ],
)
def test_wrong_arguments_are_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_module_that_fails_as_it_is_imported_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_as_it_is_imported.py").write_text("raise ValueError('no weights here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit):
        main(["report", "fails_as_it_is_imported:Net"])
    assert "cannot be imported: ValueError: no weights here" in capsys.readouterr().err


def test_a_model_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "torch.nn:Linear"]) == 1
    assert "the model cannot be made: TypeError" in capsys.readouterr().err


def test_the_package_runs_as_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pdp_fx", "report", "tests.nets:Mlp"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("pdp_fx", run_name="__main__")
    assert stopped.value.code == 0
    assert "fc1" in capsys.readouterr().out
