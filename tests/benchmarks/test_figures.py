"""Figures of results that are made up here: what is drawn, what is left out, and how large the files are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.cifar_channels import METHODS as CHANNEL_METHODS
from benchmarks.methods import METHODS as WEIGHT_METHODS

EPOCHS = 16


def cifar(method: str, seed: int, **values: Any) -> dict[str, Any]:
    falling = [round(2.3 / (epoch + 1), 4) for epoch in range(EPOCHS)]
    dense = method == "dense"
    bell = np.histogram(np.random.default_rng(seed).normal(size=5000), 61, (-4, 4))[0].tolist()
    record: dict[str, Any] = {
        "key": f"{method} {seed} {values}",
        "method": method,
        "block": "own",
        "ratio": None if dense or method == "str" else 0.863,
        "knob": -5.0 if method == "str" else None,
        "seed": seed,
        "epochs": EPOCHS,
        "validated": False,
        "rate": 0.4,
        "batch": 128,
        "hard": 0.85 + 0.01 * seed,
        "sparsity": 0.0 if dense else 0.863,
        "macs": 4e7 if dense else 6e6,
        "layers": {f"blocks.{place}.conv1": [100 - 5 * place, 100] for place in range(9)},
        "losses": falling,
        "flips": [] if dense else [loss / 100 for loss in falling],
        "pruned": [] if dense else [0.863 * epoch / EPOCHS for epoch in range(EPOCHS)],
        "weights": [
            {"epoch": epoch, "reach": 0.2, "counts": bell, "left": [count // 2 for count in bell]}
            for epoch in (4, 8, 12, 16)
        ],
    }
    return record | values


def ablation(name: str, hard: float) -> dict[str, Any]:
    return cifar("pdp", 0) | {"key": name, "name": name, "amount": 0.863, "hard": hard}


def written(folder: Path, name: str, records: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [cifar(method, seed) for method in ("dense", "pdp", "str", "gmp") for seed in (0, 1)]
    del records[2]["weights"]
    records.append(cifar("pdp", 0, block="common"))
    written(tmp_path, "cifar", records)
    channels = [cifar("tp-group-norm", 0, reduction=0.549), cifar("dense", 0, reduction=None)]
    written(tmp_path, "cifar_channels", channels)
    taus = ("pdp", "tau-1e-05", "tau-0.001", "tau-rel-0.1", "tau-rel-1", "hard")
    written(tmp_path, "ablations", [ablation(name, 0.8 + 0.01 * p) for p, name in enumerate(taus)])
    return tmp_path


@pytest.mark.long
def test_every_figure_is_drawn_small_enough_to_keep(folder: Path) -> None:
    figures.main(["--results", str(folder), "--out", str(folder / "out"), "--short"])
    drawn = {path.name: path.stat().st_size for path in (folder / "out").iterdir()}
    assert sorted(drawn) == sorted(f"{name}.png" for name in figures.FIGURES)
    assert all(2000 < size < 150_000 for size in drawn.values()), drawn


def test_a_figure_without_records_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = [cifar("pdp", seed) for seed in (0, 1)]
    for record in old:
        del record["weights"]
    written(folder, "cifar", old)
    (folder / "ablations.jsonl").unlink()
    arguments = ["--results", str(folder), "--out", str(folder / "out"), "--short"]
    figures.main(arguments)
    drawn = sorted(path.stem for path in (folder / "out").iterdir())
    assert drawn == ["flips", "layers", "macs", "progress"]
    shown = capsys.readouterr().out
    assert "weights: no record has what it shows" in shown
    assert "tau: no record has what it shows" in shown


def test_every_pattern_has_a_mark_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ("own", "common", "1:4", "2:4", "2:8", "4:8")
    written(folder, "cifar", [cifar("sr-ste", 0, block=block) for block in blocks])
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_: saved.append(figure))
    figures.main(["--results", str(folder), "--out", str(folder / "out"), "--short", "--figures", "macs"])
    (axes,) = saved[0].axes
    marks = [(line.get_marker(), line.get_fillstyle()) for bar in axes.containers for line in bar[:1]]
    assert len(set(marks)) == len(blocks) + 1
    for block in (*blocks, "channels"):
        assert f" {block}" in axes.get_xlabel()


def test_every_method_has_a_colour_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = sorted({*WEIGHT_METHODS, *CHANNEL_METHODS})
    written(folder, "cifar", [cifar(method, 0) for method in methods])
    written(folder, "cifar_channels", [])
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_: saved.append(figure))
    figures.main(["--results", str(folder), "--out", str(folder / "out"), "--short", "--figures", "macs"])
    (axes,) = saved[0].axes
    colours = [line.get_color() for bar in axes.containers for line in bar[:1]]
    assert len(methods) > 20
    assert len(set(colours)) == len(colours) == len(methods)


def test_other_recipes_are_not_mixed_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(folder), "--out", str(folder / "none")]
    figures.main(arguments)
    figures.main([*arguments, "--short", "--validate"])
    figures.main([*arguments, "--short", "--figures", "flips", "--methods", "st3"])
    assert list((folder / "none").iterdir()) == []
    assert capsys.readouterr().out.count("no record") == 2 * len(figures.FIGURES) + 1
