"""The models of the zoo benchmark: torchvision, timm, transformers, and chains; none has pretrained weights.

A `Subject` is a model with a function that draws inputs for it: batches of the size that is asked
for, except where the number of examples is part of what a model is given, as in a list of pictures.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks import zoo_chains, zoo_language, zoo_perception
from benchmarks.zoo_outputs import Arguments

ZOOS = ("torchvision", "timm", "transformers", "synthetic")
GRANULARITIES = ("channels", "streams", "unstructured", "nm")
TRANSFORMERS = zoo_language.MODELS | zoo_perception.MODELS


@dataclass(frozen=True)
class Subject:
    """A model and its inputs: positional arguments as a tuple, or keyword arguments as a dict."""

    model: nn.Module
    inputs: Callable[[int], Arguments]


def names(zoo: str, cache: Path) -> list[str]:
    """All model names of a zoo; timm's are chosen once and kept in the folder ``cache``."""
    if zoo == "torchvision":
        listed = cast(list[str], importlib.import_module("torchvision.models").list_models())
        return [name for name in listed if not name.startswith("quantized_")]
    if zoo == "timm":
        return _smallest_of_timm(cache / "timm_smallest.json")
    return list(zoo_chains.DEPTHS) if zoo == "synthetic" else sorted(TRANSFORMERS)


def build(zoo: str, name: str) -> Subject:
    """Build one model with random weights."""
    if zoo == "torchvision":
        return _torchvision(name)
    if zoo == "synthetic":
        return Subject(
            zoo_chains.chain(zoo_chains.DEPTHS[name]), lambda batch: (torch.randn(batch, 3, 8, 8),)
        )
    return _timm(name) if zoo == "timm" else _transformers(name)


def _torchvision(name: str) -> Subject:
    models = importlib.import_module("torchvision.models")
    builder = models.get_model_builder(name)
    parameters = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights": None}
    options |= {"weights_backbone": None} if "weights_backbone" in parameters else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    task = builder.__module__.removeprefix("torchvision.models").lstrip(".").partition(".")[0]
    if task == "detection":
        # An untrained detector is sure of nothing; it would return no box at all.
        limit = "score_thresh" if name.startswith(("ssd", "retinanet", "fcos")) else "box_score_thresh"
        options[limit] = 0.0
        if not name.startswith("ssd"):
            # Otherwise every picture is blown up to 800 pixels.
            options |= {"min_size": 128, "max_size": 128}
        if "rcnn" in name:
            # Every proposal goes through the heads, a thousand of them unless told otherwise.
            options |= {"rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 20}
    return Subject(builder(**options), TORCHVISION_INPUTS.get(task, _picture)(name))


def _picture(name: str) -> Callable[[int], Arguments]:
    size = 299 if name == "inception_v3" else 224
    return lambda batch: (torch.randn(batch, 3, size, size),)


def _scene(name: str) -> Callable[[int], Arguments]:
    return lambda batch: (torch.randn(batch, 3, 128, 128),)


def _clip(name: str) -> Callable[[int], Arguments]:
    frames, size = (16, 224) if name.startswith("mvit") else (8, 112)
    if name == "s3d":
        frames, size = 16, 224
    return lambda batch: (torch.randn(batch, 3, frames, size, size),)


def _two_frames(name: str) -> Callable[[int], Arguments]:
    return lambda batch: (torch.randn(batch, 3, 128, 128), torch.randn(batch, 3, 128, 128))


def _labelled(name: str) -> Callable[[int], Arguments]:
    """Two pictures of one size, each with one box; an untrained detector ignores the box in eval mode."""

    def target() -> dict[str, Tensor]:
        found = {"boxes": torch.tensor([[10.0, 20.0, 90.0, 100.0]]), "labels": torch.tensor([1])}
        if name.startswith("mask"):
            found["masks"] = torch.ones(1, 128, 128, dtype=torch.uint8)
        if name.startswith("keypoint"):
            found["keypoints"] = torch.tensor([[[30.0, 40.0, 1.0]] * 17])
        return found

    return lambda _: ([torch.rand(3, 128, 128) for _ in range(2)], [target() for _ in range(2)])


TORCHVISION_INPUTS = {
    "segmentation": _scene,
    "video": _clip,
    "optical_flow": _two_frames,
    "detection": _labelled,
}


def _timm(name: str) -> Subject:
    model = importlib.import_module("timm").create_model(name, pretrained=False)
    size = tuple(model.pretrained_cfg.get("input_size", (3, 224, 224)))
    return Subject(model, lambda batch: (torch.randn(batch, *size),))


def _smallest_of_timm(path: Path) -> list[str]:
    """The model with the fewest parameters of every module of timm."""
    if path.exists():
        return cast(list[str], json.loads(path.read_text()))
    timm = importlib.import_module("timm")
    chosen: list[str] = []
    for module in timm.list_modules():
        sizes: dict[str, int] = {}
        for name in timm.list_models(module=module):
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
        if sizes:
            chosen.append(min(sizes, key=lambda name: sizes[name]))
    path.write_text(json.dumps(chosen))
    return chosen


def _transformers(name: str) -> Subject:
    made = TRANSFORMERS[name]
    return Subject(made.build(), made.inputs)
