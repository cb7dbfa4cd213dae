"""CIFAR-10, tiny Shakespeare and SST-2 from a folder, and batches of images that are cropped and flipped.

Nothing is downloaded: a loader that finds no file says what it looked for and where it comes from.
"""

from __future__ import annotations

import io
import lzma
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

PAD = 4

CIFAR10_SOURCE = (
    "CIFAR-10 (Krizhevsky, 2009) comes from https://www.cs.toronto.edu/~kriz/cifar.html: unpack "
    "cifar-10-python.tar.gz there, which makes a folder cifar-10-batches-py. A folder with "
    "cifar10_train.npz.xz and cifar10_test.npz.xz (arrays jpeg, offsets, labels, classes) works, too"
)
SHAKESPEARE_SOURCE = (
    "tiny Shakespeare is one text file of 1.1 million characters, input.txt of "
    "https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare: save it as tinyshakespeare.txt"
)
SST2_SOURCE = (
    "SST-2 (Socher et al., 2013) comes from https://nlp.stanford.edu/sentiment: one line for each sentence, "
    "a tab, and its label 0 or 1"
)


class DataMissingError(FileNotFoundError):
    """A file of a data set is not there; the message says where to get it."""


@dataclass(frozen=True)
class Images:
    """Images in memory.

    Attributes:
        pixels: uint8, shape (n, 32, 32, 3).
        labels: int64, shape (n,).
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, places: slice | Tensor) -> Images:
        return Images(self.pixels[places], self.labels[places])

    def to(self, device: str) -> Images:
        """The same images on a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


def load_cifar10(folder: Path) -> tuple[Images, Images]:
    """The training and the test images.

    Raises:
        DataMissingError: the folder has them in neither form.
    """
    batches = folder / "cifar-10-batches-py"
    if batches.is_dir():
        train = [_batch(batches / f"data_batch_{number}") for number in range(1, 6)]
        return _joined(train), _batch(batches / "test_batch")
    names = ("cifar10_train.npz.xz", "cifar10_test.npz.xz")
    for name in names:
        _need(folder / name, CIFAR10_SOURCE)
    return _archive(folder / names[0]), _archive(folder / names[1])


def load_shakespeare(folder: Path) -> tuple[Tensor, Tensor, int]:
    """The first nine tenths and the rest as character ids, int64, and the number of characters."""
    text = _need(folder / "tinyshakespeare.txt", SHAKESPEARE_SOURCE).read_text(encoding="utf-8")
    characters = {character: place for place, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([characters[character] for character in text])
    split = len(ids) * 9 // 10
    return ids[:split], ids[split:], len(characters)


def load_sst2(folder: Path, part: str) -> tuple[list[str], Tensor]:
    """The sentences of a part ("train", "dev" or "test") and their labels, int64."""
    lines = _need(folder / f"sst2_{part}.tsv", SST2_SOURCE).read_text(encoding="utf-8").splitlines()
    rows = [line.rsplit("\t", 1) for line in lines if line]
    return [sentence for sentence, _ in rows], torch.tensor([int(label) for _, label in rows])


def _need(path: Path, source: str) -> Path:
    if path.exists():
        return path
    raise DataMissingError(f"{path} is missing; give its folder with --data. {source}.")


def _archive(path: Path) -> Images:
    """Images from one array of JPEG files."""
    with lzma.open(path) as stream:
        arrays = np.load(stream)
        jpeg, ends = arrays["jpeg"].tobytes(), arrays["offsets"].tolist()
        labels = torch.from_numpy(arrays["labels"]).long()
    files = (io.BytesIO(jpeg[first:last]) for first, last in zip(ends, ends[1:], strict=False))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    return Images(torch.from_numpy(pixels), labels)


def _batch(path: Path) -> Images:
    """Images in the original format."""
    with _need(path, CIFAR10_SOURCE).open("rb") as stream:
        found: dict[bytes, Any] = pickle.load(stream, encoding="bytes")
    pixels = torch.from_numpy(np.array(found[b"data"])).view(-1, 3, 32, 32).permute(0, 2, 3, 1)
    return Images(pixels.contiguous(), torch.tensor(found[b"labels"]))


def _joined(parts: list[Images]) -> Images:
    return Images(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


class Rows(Protocol):
    """Examples that can be chosen by their places."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: Tensor, /) -> Self: ...


AnyRows = TypeVar("AnyRows", bound=Rows)


def split_off(data: AnyRows, count: int) -> tuple[AnyRows, AnyRows]:
    """All but ``count`` examples, and those: the same ones whenever it is called, at random places."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(count))
    return data[order[count:].sort().values], data[order[:count].sort().values]


class Batches:
    """Shuffled, cropped and flipped batches of training images, and plain ones of others.

    What a batch holds depends on the seed and the epoch only, so that all methods see the same.

    Args:
        train: the training images, on the device of the training.
        size: images in a batch; an incomplete last one is left out.
        seed: of the order and the changes.
    """

    def __init__(self, train: Images, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.labels = train.labels
        values = train.pixels.float() / 255
        self.mean = values.mean((0, 1, 2))
        self.spread = values.std((0, 1, 2))
        self.padded = torch.nn.functional.pad(train.pixels, (0, 0, PAD, PAD, PAD, PAD))

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch: images (n, 3, 32, 32) in channels_last, and labels."""
        device = self.labels.device
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.labels), generator=generator).to(device)
        shifts = torch.randint(0, 2 * PAD + 1, (2, len(order)), generator=generator).to(device)
        flips = torch.randint(0, 2, (len(order),), generator=generator).bool().to(device)
        for first in range(0, len(self) * self.size, self.size):
            here = slice(first, first + self.size)
            yield self._changed(order[here], shifts[:, here], flips[here]), self.labels[order[here]]

    def plain(self, images: Images, size: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
        """All of ``images`` unchanged, in order."""
        for first in range(0, len(images), size):
            part = images[first : first + size]
            yield self._scaled(part.pixels), part.labels

    def _changed(self, places: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
        span = torch.arange(32, device=places.device)
        columns = torch.where(flips[:, None], span.flip(0), span) + shifts[1][:, None]
        rows = span + shifts[0][:, None]
        return self._scaled(self.padded[places[:, None, None], rows[:, :, None], columns[:, None, :]])

    def _scaled(self, pixels: Tensor) -> Tensor:
        return ((pixels.float() / 255 - self.mean) / self.spread).permute(0, 3, 1, 2)
