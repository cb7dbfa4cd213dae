"""Pruning with self-distillation, as the paper prunes BERT: the teacher is the dense model itself.

The model is trained dense for a while; its best epoch becomes the teacher. Then the same model goes on, now
pruned, with 0.95 of its loss from the teacher's logits and 0.05 from the labels.

    python -m examples.distillation --dense-epochs 12 --epochs 30
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured
from pdp_fx.data import Digits, Subset, split_digits

FROM_TEACHER = 0.95


def make_net() -> nn.Module:
    """Images (n, 1, 8, 8) to logits (n, 10)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)
    )


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """A weighted sum of the distance to the teacher's predictions and of the loss on the labels."""
    distance = functional.kl_div(
        student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True
    )
    return FROM_TEACHER * distance + (1 - FROM_TEACHER) * functional.cross_entropy(student, labels)


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Subset, teacher: nn.Module | None = None
) -> None:
    """Train on the labels, or on the teacher and the labels."""
    model.train()
    for part in torch.split(torch.randperm(len(data.labels)), 64):
        images, labels = data.images[part], data.labels[part]
        outputs = model(images)
        if teacher is None:
            loss = functional.cross_entropy(outputs, labels)
        else:
            with torch.no_grad():
                wanted = teacher(images)
            loss = distillation_loss(outputs, wanted, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(model: nn.Module, data: Subset) -> float:
    """Share of images that are classified rightly."""
    model.eval()
    with torch.inference_mode():
        return float((model(data.images).argmax(1) == data.labels).float().mean())


def train_teacher(net: nn.Module, data: Digits, epochs: int) -> nn.Module:
    """Train the dense model, and return a copy of it at its best epoch."""
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    best, teacher = -1.0, net
    for _ in range(epochs):
        train_epoch(net, optimizer, data.train)
        reached = accuracy(net, data.validation)
        if reached > best:
            best, teacher = reached, copy.deepcopy(net)
    return teacher.eval().requires_grad_(False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prune a small net with its dense self as the teacher.")
    parser.add_argument("--dense-epochs", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--ratio", type=float, default=0.9)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = split_digits()
    net = make_net()
    teacher = train_teacher(net, data, options.dense_epochs)
    print(f"teacher: accuracy {accuracy(teacher, data.test):.3f} on the test set")

    # As in the paper's BERT, the last layer stays dense; there the embeddings do too.
    schedule = Schedule.fit(options.epochs, start=0.0)
    spec = PruneSpec(Unstructured(options.ratio), {"5": None}, schedule, tau="rel:0.1")
    student = pdp_fx.prepare(net, spec, data.train.images[:2])
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for _ in range(options.epochs):
        train_epoch(student, optimizer, data.train, teacher)
        rate.step()
        pdp_fx.step(student)
    small = pdp_fx.convert(student)
    zeros = sum(int((parameter == 0).sum()) for parameter in small.parameters() if parameter.ndim > 1)
    print(f"student: accuracy {accuracy(small, data.test):.3f} on the test set with {zeros} weights at 0")


if __name__ == "__main__":
    main()
