"""A plain training loop: nothing in it is special to pruning."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from pdp_fx.data import Subset


@dataclass(frozen=True)
class Recipe:
    """How every variant is trained."""

    epochs: int = 24
    batch_size: int = 64
    learning_rate: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 1e-3


def train(
    model: nn.Module,
    data: Subset,
    recipe: Recipe,
    seed: int,
    title: str,
    after_epoch: Callable[[], None] = lambda: None,
) -> None:
    """Train in place with SGD under a one-cycle learning rate, and leave the model in eval mode.

    `after_epoch` is called once after each epoch: the place for `pdp_fx.step(model)`.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = -(-len(data.labels) // recipe.batch_size)
    optimizer = torch.optim.SGD(
        model.parameters(),
        recipe.learning_rate,
        recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, epochs=recipe.epochs, steps_per_epoch=steps
    )
    model.train()
    with tqdm(total=recipe.epochs, desc=title, unit="epoch", leave=False) as progress:
        for _ in range(recipe.epochs):
            total = 0.0
            order = torch.randperm(len(data.labels), generator=generator)
            for batch in torch.split(order, recipe.batch_size):
                loss = F.cross_entropy(model(data.images[batch]), data.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                total += loss.item()
            after_epoch()
            progress.update()
            progress.set_postfix(loss=f"{total / steps:.3f}")
    model.eval()


def accuracy(model: nn.Module, data: Subset) -> float:
    """Return the share of images that the model, in the mode it is in, classifies rightly."""
    with torch.inference_mode():
        return int((model(data.images).argmax(1) == data.labels).sum()) / len(data.labels)
