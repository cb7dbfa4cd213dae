import hashlib
from importlib.resources import files

import numpy as np
import pytest
import torch

from pdp_fx.data import Subset, load_digits, split_digits


def test_the_digits_are_all_there_and_scaled() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_bytes_are_those_the_readme_names() -> None:
    folder = files("pdp_fx.data")
    with folder.joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        found = hashlib.sha256(arrays["images"].tobytes() + arrays["labels"].tobytes()).hexdigest()
    assert found in folder.joinpath("README.md").read_text()


def sorted_rows(*parts: Subset) -> np.ndarray:
    rows = [torch.cat([part.images.flatten(1), part.labels.unsqueeze(1)], dim=1) for part in parts]
    return np.unique(torch.cat(rows).numpy(), axis=0)


def test_a_split_is_a_stratified_partition() -> None:
    digits = split_digits()
    parts = (digits.train, digits.validation, digits.test)
    assert [len(part.labels) for part in parts] == [1168, 179, 450]
    assert all(part.labels.bincount().max() - part.labels.bincount().min() <= 6 for part in parts)
    assert np.array_equal(sorted_rows(*parts), sorted_rows(Subset(*load_digits())))


def test_a_split_depends_on_its_seed_alone() -> None:
    assert torch.equal(split_digits(seed=1).test.images, split_digits(seed=1).test.images)
    assert not torch.equal(split_digits(seed=1).test.images, split_digits(seed=2).test.images)


def test_shares_that_leave_nothing_to_train_on_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got validation_share=0\.5 and test_share=0\.5"):
        split_digits(validation_share=0.5, test_share=0.5)
