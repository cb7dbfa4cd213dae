import copy
import pickle
from collections.abc import Callable
from math import log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx.trace import trace
from tests.nets import at_once, difference, pruned
from tests.tracing.checks import exact


def windows_to_image(windows: Tensor, size: int, height: int, width: int) -> Tensor:
    """As in Swin."""
    batch = int(windows.shape[0] / (height * width / size / size))
    x = windows.view(batch, height // size, width // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(batch, int(height), width, -1)


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        assert isinstance(h, int)
        assert not issubclass(float, int)
        windows = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, 2, c)
        return windows_to_image(self.linear(windows), int("2"), h, w)


def test_a_size_that_is_cast_to_int_stays_a_computation() -> None:
    exact(Windowed(), torch.randn(1, 4, 4, 4), torch.randn(3, 6, 4, 4))
    assert "int" not in globals()


def test_the_graph_that_casts_is_a_graph_like_others() -> None:
    model, x = Windowed(), torch.randn(3, 6, 4, 4)
    gm = trace(model, torch.randn(1, 4, 4, 4))
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), torch.compile(gm, fullgraph=True)):
        assert torch.allclose(other(x), model(x), atol=1e-6)


def test_code_that_needs_the_type_itself_is_traced_as_it_is() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows = int(x.shape[0] / 1)
            return self.linear(x) * (2 if type(rows) is int else 0) + rows

    exact(Asks(), torch.randn(2, 4))


@pytest.mark.parametrize(
    "scale",
    [
        lambda size: 2 * sqrt(size),
        lambda size: sqrt(size / 2),
        lambda size: log(size) / 2,
        lambda size: log(size / 2),
    ],
)
def test_functions_of_numbers_that_a_file_imports_are_followed(scale: Callable[[Any], float]) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * scale(x.shape[1])

    exact(Scales(), torch.randn(2, 6, 4), torch.randn(3, 9, 4))
    assert type(sqrt) is type(len)


class Loops(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.cell = nn.Linear(4, 4), nn.GRUCell(4, 4)
        self.how = how

    def parts(self, x: Tensor) -> Any:
        if self.how == "range":
            return [x[:, place] for place in range(x.shape[1])]
        if self.how == "split":
            return [part.squeeze(1) for part in x.split(1, dim=1)]
        return x.unbind(1) if self.how == "unbind" else list(x.transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        state = torch.zeros_like(x[:, 0])
        for part in self.parts(x):
            state = self.cell(part, state)
        return state


@pytest.mark.parametrize("how", ["range", "split", "unbind", "iterate"])
def test_a_loop_over_a_size_fails_for_another_size_rather_than_to_leave_out_the_rest(how: str) -> None:
    gm = exact(Loops(how), torch.randn(2, 3, 4), torch.randn(5, 3, 4))
    for length in (5, 2):
        with pytest.raises(AssertionError, match=r"test_casts.py:\d+ goes up to 3 in this graph"):
            gm(torch.randn(2, length, 4))


class InParts(nn.Module):
    """Works on so many rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x[:, start : start + 4]) for start in range(1, x.shape[1], 4)], dim=1)


def test_a_loop_with_long_steps_is_held_to_their_number_only() -> None:
    gm = exact(InParts(), torch.randn(2, 7, 4), torch.randn(3, 6, 4), torch.randn(2, 9, 4))
    for rows in (5, 10):
        with pytest.raises(AssertionError, match=r"test_casts.py:\d+ goes up to 2 in this graph"):
            gm(torch.randn(2, rows, 4))


def test_parts_that_python_counts_by_itself_are_not_checked() -> None:
    class Unpacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.linear(x).unflatten(-1, (3, 2)).unbind(-2)
            return q * k + v + x.split(2, dim=-1)[0]

    gm = exact(Unpacks(), torch.randn(2, 4))
    assert not [node for node in gm.graph.nodes if node.target is torch._assert]


def test_a_loop_over_channels_lets_them_go() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x).relu()
            return self.down(x) + sum(1 for _ in range(x.shape[1]))

    model, x = Counts().double(), torch.randn(2, 4, dtype=torch.float64)
    prepared = pruned(model, at_once(pdp_fx.Channels(ratio=0.5)), x).eval()
    converted = pdp_fx.convert(prepared)
    assert converted.get_parameter("up.weight").shape == (4, 4)
    assert difference(prepared, converted, x) < 1e-12
    assert len(list(converted.graph.nodes)) == 6
