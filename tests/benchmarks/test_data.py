"""The loaders on tiny files of the real formats, and what a batch holds."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.data import (
    Batches,
    DataMissingError,
    Images,
    load_cifar10,
    load_shakespeare,
    load_sst2,
    split_off,
)
from tests.benchmarks.tiny_data import write_cifar10


def test_cifar10_is_read_from_jpeg_archives(tmp_path: Path) -> None:
    write_cifar10(tmp_path, 20, 10)
    train, test = load_cifar10(tmp_path)
    assert train.pixels.shape == (20, 32, 32, 3)
    assert train.pixels.dtype == torch.uint8
    assert len(test) == 10
    torch.testing.assert_close(train.pixels.float().mean((1, 2, 3)), 20.0 + 22 * train.labels, rtol=0, atol=2)


def test_cifar10_is_read_in_its_original_format(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": [3, 4]}))
    train, test = load_cifar10(tmp_path)
    assert len(train) == 10
    assert test.labels.tolist() == [3, 4]
    assert test.pixels[0, 2, 5].tolist() == [pixels[0, 1024 * c + 2 * 32 + 5] for c in range(3)]


def test_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("abca" * 5)
    train, rest, characters = load_shakespeare(tmp_path)
    assert train.tolist() == [0, 1, 2, 0] * 4 + [0, 1]
    assert rest.tolist() == [2, 0]
    assert characters == 3
    (tmp_path / "sst2_dev.tsv").write_text("a fine\tfilm\t1\nnot so\t0\n")
    sentences, labels = load_sst2(tmp_path, "dev")
    assert sentences == ["a fine\tfilm", "not so"]
    assert labels.tolist() == [1, 0]


def test_missing_data_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=r"cifar10_train.npz.xz is missing.*--data.*toronto.edu"):
        load_cifar10(tmp_path)
    with pytest.raises(DataMissingError, match="char-rnn"):
        load_shakespeare(tmp_path)
    with pytest.raises(DataMissingError, match=r"nlp.stanford.edu"):
        load_sst2(tmp_path, "train")


def numbered(count: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.arange(count))


def test_batches_are_crops_and_flips_of_their_images() -> None:
    images = numbered(12)
    batches = Batches(images, 5, seed=0)
    seen: list[int] = []
    flipped = 0
    for pixels, labels in batches.epoch(3):
        assert pixels.shape == (5, 3, 32, 32)
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        for image, label in zip(pixels, labels.tolist(), strict=True):
            raw = image.permute(1, 2, 0) * batches.spread + batches.mean
            found = (raw * 255).round().to(torch.uint8)
            source = torch.nn.functional.pad(images.pixels[label], (0, 0, 4, 4, 4, 4))
            crops = [
                (crop.equal(found), crop.flip(1).equal(found))
                for top in range(9)
                for left in range(9)
                for crop in [source[top : top + 32, left : left + 32]]
            ]
            assert sum(plain or turned for plain, turned in crops) == 1
            flipped += sum(turned for _, turned in crops)
        seen += labels.tolist()
    assert len(seen) == len(set(seen)) == 10
    assert 0 < flipped < 10


def test_an_epoch_is_the_same_for_every_method_and_differs_from_the_next() -> None:
    first, second = (Batches(numbered(12), 4, seed=1) for _ in range(2))
    assert all(
        a[0].equal(b[0]) and a[1].equal(b[1]) for a, b in zip(first.epoch(2), second.epoch(2), strict=True)
    )
    assert not next(first.epoch(2))[0].equal(next(first.epoch(3))[0])
    assert not next(first.epoch(2))[0].equal(next(Batches(numbered(12), 4, seed=2).epoch(2))[0])


def test_plain_batches_cover_everything_in_order() -> None:
    images = numbered(7)
    found = list(Batches(images, 4, seed=0).plain(images, size=3))
    assert torch.cat([labels for _, labels in found]).tolist() == list(range(7))
    assert abs(float(torch.cat([pixels for pixels, _ in found]).mean())) < 1e-4


def test_the_validation_split_is_always_the_same() -> None:
    train, held = split_off(numbered(20), 5)
    again, _ = split_off(numbered(20), 5)
    assert train.labels.equal(again.labels)
    assert sorted([*train.labels.tolist(), *held.labels.tolist()]) == list(range(20))
