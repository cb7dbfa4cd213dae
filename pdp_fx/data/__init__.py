"""The handwritten digits that ship in the wheel; README.md beside this file names source and licence."""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

BRIGHTEST = 16


@dataclass(frozen=True)
class Subset:
    """Images, float32 (n, 1, 8, 8) in [0, 1], and their labels, int64 (n,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Digits:
    """Three disjoint subsets that together are the whole data set."""

    train: Subset
    validation: Subset
    test: Subset


def load_digits() -> tuple[Tensor, Tensor]:
    """Return all images, float32 (1797, 1, 8, 8) in [0, 1], and all labels, int64 (1797,)."""
    with files(__name__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).unsqueeze(1).to(torch.float32) / BRIGHTEST
        labels = torch.from_numpy(arrays["labels"]).to(torch.int64)
    return images, labels


def split_digits(seed: int = 0, validation_share: float = 0.1, test_share: float = 0.25) -> Digits:
    """Split the digits into train, validation and test, each class in the same shares.

    Raises:
        ValueError: if the shares are negative or leave nothing to train on.
    """
    if min(validation_share, test_share) < 0 or validation_share + test_share >= 1:
        raise ValueError(
            "shares must be at least 0 and sum to less than 1, "
            f"got validation_share={validation_share} and test_share={test_share}"
        )
    images, labels = load_digits()
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in range(int(labels.max()) + 1):
        members = torch.nonzero(labels == label).squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        held_out = [round(share * len(members)) for share in (validation_share, test_share)]
        sizes = [len(members) - sum(held_out), *held_out]
        for part, chosen in zip(parts, torch.split(members, sizes), strict=True):
            part.append(chosen)
    train, validation, test = (torch.cat(part).sort().values for part in parts)
    return Digits(*(Subset(images[index], labels[index]) for index in (train, validation, test)))
