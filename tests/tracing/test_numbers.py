"""Numbers that a model reads from a tensor and computes with: they stay computations in the graph."""

import copy
import io
import itertools
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pdp_fx import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import Around, exact, opaque

_log = logging.getLogger(__name__)

Act = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def longest_of(lengths: Tensor) -> Any:
    return lengths.max().item()


def shortest_of(lengths: Tensor) -> Any:
    return lengths.min().item()


class Reads(nn.Module):
    """A linear layer over tokens, and lengths; what is done with the lengths is up to a function."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.act(self.linear, x, lengths)


def masked(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    longest = longest_of(lengths)
    mask = torch.arange(longest)[None] < lengths[:, None]
    return linear(x[:, :longest]) * mask[..., None]


def cut(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    longest = int(lengths.max())
    return linear(x[:, :longest]) * x.new_ones(longest, 1).cumsum(0)


def pooled(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_zeros(int(lengths.max()) + 1, 4).index_add(0, lengths, linear(x).sum(1))


def scaled(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) / max(float(x.abs().max()), 1e-3) * math.sqrt(lengths.sum().item())


def rounded(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    step = round(x.std().item(), 2) + math.ceil(lengths.float().mean().item() / 2)
    return linear(x) * step + int(x.sum())


def in_new_tensor(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * torch.tensor([longest_of(lengths), 1, 2, float(x.max())])


def in_full(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * torch.full((4,), x.max().item(), dtype=x.dtype)


def of_weights(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * linear.weight.detach().norm().item() + linear.bias.sum().item()


def by_power(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * 0.5 ** shortest_of(lengths)


def of_axis(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x).roll(int(lengths[0]), 1).narrow(1, 0, int(lengths.min()))


def kept(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    linear.scale = longest_of(lengths)
    return linear(x) * getattr(linear, "scale")  # noqa: B009


COMPUTES = (
    masked, cut, pooled, scaled, rounded, in_new_tensor, in_full, of_weights, by_power, of_axis, kept,
)  # fmt: skip


def examples() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [
        (torch.randn(batch, 6, 4), torch.randint(2, 7, (batch,))) for batch in (3, 3, 5, 2) for _ in range(2)
    ]


@pytest.mark.parametrize("act", COMPUTES, ids=lambda act: act.__name__)
def test_what_computes_with_numbers_is_looked_into(act: Act) -> None:
    gm = exact(Reads(act), *examples())
    assert not opaque(gm)


def compared(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    longest = int(lengths.max())
    return linear(x) if longest > 5 else linear(x[:, :longest])


def looped(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return sum((linear(x[:, step]) for step in range(int(lengths.min()))), x.sum(1))


def repeated(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([linear(x)] * shortest_of(lengths), 1)


def picked(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)[longest_of(lengths)]


def by_numpy(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * float(np.sqrt(longest_of(lengths)))


def looked_up(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * {number: number / 2 for number in range(9)}[longest_of(lengths)]


SHARES = [0.25, 0.5]


def coarse(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * SHARES[int(lengths.max()) // 50]


def by_a_float_of_a_list(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * (SHARES[0] * longest_of(lengths))


def by_a_text(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * {"6": 2.0, "7": 3.0}.get("%d" % longest_of(lengths), 1.0)  # noqa: UP031


def by_an_iterator(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * sum(itertools.islice(SHARES, shortest_of(lengths)))


def of_a_slice(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * len(SHARES[: shortest_of(lengths)])


def by_bits(linear: nn.Linear, x: Tensor, lengths: Tensor) -> Tensor:
    return linear(x) * longest_of(lengths).bit_length()


DECIDES = (
    compared, looped, repeated, picked, by_numpy, looked_up, coarse, by_a_float_of_a_list, by_a_text,
    by_an_iterator, of_a_slice, by_bits,
)  # fmt: skip


@pytest.mark.parametrize("act", DECIDES, ids=lambda act: act.__name__)
def test_what_decides_by_numbers_stays_whole(act: Act) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reads(act)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.inner(x, lengths) * 2

    gm = exact(Inner(), *examples())
    assert "number" in opaque(gm)["inner"]


class Counts(nn.Module):
    """Counts its calls in training in a buffer, and goes by the count in a way of its own."""

    steps: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        self.rate = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        if self.way == "anew" and self.training:
            self.steps = torch.tensor(self.steps.item() + 1)
        y, count = self.linear(x), int(self.steps)
        if self.way == "compares":
            return y * 2 if count > 3 else y
        if self.way == "picks":
            return y * (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)[count]
        return y / (count + float(self.rate))


@pytest.mark.parametrize("way", ["counts", "anew"])
def test_numbers_of_buffers_and_parameters_follow_them(way: str) -> None:
    model, x = Counts(way), torch.randn(3, 4)
    gm = exact(copy.deepcopy(model), x, torch.randn(5, 4))
    assert not opaque(gm)
    with torch.no_grad():
        model.rate.fill_(0.5)
        gm.get_parameter("rate").fill_(0.5)
    for _ in range(4):
        assert torch.equal(gm.train()(x), model.train()(x))
    assert torch.equal(gm.eval()(x), model.eval()(x))
    assert gm.get_buffer("steps") == (5 if way == "counts" else 9)


@pytest.mark.parametrize("way", ["compares", "picks"])
def test_what_decides_by_a_count_of_calls_is_refused_or_stays_whole(way: str) -> None:
    with pytest.raises(TraceError, match="number"):
        trace(Counts(way), torch.randn(3, 4))
    model, x = nn.Sequential(nn.Linear(4, 4), Counts(way)), torch.randn(3, 4)
    gm = exact(model, x)
    assert list(opaque(gm)) == ["1"]


TOLD: dict[str, Callable[[Tensor, int], Tensor]] = {
    "method": lambda x, axis: x.softmax(axis),
    "by name": lambda x, axis: torch.sum(x, dim=axis, keepdim=True),
    "of Python": lambda x, axis: functional.normalize(x, 2.0, axis),
    "one of several": lambda x, axis: x.flip(0, axis),
    "in a tuple": lambda x, axis: torch.roll(x, (1, 1), (0, axis)),
    "joined": lambda x, axis: torch.cat([x, x], axis),
    "padded": lambda x, filling: functional.pad(x, (0, 1), value=filling),
    "filled": lambda x, filling: x.index_fill(1, torch.tensor([0]), filling),
    "scattered": lambda x, filling: x.scatter(1, torch.zeros(1, 1, 4, dtype=torch.long), filling),
}


@pytest.mark.parametrize("way", TOLD)
def test_a_number_that_picks_an_axis_or_fills_keeps_its_module_whole(way: str) -> None:
    class Along(nn.Module):
        def forward(self, x: Tensor, axis: Tensor) -> Tensor:
            return TOLD[way](x, int(axis.max()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.along = nn.Linear(4, 4), Along()

        def forward(self, x: Tensor, axis: Tensor) -> Tensor:
            return self.along(self.linear(x), axis) * 2

    x = torch.randn(3, 5, 4)
    gm = exact(Model(), (x, torch.tensor([1, 0])), (x, torch.tensor([2, 0])))
    assert "picks an axis or a filling by a number in a tensor" in opaque(gm)["along"]


def test_a_number_drawn_at_random_is_made_no_whole_number() -> None:
    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.rand(1).item()
            return x * int(3 * drawn)

    gm = exact(Around(Skips()), torch.randn(3, 4))
    assert "uses the numbers in a tensor" in opaque(gm)["inner"]


class Leaves(nn.Module):
    """Leaves a number in an attribute, where the model finds it, before or after it is anew."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.part, self.before = nn.Linear(4, 4), before
        self.number: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        if self.before:
            y = y * self.number
        self.number = x.abs().max().item()
        return y if self.before else y * self.number


