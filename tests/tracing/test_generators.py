"""Random numbers from generators of the model's own."""

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.nets import at_once
from tests.tracing.checks import Around, exact, opaque

SHARED = random.Random(3)
"""What this file's own code draws from, as a library may."""


class Draws(nn.Module):
    """Scales by a random number in training mode, or in both."""

    def __init__(self, held: Any, always: bool) -> None:
        super().__init__()
        self.held, self.always = held, always

    def draw(self) -> float:
        return self.held.random()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.full((1,), self.draw()) if self.training or self.always else x


class DrawsInside(Draws):
    """The generator is in a list of objects."""

    def draw(self) -> float:
        return self.held[0].random_sample()


class DrawsFromGlobal(Draws):
    """The generator is a global variable."""

    def draw(self) -> float:
        return SHARED.random()


class Source:
    """An object that draws when it is called."""

    def __init__(self) -> None:
        self.bits = np.random.Generator(np.random.Philox(3))

    def __call__(self) -> float:
        return self.bits.random()


class DrawsByCall(Draws):
    """What draws is called."""

    def draw(self) -> float:
        return self.held()


def drawing(kind: str, always: bool) -> Draws:
    return {
        "python": lambda: Draws(random.Random(3), always),
        "numpy": lambda: Draws(np.random.default_rng(3), always),
        "older numpy": lambda: DrawsInside([np.random.RandomState(3)], always),
        "global": lambda: DrawsFromGlobal(None, always),
        "called": lambda: DrawsByCall(Source(), always),
        "bound": lambda: DrawsByCall(random.Random(3).random, always),
    }[kind]()


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("kind", ["python", "numpy", "older numpy", "global", "called", "bound"])
def test_what_draws_from_a_generator_of_its_own_stays_whole(kind: str, always: bool) -> None:
    model = Around(drawing(kind, always))
    expected = drawing(kind, always)
    SHARED.seed(3)
    wanted = [expected.draw() for _ in range(3)]
    SHARED.seed(3)
    gm, x = trace(model, torch.randn(2, 4)), torch.randn(2, 4)
    assert opaque(gm)["inner"]
    # Tracing has drawn nothing, and every call draws anew.
    for number in wanted:
        assert torch.equal(gm.train()(x), model.after(model.before(x) * torch.tensor([number])))
    with pytest.raises(TraceError, match="random numbers"):
        trace(drawing(kind, always), torch.randn(2, 4))


class Noise(nn.Module):
    """Scales by numbers from a generator of torch of its own."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.source, self.always = torch.Generator().manual_seed(3), always

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        if not (self.training or self.always):
            return x
        return x * torch.rand(2, 1, generator=self.source) + torch.rand(2, 1, generator=self.source)


@pytest.mark.parametrize("always", [False, True])
def test_numbers_of_a_generator_of_torch_are_drawn_in_the_graph(always: bool) -> None:
    model, source = Around(Noise(always)), torch.Generator().manual_seed(3)
    gm = trace(model, torch.randn(2, 4))
    assert not opaque(gm) or not always
    x = torch.randn(2, 4)
    for _ in range(3):
        scale, shift = (torch.rand(2, 1, generator=source) for _ in range(2))
        assert torch.equal(gm.train()(x), model.after(model.before(x).relu() * scale + shift))


def test_a_generator_that_the_model_does_not_hold_is_no_part_of_a_graph() -> None:
    class Seeded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(4, generator=torch.Generator().manual_seed(3))

    exact(Around(Seeded()), torch.randn(2, 4))


def test_channels_around_random_numbers_go() -> None:
    model, x = Around(Noise(always=True)).double(), torch.randn(2, 4, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(0.5), schedule=pdp_fx.Schedule(0, 1.0)), x)
    pdp_fx.step(prepared)
    # Both models draw the same when convert compares them.
    converted = pdp_fx.convert(prepared)
    assert converted.get_parameter("before.weight").shape == (2, 4)


class Missing:
    """Stands for a library that is not installed, and says so whatever it is asked for."""

    def __getattr__(self, name: str) -> None:
        raise ImportError(f"no library with {name}")


LIBRARY: Any = None


def test_globals_that_answer_no_question_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LIBRARY", Missing())

    class MayUse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.ndim == 2 else LIBRARY.layer(x)

    exact(MayUse(), torch.randn(3, 4))


def test_generators_of_devices_that_are_not_in_use_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would seed them once they are, long after `prepare` has ended."""

    def seeds(number: int) -> None:
        pytest.fail(f"seeds CUDA devices with {number}")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    prepared = pdp_fx.prepare(model, at_once(Channels(0.5)), torch.randn(2, 4))
    pdp_fx.step(prepared)
    pdp_fx.convert(prepared)


class Seeds(nn.Module):
    """Draws the same noise in each call, in one of two ways."""

    def __init__(self, forks: bool) -> None:
        super().__init__()
        self.forks = forks

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng() if self.forks else nullcontext():
            torch.manual_seed(0)
            return x + torch.rand(4)


@pytest.mark.parametrize("forks", [False, True])
def test_what_seeds_the_random_numbers_stays_whole(forks: bool) -> None:
    gm = exact(Around(Seeds(forks)), torch.randn(3, 4))
    assert list(opaque(gm)) == ["inner"]
    assert opaque(gm)["inner"].startswith(
        "seeds the random numbers of torch (manual_seed) (test_generators.py:"
    )
    with pytest.raises(TraceError, match=r"it seeds the random numbers of torch \(manual_seed\)"):
        trace(Seeds(forks), torch.randn(3, 4))
