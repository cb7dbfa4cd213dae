"""The picture of the channels: where its parts lie, and that it can be written."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from torch import fx
from torchvision import models  # pyright: ignore[reportMissingTypeStubs]

import pdp_fx
from pdp_fx import Channels, SpecError
from pdp_fx.lanes import HEAD, Bar, Picture, lay_out
from tests.nets import at_once, net

HALF = at_once(Channels(ratio=0.5))


@pytest.fixture(scope="module")
def resnet18() -> fx.GraphModule:
    return pdp_fx.prepare(models.resnet18(), HALF, torch.randn(1, 3, 32, 32))


@pytest.fixture(scope="module")
def picture(resnet18: fx.GraphModule) -> Picture:
    return lay_out(pdp_fx.channel_graph(resnet18))


def bars(picture: Picture) -> dict[str, Bar]:
    return {bar.group: bar for bar in picture.bars}


def test_rows_follow_the_model(picture: Picture) -> None:
    labels = [picture.labels[row] for row in sorted(picture.labels)]
    assert labels[:4] == ["conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1"]
    assert labels[-1] == "fc"


def test_bars_of_one_lane_never_overlap(picture: Picture) -> None:
    for bar in picture.bars:
        others = [other for other in picture.bars if other.lane == bar.lane and other is not bar]
        assert all(bar.last < other.first or bar.first > other.last for other in others)


def test_a_bar_has_free_rows_for_its_name(picture: Picture) -> None:
    chips = {(chip.lane, chip.row) for chip in picture.chips}
    for bar in picture.bars:
        assert all((bar.lane, bar.first + row) not in chips for row in range(HEAD))


def test_every_chip_lies_in_the_bar_of_its_group(picture: Picture) -> None:
    found = bars(picture)
    for chip in picture.chips:
        bar = found[chip.group]
        assert bar.lane == chip.lane
        assert bar.first <= chip.row <= bar.last


def test_weights_link_the_group_they_read_with_the_one_they_make(picture: Picture) -> None:
    found = bars(picture)
    row = next(row for row, module in picture.labels.items() if module == "layer1.0.conv2")
    (link,) = [link for link in picture.links if link.row == row]
    assert link.sources == (found["layer1.0.conv1"].lane,)
    assert link.targets == (found["conv1"].lane,)


def test_three_lanes_are_enough_for_a_residual_net(picture: Picture) -> None:
    assert picture.lanes == 3


def test_svg_holds_the_names_and_reasons_as_text(resnet18: fx.GraphModule, tmp_path: Path) -> None:
    pdp_fx.draw_channels(resnet18, tmp_path / "channels.svg")
    text = (tmp_path / "channels.svg").read_text()
    for words in ("Channel groups of ResNet", "layer4.1.conv2", "1000 channels stay", "the model returns"):
        assert words in text


def test_the_same_model_gives_the_same_file(resnet18: fx.GraphModule, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        pdp_fx.draw_channels(resnet18, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_png_is_a_picture_of_readable_size(resnet18: fx.GraphModule, tmp_path: Path) -> None:
    pdp_fx.draw_channels(resnet18, str(tmp_path / "channels.png"))
    with Image.open(tmp_path / "channels.png") as image:
        assert image.format == "PNG"
        assert image.width > 600
        assert image.height > 1000


def test_long_names_are_cut_at_their_beginning(tmp_path: Path) -> None:
    model, x = net("mlp")
    outer = torch.nn.Sequential()
    outer.add_module("a_module_with_a_very_long_name", model)
    pdp_fx.draw_channels(pdp_fx.prepare(outer, HALF, x), tmp_path / "long.svg")
    assert ">\N{HORIZONTAL ELLIPSIS}fc1<" in (tmp_path / "long.svg").read_text()


def test_without_matplotlib_the_error_says_what_to_install(
    resnet18: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pdp-fx\[demo\]"):
        pdp_fx.draw_channels(resnet18, tmp_path / "channels.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["channels", "", "channels.txt", "channels.svg.txt"])
def test_a_file_of_an_ending_that_is_not_drawn_is_refused(
    resnet18: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"its ending must be .svg, .png or another of"):
        pdp_fx.draw_channels(resnet18, name)
    assert not list(tmp_path.iterdir())


def test_what_is_no_path_is_refused(resnet18: fx.GraphModule) -> None:
    with pytest.raises(SpecError, match=r"draw_channels needs the path of a file to write, got 3 \(int\)"):
        pdp_fx.draw_channels(resnet18, 3)  # pyright: ignore[reportArgumentType]
