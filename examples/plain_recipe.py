"""The plain recipe: prune while training, with checkpoints that a killed run goes on from.

What pruning adds to an ordinary training script are three lines: `prepare` before, `step` after each epoch,
`convert` at the end. The checkpoint needs nothing special: the schedule is part of the model's state.

    python -m examples.plain_recipe --epochs 30 --checkpoint last.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured
from pdp_fx.data import Subset, split_digits


def make_net() -> nn.Module:
    """Images (n, 1, 8, 8) to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data: Subset) -> None:
    """Nothing in here knows of pruning."""
    model.train()
    for part in torch.split(torch.randperm(len(data.labels)), 64):
        loss = functional.cross_entropy(model(data.images[part]), data.labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(model: nn.Module, data: Subset) -> float:
    """Share of images that are classified rightly; a prepared model in eval mode has its hard masks on."""
    model.eval()
    with torch.inference_mode():
        return float((model(data.images).argmax(1) == data.labels).float().mean())


def save(path: Path, **parts: object) -> None:
    """Write to a file beside, then rename: a run that is killed here leaves the last checkpoint whole."""
    torch.save(parts, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prune a small net while it trains.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--ratio", type=float, default=0.9)
    parser.add_argument("--checkpoint", type=Path, default=Path("last.pt"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = split_digits()

    spec = PruneSpec(Unstructured(options.ratio), schedule=Schedule.fit(options.epochs))
    model = pdp_fx.prepare(make_net(), spec, data.train.images[:2])
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    first = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        rate.load_state_dict(saved["rate"])
        torch.set_rng_state(saved["generator"])
        first = saved["epoch"]

    for epoch in range(first, options.epochs):
        train_epoch(model, optimizer, data.train)
        rate.step()
        pdp_fx.step(model)
        save(
            options.checkpoint,
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            rate=rate.state_dict(),
            generator=torch.get_rng_state(),
            epoch=epoch + 1,
        )
        print(f"epoch {epoch + 1}: accuracy {accuracy(model, data.validation):.3f} with hard masks")

    small = pdp_fx.convert(model)
    weights = [parameter for parameter in small.parameters() if parameter.ndim > 1]
    zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    reached = accuracy(small, data.test)
    print(f"converted: accuracy {reached:.3f} on the test set, {zeros:.1%} of the weights are 0")


if __name__ == "__main__":
    main()
