"""Layers that a model skips at random while it trains."""

import copy
import pickle
import random
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.spec import Rule
from pdp_fx.tracing.skipping import kept_unless
from pdp_fx.tracing.structure import tensors
from tests.nets import at_once, difference, pruned
from tests.tracing.checks import exact, opaque
from tests.training.nets import RULES

SEEDS = range(12)


class Layer(nn.Module):
    """A layer that draws random numbers itself and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.narrow(self.wide(x).relu())))


class Skips(nn.Module):
    """Skips layers in the way that one of its methods has it."""

    count: Tensor

    def __init__(self, step: str, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("count", torch.zeros(1))
        self.step = getattr(self, step)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        self.last, self.left = False, 0
        seen = [x]
        for place, layer in enumerate(self.layers):
            x = self.step(layer, x, place)
            seen.append(x)
        return (self.head(x), seen) if self.step == self.listed else self.head(x)

    def dropped(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            return x
        return layer(x)

    def measured(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return x if self.training and torch.rand([]) < 0.4 else self.of_width(layer, x)

    def of_width(self, layer: nn.Module, x: Tensor) -> Tensor:
        if x.shape[-1] != 4:
            raise ValueError("made for four channels")
        return layer(x)

    def survives(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return layer(x) if not self.training or torch.rand(1, device=x.device) < 0.6 else x

    def rarer_with_depth(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        skipped = False
        if self.training:
            skipped = torch.bernoulli(torch.tensor(0.2 * (place + 1))).bool()
        if not skipped:
            x = layer(x)
        return x * 2 if skipped else x * 2

    def in_place(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if not (self.training and torch.rand(2)[1] < 0.4):
            x = layer(x)
            x *= 2
        return x.add_(1)

    def by_python(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return x if self.training and random.random() < 0.4 else layer(x)

    def by_numpy(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if not self.training or np.random.rand() > 0.4:
            x = layer(x)
        return x

    def by_name_in_both_modes(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        rate = 0.4 * (place + 1) / 3
        number = uniform(0, 1)
        return x if self.training and number < rate else layer(x)

    def by_both(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and np.random.uniform() < 0.4:
            return x
        return x.tanh() if self.training and torch.rand([]) < 0.4 else layer(x)

    def without_a_module(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            return x
        y = torch.relu(x) if x.shape[1] > 2 else x
        return y.flip(0) + x.shape[1]

    def by_an_index(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return self.layers[int(random.random() * 2)](x) if self.training else layer(x)

    def by_a_choice(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return x if self.training and random.choice([True, False]) else layer(x)

    def of_several(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        drawn = np.random.uniform(np.zeros(2), 1.0)
        return x if self.training and drawn[0] < 0.4 else layer(x)

    def drawn_before(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        noise = random.gauss(0, 1)
        return x if self.training and random.random() + noise < 0.4 else layer(x)

    def listed(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return self.dropped(layer, x, place)

    def either(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            return x.tanh()
        return layer(x)

    def twice(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if not self.training or torch.rand([]) > 0.4:
            x = layer(x)
        return x if self.training and torch.rand([]) < 0.4 else x.tanh()

    def inside_another(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            return x
        return x if self.training and torch.rand([]) < 0.4 else layer(x)

    def by_data(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return x if self.training and torch.rand([]) < x.mean() else layer(x)

    def by_a_weight(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return x if self.training and torch.rand([]) < self.stem.bias[0] else layer(x)

    def recomputed(self, layer: nn.Module, x: Tensor, place: int) -> Any:
        if self.training and torch.rand([]) < 0.4:
            return x
        return checkpoint(layer, x, use_reentrant=False)

    def counted(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            self.stem.bias.data.mul_(1.0)
            self.count += 1
        return layer(x)

    def never_two(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        self.last = bool(self.training and place and not self.last and torch.rand([]) < 0.4)
        return x if self.last else layer(x)

    def not_all(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        self.left = self.left + 1 if place else 0
        if self.training and torch.rand([]) < 0.4 and self.left < 2:
            return x
        self.left -= 1
        return layer(x)

    def drawn_always(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        noise = torch.rand([])
        return x if self.training and noise < 0.4 else layer(x)

    def by_chance_again(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        while self.training and torch.rand([]) < 0.4:
            x = layer(x)
        return layer(x)

    def refuses(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            self.left += 1
            if self.left > 2:
                raise ValueError("skips too much")
            return x
        return layer(x)

    def before_the_branch(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        skipped = torch.rand([]) < 0.4 if self.training else False
        y = self.layers[place].get_submodule("drop")(x)
        return x if skipped else layer(y)

    def checked(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training:
            noise = torch.rand([])
            assert noise.lt(2)
            if noise < 0.4:
                return x
        return layer(x)

    def checked_inside(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        y = z = x
        if not (self.training and torch.rand([]) < 0.4):
            y = z = layer(x)
            if y.shape[0] > 2:
                z = y * 1.5
        return z * 2 if y.shape[0] > 2 else z

    def unless_it_trains(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if random.random() > 0.4 or not self.training:
            return layer(x)
        return x

    def in_both_modes(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return x if torch.rand([]) < 0.4 else layer(x)

    def of_two_ways(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if torch.rand(1).item() < 0.4:
            y = x.clone()
            y.mul_(0.5)
        else:
            y = layer(x)
        return y

    def of_two_in_each_mode(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if torch.rand(1) < 0.4:
            return x.sigmoid()
        return layer(x) if self.training else x.tanh()

    def with_others_in_training(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and random.random() < 0.4:
            y = x.sigmoid().flip(0)
            return y * layer(x)
        return x.tanh()

    def one_number_often(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        skipped = self.training and random.random() < 0.4
        y = x.flip(0) if skipped else layer(x)
        x = y + x
        return x.tanh() if skipped else x.sigmoid()

    def scaled_in_eval(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training:
            return x if random.random() < 0.4 else x + layer(x)
        return x + 0.6 * layer(x).tanh()

    def unused(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        y = layer(x) if torch.rand([]) < 0.4 and self.training else x
        z = y.relu() if random.random() < 0.5 else y * 2
        return z[:0].sum() + x

    def layers_in_eval(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        return nn.functional.dropout(x, 0.5) if torch.rand([]) < 0.4 else x

    def always_one(self, layer: nn.Module, x: Tensor, place: int) -> Tensor:
        if self.training and torch.rand([]) < 0.4:
            return x
        return self.layers[0](x)


FOLLOWED = (
    *("dropped", "survives", "rarer_with_depth", "in_place", "without_a_module", "listed", "twice"),
    *(
        "before_the_branch",
        "drawn_always",
        "by_python",
        "by_numpy",
        "by_name_in_both_modes",
        "unless_it_trains",
        "checked",
        "either",
        "in_both_modes",
        "of_two_ways",
        "with_others_in_training",
        "one_number_often",
        "scaled_in_eval",
        "unused",
    ),
)
KEPT_FOR_DRAWS = ("by_both", "by_an_index", "by_a_choice", "of_several", "drawn_before")
KEPT_WHOLE = (
    *("inside_another", "by_data", "by_a_weight", "recomputed", "always_one", "counted"),
    *("never_two", "not_all", "by_chance_again", "refuses", "checked_inside", "layers_in_eval"),
    "of_two_in_each_mode",
)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run(model: nn.Module, x: Tensor, seed: int) -> dict[str, Tensor | None]:
    """The outputs in training, the next random number, the gradients and the running statistics."""
    model.train().zero_grad(set_to_none=True)
    seed_all(seed)
    outputs = list(tensors(model(x)))
    sum((output.square().sum() for output in outputs), torch.zeros(())).backward()
    found: dict[str, Tensor | None] = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found | {"next": torch.rand(1), "others": torch.tensor([random.random(), np.random.rand()])}


def assert_alike(gm: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Both models act the same in training, for all seeds."""
    state = copy.deepcopy(model.state_dict())
    for seed in SEEDS:
        wanted = run(model, x, seed)
        model.load_state_dict(state)
        got = run(gm, x, seed)
        model.load_state_dict(state)
        for name, one in wanted.items():
            other = got[name]
            # A mask over channels that several layers share gives all of them a gradient, which may be 0.
            one, other = (torch.zeros(()) if each is None else each for each in (one, other))
            assert torch.equal(one, other) or not (one.any() or other.any()), name


