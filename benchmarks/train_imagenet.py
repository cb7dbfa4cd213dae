"""Train and prune a network on ImageNet, or on any folder of images, as the paper does.

DATA holds train/ and val/, each with one folder of images per class. One process per GPU (or, with gloo, per
CPU); a run that is stopped goes on from the last epoch when it is started again with the same --out.

    torchrun --nproc-per-node 8 -m benchmarks.train_imagenet DATA --network resnet50 --out runs/resnet50
    python -m benchmarks.train_imagenet DATA --network mobilenet_v2 --granularity 2:4 --batch 256
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms  # pyright: ignore[reportMissingTypeStubs]

import pdp_fx
from benchmarks.imagenet_recipes import RECIPES, Recipe
from benchmarks.table_runs import positive
from benchmarks.training import save_whole
from pdp_fx import Schedule

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DECISIVE = (
    "network", "granularity", "sparsity", "epochs", "ramp_start", "ramp_epsilon", "batch", "image_size",
    "bf16", "seed",
)  # fmt: skip
"""The options that decide what a run becomes, wherever and on how many processes it runs."""


@dataclass(frozen=True)
class Place:
    """Where this process runs: its rank, how many ranks there are, and its device."""

    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def join(cls) -> Place:
        """Join the process group if torchrun started this process."""
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(rank, ranks, device)

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(numbers)
        return numbers.tolist()


class Run:
    """One training run: data, model, optimizer, and where it is saved."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.options, self.place = options, place
        self.recipe: Recipe = RECIPES[options.network]
        self.epochs = options.epochs or self.recipe.epochs
        self.batch = options.batch or self.recipe.batch
        self.train_data, self.val_data = load_data(options, place, self.batch // place.ranks)
        self.model = self._prepare()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), 0.0, momentum=self.recipe.momentum, weight_decay=self.recipe.weight_decay
        )
        self.parallel: nn.Module = self.model
        if dist.is_initialized():
            devices = [place.device] if place.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(self.model, device_ids=devices)
        self.lines: list[str] = []
        self.first_epoch = self._resume()

    def train_epoch(self, epoch: int) -> float:
        """Train one epoch; the mean loss of this rank."""
        sampler: Any = self.train_data.sampler
        sampler.set_epoch(epoch)
        # Crops, flips and dropout are those of this epoch and rank, also where a run goes on.
        torch.manual_seed((self.options.seed * 1_000_003 + epoch) * self.place.ranks + self.place.rank)
        self.parallel.train()
        total = torch.zeros((), device=self.place.device)
        for number, (images, labels) in enumerate(self.train_data):
            at = epoch + number / len(self.train_data)
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.rate_at(at, self.epochs, self.batch)
            loss = functional.cross_entropy(self._outputs(images), labels.to(self.place.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        mean = float(total) / len(self.train_data)
        if mean != mean:
            raise RuntimeError(f"the loss of epoch {epoch} is NaN; the last checkpoint is from before it")
        return mean

    def accuracy(self, model: nn.Module | None = None) -> float:
        """Share of the validation images that are classified rightly, with hard masks."""
        chosen = model if model is not None else self.model
        chosen.eval()
        right = seen = 0.0
        with torch.inference_mode():
            for images, labels in self.val_data:
                found = self._outputs(images, chosen).argmax(1)
                right += float((found == labels.to(self.place.device)).sum())
                seen += len(labels)
        right, seen = self.place.total(right, seen)
        return right / seen

    def save(self, epoch: int) -> None:
        """Replace the checkpoint in one go; the log so far is in it, so that no kill loses a line."""
        if self.place.rank == 0:
            parts = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": epoch,
                "options": self._decisive(),
                "lines": self.lines,
            }
            save_whole(parts, self.options.out / "last.pt")

    def note(self, **values: Any) -> None:
        """Print a line of JSON; `write_log` writes it down."""
        if self.place.rank == 0:
            self.lines.append(json.dumps(values))
            print(self.lines[-1], flush=True)

    def write_log(self) -> None:
        """Replace the log by all lines so far, in one go."""
        if self.place.rank == 0:
            part = self.options.out / "log.part"
            part.write_text("".join(f"{line}\n" for line in self.lines))
            part.replace(self.options.out / "log.jsonl")

    def _prepare(self) -> fx.GraphModule:
        torch.manual_seed(self.options.seed)
        net = self.recipe.make(self.options.classes).to(self.place.device)
        options, recipe = self.options, self.recipe
        start = recipe.start if options.ramp_start is None else options.ramp_start
        epsilon = recipe.epsilon if options.ramp_epsilon is None else options.ramp_epsilon
        sparsity = recipe.sparsity if options.sparsity is None else options.sparsity
        spec = recipe.spec(options.granularity, sparsity, Schedule(start, epsilon, length=self.epochs))
        size = options.image_size
        model = pdp_fx.prepare(net, spec, torch.zeros(2, 3, size, size, device=self.place.device))
        return model.to(memory_format=torch.channels_last)

    def _resume(self) -> int:
        path = self.options.out / "last.pt"
        if not path.exists():
            return 0
        saved = torch.load(path, map_location=self.place.device, weights_only=True)
        now = self._decisive()
        for name, value in saved["options"].items():
            if value != now[name]:
                raise ValueError(
                    f"{path} is of a run with {name} {value}, this one has {now[name]}: give another --out"
                )
        self.lines = saved["lines"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return saved["epoch"]

    def _decisive(self) -> dict[str, Any]:
        """The options that a run must have in common with the one it goes on from."""
        return {name: getattr(self.options, name) for name in DECISIVE}

    def _outputs(self, images: Tensor, model: nn.Module | None = None) -> Tensor:
        images = images.to(self.place.device, memory_format=torch.channels_last, non_blocking=True)
        with torch.autocast(self.place.device.type, torch.bfloat16, enabled=self.options.bf16):
            return (model if model is not None else self.parallel)(images).float()


def load_data(
    options: argparse.Namespace, place: Place, batch: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training batches of this rank, and its part of the validation images."""
    size = options.image_size
    normal = transforms.Normalize(MEAN, DEVIATION)
    augment = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    train = datasets.ImageFolder(
        str(options.data / "train"), transforms.Compose([*augment, transforms.ToTensor(), normal])
    )
    val = datasets.ImageFolder(
        str(options.data / "val"), transforms.Compose([*centre, transforms.ToTensor(), normal])
    )
    options.classes = len(train.classes)
    sampler: DistributedSampler[Any] = DistributedSampler(train, place.ranks, place.rank, seed=options.seed)
    common: dict[str, Any] = {"num_workers": options.workers, "pin_memory": place.device.type == "cuda"}
    mine = Subset(val, range(place.rank, len(val), place.ranks))
    return (
        DataLoader(train, batch, sampler=sampler, drop_last=len(sampler) >= batch, **common),
        DataLoader(mine, batch, **common),
    )


def train(options: argparse.Namespace, place: Place) -> None:
    """Train, prune and convert; what was reached goes to the log in the output folder."""
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options, place)
    run.write_log()
    for epoch in range(run.first_epoch, run.epochs):
        started = time.perf_counter()
        loss = run.train_epoch(epoch)
        pdp_fx.step(run.model)
        top1 = run.accuracy()
        run.note(epoch=epoch + 1, loss=loss, top1=top1, seconds=time.perf_counter() - started)
        run.save(epoch + 1)
        run.write_log()
    small = pdp_fx.convert(run.model)
    report: dict[str, Any] = {"top1": run.accuracy(small), **sizes(small)}
    run.note(converted=report)
    run.write_log()
    if place.rank == 0:
        torch.save(small, options.out / "converted.pt")


def sizes(model: nn.Module) -> dict[str, float]:
    """Weights of convolutions and linear layers, and the share of them that is 0."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    count = sum(weight.numel() for weight in weights)
    return {"weights": count, "sparsity": sum(int((weight == 0).sum()) for weight in weights) / count}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train and prune a network on a folder of images.")
    parser.add_argument("data", type=Path, help="a folder with train/ and val/")
    parser.add_argument("--network", default="resnet18", choices=RECIPES)
    parser.add_argument(
        "--granularity", default="unstructured", help="unstructured, channels, or N:M like 2:4"
    )
    parser.add_argument("--sparsity", type=float, help="of the weights; for channels the share of MACs saved")
    parser.add_argument("--epochs", type=positive, help="instead of the recipe's")
    parser.add_argument("--ramp-start", type=int, help="instead of the recipe's 16")
    parser.add_argument("--ramp-epsilon", type=float, help="instead of the recipe's 0.015")
    parser.add_argument("--batch", type=positive, help="of all processes together; the learning rate follows")
    parser.add_argument("--image-size", type=positive, default=224)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/imagenet"))
    options = parser.parse_args(arguments)
    if options.granularity == "channels" and options.sparsity is None:
        parser.error(
            "--granularity channels: give the share of MACs to save with --sparsity, for the recipe's is "
            "that of single weights; the paper saves 0.549 of ResNet50"
        )
    if ":" in options.granularity and options.sparsity is not None:
        parser.error(f"--sparsity: {options.granularity} says already how many weights stay")
    place = Place.join()
    try:
        train(options, place)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
