"""The ImageNet script on a tiny folder of images."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import train_imagenet
from benchmarks.imagenet_recipes import RECIPES
from pdp_fx import NM, Channels, Schedule, SpecError, Unstructured

ROOT = Path(__file__).parents[2]
COLOURS = {"blue": (40, 60, 200), "green": (40, 200, 60), "red": (200, 40, 60)}


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise around three colours, a folder each."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 6)):
        for name, colour in COLOURS.items():
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.normal(colour, 40, (40, 40, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{index}.png")
    return folder


def options(images: Path, out: Path, *more: str, epochs: int = 4) -> list[str]:
    ramp = ["--ramp-start", "0", "--ramp-epsilon", "0.5"]
    if ":" not in " ".join(more):
        ramp += ["--sparsity", "0.5"]
    small = ["--image-size", "32", "--batch", "16", "--workers", "0", "--epochs", str(epochs)]
    return [str(images), "--out", str(out), *ramp, *small, *more]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_recipes_are_those_of_the_paper() -> None:
    rows = {name: (r.sparsity, r.epochs, r.rate, r.weight_decay) for name, r in RECIPES.items()}
    assert rows == {
        "resnet18": (0.855, 100, 1.8, 1.4e-5),
        "resnet50": (0.898, 100, 1.8, 1.4e-5),
        "mobilenet_v1": (0.866, 180, 1.8, 1.4e-5),
        "mobilenet_v2": (0.802, 180, 0.8, 8e-6),
    }
    for recipe in RECIPES.values():
        assert (recipe.batch, recipe.warmup, recipe.start, recipe.epsilon, recipe.tau) == (
            1024,
            5,
            16,
            0.015,
            1e-4,
        )
        assert Schedule(recipe.start, recipe.epsilon, length=recipe.epochs).ramp_end == 83


def test_the_rate_warms_up_and_falls_to_zero_in_proportion_to_the_batch() -> None:
    recipe = RECIPES["resnet50"]
    assert recipe.rate_at(0, 100, 1024) == 0
    assert recipe.rate_at(2.5, 100, 1024) == pytest.approx(0.9)
    assert recipe.rate_at(5, 100, 256) == pytest.approx(0.45)
    assert recipe.rate_at(52.5, 100, 1024) == pytest.approx(0.9)
    assert recipe.rate_at(100, 100, 1024) == pytest.approx(0, abs=1e-12)


def test_granularities_are_written_as_words() -> None:
    recipe, ramp = RECIPES["resnet18"], Schedule()
    assert recipe.spec("unstructured", 0.9, ramp).default == Unstructured(0.9)
    assert recipe.spec("2:4", 0.9, ramp).default == NM(2, 4)
    assert recipe.spec("channels", 0.5, ramp).default == Channels(mac_reduction=0.5, round_to=16)
    with pytest.raises(ValueError, match="N:M like 2:4"):
        recipe.spec("half", 0.5, ramp)


def test_a_run_trains_prunes_and_converts(images: Path, tmp_path: Path) -> None:
    train_imagenet.main(options(images, tmp_path, "--network", "mobilenet_v2"))
    *epochs, last = lines(tmp_path)
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) for line in epochs)
    assert last["converted"]["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert last["converted"]["top1"] == pytest.approx(epochs[-1]["top1"], abs=0.12)
    small = torch.load(tmp_path / "converted.pt", weights_only=False)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.long
def test_a_run_goes_on_where_it_was_stopped_and_runs_in_a_process_group(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train_imagenet.Run.save

    def killed_after_two(run: train_imagenet.Run, epoch: int) -> None:
        save(run, epoch)
        if epoch == 2:
            raise KeyboardInterrupt

    arguments = options(images, tmp_path, "--granularity", "2:4", "--bf16")
    with monkeypatch.context() as patch:
        patch.setattr(train_imagenet.Run, "save", killed_after_two)
        with pytest.raises(KeyboardInterrupt):
            train_imagenet.main(arguments)
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    train_imagenet.main(arguments)
    *epochs, last = lines(tmp_path)
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4]
    assert 0.4 < last["converted"]["sparsity"] <= 0.5


@pytest.mark.long
def test_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train_imagenet.Run.save

    def killed_after_one(run: train_imagenet.Run, epoch: int) -> None:
        save(run, epoch)
        if epoch == 1:
            raise KeyboardInterrupt

    def chosen(name: str) -> list[str]:
        # This network has dropout.
        return options(images, tmp_path / name, "--network", "mobilenet_v2", epochs=3)

    train_imagenet.main(chosen("whole"))
    with monkeypatch.context() as patch:
        patch.setattr(train_imagenet.Run, "save", killed_after_one)
        with pytest.raises(KeyboardInterrupt):
            train_imagenet.main(chosen("stopped"))
    train_imagenet.main(chosen("stopped"))
    whole, stopped = (torch.load(tmp_path / name / "last.pt") for name in ("whole", "stopped"))
    assert lines(tmp_path / "whole")[-1] == lines(tmp_path / "stopped")[-1]
    for name, value in whole["model"].items():
        assert torch.equal(value, stopped["model"][name]), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--granularity", "channels"], "give the share of MACs to save with --sparsity"),
        (["--epochs", "0"], "--epochs: expected a whole number above 0, got '0'"),
        (["--granularity", "2:4", "--sparsity", "0.5"], "--sparsity: 2:4 says already how many weights stay"),
        (["--batch", "0"], "--batch: expected a whole number above 0, got '0'"),
    ],
)
def test_options_that_the_recipe_would_stand_in_for_are_refused(
    more: list[str], message: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_imagenet.main([str(images), "--workers", "0", *more])
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_run_with_other_options_does_not_go_on_from_a_checkpoint(images: Path, tmp_path: Path) -> None:
    train_imagenet.main(options(images, tmp_path, epochs=3))
    before = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"is of a run with seed 0, this one has 1: give another --out"):
        train_imagenet.main(options(images, tmp_path, "--seed", "1", epochs=3))
    assert (tmp_path / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["--sparsity", "--ramp-epsilon"])
def test_a_target_or_a_step_of_zero_is_refused(name: str, images: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        train_imagenet.main([*options(images, tmp_path), name, "0"])


def test_a_ramp_that_cannot_finish_is_refused_before_the_training(images: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="reaches the full target at epoch 83"):
        train_imagenet.main([str(images), "--out", str(tmp_path), "--epochs", "60", "--workers", "0"])


@pytest.mark.slow
def test_two_processes_train_under_torchrun(images: Path, tmp_path: Path) -> None:
    launch = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "benchmarks.train_imagenet",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *options(images, tmp_path, "--granularity", "channels")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert [line["epoch"] for line in lines(tmp_path)[:-1]] == [1, 2, 3, 4]