def test_a_number_that_is_left_for_the_next_call_keeps_its_module_whole() -> None:
    gm = exact(Around(Leaves(before=False)), torch.randn(3, 4), torch.randn(3, 4))
    assert not opaque(gm)
    with pytest.raises(Exception, match="next call|keeps|state"):
        trace(Leaves(before=True), torch.randn(3, 4))


class Says(nn.Module):
    """Makes a text of what it computes; what is done with the text is up to a function."""

    def __init__(self, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x, self.linear(x))


def by_its_format(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if f"{x.max():.0f}" == "7" else y


def by_its_name(x: Tensor, y: Tensor) -> Tensor:
    said = str(x.max())
    return y * 2 if "7." in said else y


def by_a_message_and_more(x: Tensor, y: Tensor) -> Tensor:
    said = f"{x.max():.0f}"
    _log.info(said)
    return y * 2 if said == "7" else y


def by_what_another_function_reads(x: Tensor, y: Tensor) -> Tensor:
    said = f"{0}"

    def say() -> None:
        nonlocal said
        said = f"{x.max():.0f}"

    say()
    return y * 2 if said == "7" else y


def by_what_it_has_written(x: Tensor, y: Tensor) -> Tensor:
    page = io.StringIO()
    page.write(f"{x.max():.0f}")
    return y * 2 if page.getvalue() == "7" else y


@pytest.mark.parametrize(
    "act",
    [
        *(by_its_format, by_its_name, by_a_message_and_more),
        *(by_what_another_function_reads, by_what_it_has_written),
    ],
)
def test_what_goes_by_a_text_of_the_numbers_in_a_tensor_stays_whole(act: Any) -> None:
    gm = exact(Around(Says(act)), torch.randn(2, 4), torch.full((2, 4), 7.0))
    (reason,) = opaque(gm).values()
    assert "makes a text of the numbers in a tensor" in reason


def printed(x: Tensor, y: Tensor) -> Tensor:
    sys.stdout.write(f"{x.max():.2f}")
    _log.info("%s, %s", x, str(y))
    return y


def kept_for_a_message(x: Tensor, y: Tensor) -> Tensor:
    said = f"{x.max():.2f} of {y}"
    if len(x) > 100:
        raise ValueError(said)
    _log.info(said)
    return y


@pytest.mark.parametrize("act", [printed, kept_for_a_message])
def test_messages_hold_no_part_whole(act: Any) -> None:
    assert not opaque(exact(Around(Says(act)), torch.randn(2, 4)))