def choices(gm: fx.GraphModule) -> int:
    return sum(node.target is kept_unless for node in gm.graph.nodes)


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("step", FOLLOWED)
def test_a_graph_skips_what_the_model_skips(step: str, layers: int) -> None:
    x, model = torch.randn(3, 4), Skips(step, layers)
    gm = exact(model, x, torch.randn(5, 4))
    assert choices(gm) == layers * (1 + (step in ("twice", "one_number_often", "unused")))
    assert not opaque(gm)
    assert_alike(gm, model, x)
    for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        seed_all(3)
        wanted = list(tensors(gm(x)))
        seed_all(3)
        assert all(map(torch.equal, tensors(other(x)), wanted))


def around(step: str) -> tuple[fx.GraphModule, nn.Module, Tensor]:
    """The graph, in which nothing is followed, of a model around one that skips, the model and an example."""
    model, x = nn.Sequential(Skips(step)), torch.randn(3, 4)
    gm = exact(model, x)
    assert not choices(gm)
    return gm, model, x


@pytest.mark.long
@pytest.mark.parametrize("step", KEPT_WHOLE)
def test_other_branches_on_random_numbers_are_kept_whole(step: str) -> None:
    gm, _, _ = around(step)
    on_data = step in ("by_data", "by_a_weight")
    kind = "the numbers in a tensor" if on_data else "random numbers, in a way that cannot be followed"
    assert f"branches on {kind} (" in opaque(gm)["0"]


