"""Other threads beside the one that traces: those of the model, and those that have nothing to do with it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from pdp_fx import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import Around, exact, opaque


class Branches(nn.Module):
    """Two branches, each of which another thread computes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(self.branch, (self.left, self.right), (x, x))
        return left + right

    def branch(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """What one thread does."""
        return layer(x)


class ByFunctions(Branches):
    def branch(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return torch.relu(x @ layer.weight)


class Scaled(Branches):
    """Another thread sees no weight."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return self.left(x) * pool.submit(torch.tanh, x).result()


FOUND = [0]


class Leaves(Scaled):
    """Another thread leaves a number."""

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.note, args=(x,))
        thread.start()
        thread.join()
        return self.left(x) * FOUND[0]

    def note(self, x: Tensor) -> None:
        FOUND[0] = int((x > 0).sum())


class LeavesByPool(Leaves):
    """One of a pool that was there before leaves it."""

    pool = ThreadPoolExecutor(1)

    def forward(self, x: Tensor) -> Tensor:
        self.pool.submit(self.note, x).result()
        return self.left(x) * FOUND[0]


class LeavesSize(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: FOUND[0]]

    def note(self, x: Tensor) -> None:
        FOUND[0] = len(x)


@pytest.mark.parametrize("kind", [Branches, ByFunctions, Scaled, Leaves, LeavesByPool])
def test_what_another_thread_computes_does_not_become_a_constant(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"the thread that calls the model"):
        trace(kind(), torch.randn(3, 4))


@pytest.mark.parametrize("kind", [Branches, ByFunctions, Scaled])
def test_a_part_that_computes_in_other_threads_is_kept_whole(kind: type[nn.Module]) -> None:
    kept = opaque(exact(Around(kind()), torch.randn(3, 4), torch.randn(5, 4)))
    assert "the thread that calls the model" in kept["inner"]


def test_a_size_that_another_thread_leaves_is_insisted_on() -> None:
    model = LeavesSize()
    gm = exact(model, torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(AssertionError, match="holds for a batch of 3 only"):
        gm(torch.randn(5, 4))


class Table(Branches):
    """Another thread makes a table that depends on nothing."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return self.left(x) * pool.submit(torch.arange, 4).result()


def test_a_table_that_another_thread_makes_may_become_one() -> None:
    model, x = Table(), torch.randn(3, 4)
    assert trace(model, x)(2 * x).equal(model(2 * x))


class Beside(nn.Module):
    """Something else happens while the model runs."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), other

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        thread = threading.Thread(target=self.other)
        thread.start()
        thread.join()
        return torch.relu(x)


def test_what_other_threads_do_is_no_part_of_a_graph_and_is_not_refused() -> None:
    dense, rows, done = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), torch.randn(2, 4), list[Tensor]()

    def evaluate() -> None:
        with torch.inference_mode(), torch.autocast("cpu"):
            done.append(dense(rows))
        with torch.no_grad(), torch.enable_grad():
            done.append(dense(rows))

    gm = trace(Beside(evaluate), torch.randn(3, 4))
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_module", "call_function", "output"]
    assert done[0].dtype == torch.bfloat16
    assert done[1].equal(dense(rows))
