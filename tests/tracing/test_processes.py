"""Models that ask whether other processes train with them."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, distributed, nn

from pdp_fx import Channels, PruneSpec, Schedule, convert, prepare, step
from tests.tracing.checks import exact


class Averages(nn.Module):
    """Divides by how many processes there are, and says which it is, where there are others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if distributed.is_available() and distributed.is_initialized():
            x = (x + distributed.get_rank()) / distributed.get_world_size()
        return self.last(x)


@contextmanager
def process_group() -> Generator[None, None, None]:
    store = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_a_model_that_asks_for_other_processes_is_traced_where_they_are() -> None:
    model, x = Averages(), torch.randn(3, 4)
    gm = exact(model, x)
    with process_group():
        with pytest.raises(AssertionError, match="asks whether processes work together"):
            gm.train()(x)
        exact(model, x)


def test_what_was_traced_in_a_process_group_is_used_outside_of_it() -> None:
    x = torch.randn(3, 4)
    with process_group():
        prepared = prepare(Averages(), PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0, length=2)), x)
        step(prepared)
        masked = prepared.eval()(x)
        small = convert(prepared)
    torch.testing.assert_close(small(x), masked)
    with pytest.raises(AssertionError, match="asks whether processes work together"):
        prepared.train()(x)