@pytest.mark.parametrize("step", KEPT_FOR_DRAWS)
def test_other_numbers_from_outside_torch_are_kept_whole(step: str) -> None:
    gm, model, x = around(step)
    assert list(opaque(gm)) == ["0"]
    assert_alike(gm, model, x)


@pytest.mark.long
@pytest.mark.parametrize("rule", [*RULES.values(), Channels(ratio=0.5, through_norms=True)])
@pytest.mark.parametrize("step", ["dropped", "by_python"])
def test_a_model_that_skips_is_pruned_and_trains(rule: Rule, step: str) -> None:
    x = torch.randn(6, 4)
    model = Skips(step)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=Schedule(0, 0.5)), x)
    assert_alike(prepared, model, x)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for seed in SEEDS:
        optimizer.zero_grad()
        run(prepared, x, seed)
        optimizer.step()
        pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    assert torch.allclose(converted(x), prepared(x), atol=1e-5)
    assert all("rand" not in node.name and "draw" not in node.name for node in converted.graph.nodes)


@pytest.mark.parametrize("step", ["dropped", "measured"])
def test_channels_of_skipped_layers_go(step: str) -> None:
    model, x = Skips(step).double(), torch.randn(6, 4, dtype=torch.float64)
    prepared = pruned(model, at_once(Channels(ratio=0.5, through_norms=True)), x).eval()
    converted = pdp_fx.convert(prepared)
    assert difference(prepared, converted, x) < 1e-12
    assert sum(converted.get_parameter(f"layers.{place}.wide.weight").shape[0] for place in range(3)) == 24
    assert converted.get_parameter("layers.2.narrow.weight").shape[0] == 2


def test_a_skipped_layer_is_not_computed_and_gets_no_gradient() -> None:
    x = torch.randn(6, 4)
    prepared = pdp_fx.prepare(Skips("dropped"), PruneSpec(Unstructured(0.5)), x).train()
    skipped = 0
    for seed in SEEDS:
        prepared.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        prepared(x).sum().backward()
        gone = [prepared.get_parameter(f"layers.{place}.wide.weight").grad is None for place in range(3)]
        skipped += sum(gone)
    assert 0 < skipped < 3 * len(SEEDS)


