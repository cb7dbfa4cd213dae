"""What every test starts from: one thread, a fixed seed, and property tests that repeat themselves."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