class Decoder(nn.Module):
    """Guesses words one by one; what it reads next is the right word, now and then, or its guess."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.cell, self.out = nn.Embedding(7, 6), nn.GRUCell(6, 8), nn.Linear(8, 7)
        self.drop, self.draws = nn.Dropout(0.1), getattr(self, draw)

    def each_time(self, once: Any) -> Any:
        return random.random() < 0.5

    def in_training(self, once: Any) -> Any:
        return self.training and random.random() < 0.5

    def by_torch(self, once: Any) -> Any:
        return torch.rand(1).item() < 0.5

    def by_numpy(self, once: Any) -> Any:
        return np.random.rand() < 0.5

    def for_all(self, once: Any) -> Any:
        return once

    def forward(self, start: Tensor, right: Tensor) -> Tensor:
        state, word, guesses = start, right[:, 0], list[Tensor]()
        once = random.random() < 0.5
        for place in range(1, right.shape[1]):
            state = self.cell(self.drop(self.words(word)), state)
            guesses.append(self.out(state))
            best = guesses[-1].topk(1).indices
            word = right[:, place] if self.draws(once) else best.squeeze(1)
        return torch.stack(guesses, 1)


@pytest.mark.long
@pytest.mark.parametrize("draw", ["each_time", "in_training", "by_torch", "by_numpy", "for_all"])
def test_a_decoder_with_teacher_forcing_is_pruned(draw: str) -> None:
    model = Decoder(draw).double()
    inputs = torch.randn(5, 8, dtype=torch.float64), torch.randint(7, (5, 4))
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(model, spec, inputs)
    assert choices(prepared) == 2

    def given(net: nn.Module, training: bool) -> list[Tensor]:
        found: list[Tensor] = []
        for seed in SEEDS:
            seed_all(seed)
            found.append(net.train(training)(*inputs).detach())
        return found

    for training in (False, True):
        wanted = given(model, training)
        assert all(map(torch.equal, given(prepared, training), wanted))
        assert training or (len({each.sum().item() for each in wanted}) > 1) is (draw != "in_training")
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_parameter("words.weight").shape[1] == 3
    for other in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        pairs = zip(given(other, False), given(prepared, False), strict=True)
        assert max(float((one - two).detach().abs().max()) for one, two in pairs) < 1e-12


class OfThree(nn.Module):
    """What the third number chooses is another thing only where the second is small and the first is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.first(x) if torch.rand([]) > 0.01 else x
        z = y if torch.rand([]) < 0.01 else x
        return y + (z.relu() if torch.rand([]) < 0.01 else self.last(y))


def test_what_three_numbers_choose_together_is_seen_however_rare_it_is() -> None:
    gm = exact(nn.Sequential(OfThree()), torch.randn(3, 4))
    assert not choices(gm)
    assert "branches on random numbers, in a way that cannot be followed" in opaque(gm)["0"]


def test_what_eval_mode_chooses_at_random_has_the_same_channels_in_both_ways() -> None:
    model, x = Skips("of_two_ways").double(), torch.randn(6, 4, dtype=torch.float64)
    prepared = pruned(model, at_once(Channels(ratio=0.5, through_norms=True)), x).eval()
    converted = pdp_fx.convert(prepared)
    assert converted.get_parameter("layers.2.narrow.weight").shape[0] == 2
    for seed in SEEDS:
        seed_all(seed)
        wanted = prepared(x)
        seed_all(seed)
        assert torch.allclose(converted(x), wanted, atol=1e-12)


class SkipsMasked(Skips):
    """Takes a mask, or none."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x if mask is None else x * mask)


@pytest.mark.parametrize("mask", [None, torch.ones(3, 1)])
def test_a_model_with_optional_inputs_is_followed_too(mask: Tensor | None) -> None:
    gm = exact(SkipsMasked("dropped"), {"x": torch.randn(3, 4), "mask": mask})
    assert choices(gm) == 3


def test_the_code_shows_what_may_be_skipped() -> None:
    gm = exact(Skips("dropped", 1), torch.randn(3, 4))
    assert "if not lt:" in gm.code
    assert "kept_unless" in gm.code


class ScaledAtRandom(nn.Module):
    """Multiplies a branch by a random number, which the code makes a plain one, as shake-drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        share = float(torch.bernoulli(torch.full((1,), 0.5)))
        return x + share / 0.5 * self.last(self.first(x).relu())


def test_a_random_number_that_is_made_a_float_stays_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), ScaledAtRandom(), nn.Linear(4, 2)), torch.randn(3, 4)
    gm = exact(model, x)
    assert not opaque(gm)
    found: list[list[Tensor]] = []
    for net in (model, gm):
        found.append([])
        for seed in SEEDS:
            seed_all(seed)
            found[-1].append(net(x))
    assert all(map(torch.equal, *found))
    assert any(not torch.equal(found[0][0], each) for each in found[0])
