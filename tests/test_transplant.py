"""The layers of a converted graph in the user's own class."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, StateError, Unstructured, VerifyError
from pdp_fx.granularity import Rule
from pdp_fx.tracing.examples import ExampleInputs
from tests.nets import at_once


def pruned(model: nn.Module, example: ExampleInputs | None, rule: Rule, **more: Any) -> nn.Module:
    """The model prepared, with all that is to go pruned."""
    spec = PruneSpec(rule, schedule=Schedule(0, 1.0), allocation="uniform", **more)
    prepared = pdp_fx.prepare(model, spec, example)
    pdp_fx.step(prepared)
    return prepared.eval()


def size(model: nn.Module) -> int:
    return sum(int(parameter.count_nonzero()) for parameter in model.parameters())


class Images(nn.Module):
    """Classifies a list of images of any size, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv, self.head = nn.Conv2d(8, 12, 3), nn.Linear(12, 5)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.one(image[None]) for image in images])

    def one(self, image: Tensor) -> Tensor:
        x = self.norm(self.stem(image)).relu()
        return self.head(self.conv(x).relu().mean((2, 3)))[0]


def images(*sizes: int) -> list[Tensor]:
    return [torch.rand(3, size, size + 1, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4), Channels(ratio=0.5)])
def test_it_gives_what_the_converted_model_gives_and_takes_lists_of_any_length(rule: Rule) -> None:
    model = Images().double()
    model.norm.load_state_dict({**model.norm.state_dict(), "running_var": torch.rand(8) + 0.5})
    state = copy.deepcopy(model.state_dict())
    prepared = pruned(model, (images(9, 12),), rule)
    made = pdp_fx.transplant(prepared, model)
    small = pdp_fx.convert(prepared)
    assert type(made) is Images
    assert not made.training
    given = images(10, 7)
    torch.testing.assert_close(made(given), small(given), rtol=0, atol=1e-12)
    more = images(9, 8, 12)
    single = torch.stack([prepared([image, image])[0] for image in more])
    torch.testing.assert_close(made(more), single, rtol=0, atol=1e-12)
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert size(made) < size(model)


def test_it_keeps_its_norms_and_trains_on() -> None:
    model = Images()
    made: Any = pdp_fx.transplant(pruned(model, ([torch.rand(3, 9, 9)],), Channels(ratio=0.5)), model)
    assert made.norm.num_features == 4
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    made.train()
    before = made.norm.running_mean.clone()
    made([torch.rand(3, 9, 9), torch.rand(3, 8, 8)]).square().sum().backward()
    optimizer.step()
    assert not torch.equal(made.norm.running_mean, before)
    assert all(parameter.grad is not None for parameter in made.parameters())


class Transposed(nn.Module):
    """A linear layer that keeps the number of its outputs, as `Conv1D` of transformers does."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs, self.inputs = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]) @ self.weight
        return flat.view(*x.shape[:-1], self.outputs)


def test_a_layer_of_your_own_that_counts_its_channels_counts_them_anew() -> None:
    model = nn.Sequential(Transposed(8, 4), nn.ReLU(), Transposed(3, 8))
    made: Any = pdp_fx.transplant(pruned(model, torch.randn(2, 5, 4), Channels(ratio=0.5)), model)
    assert (made[0].outputs, made[2].outputs) == (4, 3)
    assert (model[0].outputs, model[2].inputs) == (8, 8)  # pyright: ignore[reportAttributeAccessIssue]


def test_weights_that_are_tied_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.hidden, self.back = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.back(self.hidden(self.table(ids)).relu()))

    model = Tied()
    made: Any = pdp_fx.transplant(pruned(model, torch.randint(9, (2, 3)), Channels(ratio=0.5)), model)
    assert made.head.weight is made.table.weight
    assert made.hidden.out_features < 8


class Heads(nn.Module):
    """Attention of four heads, and two layers after it.

    Args:
        split: makes heads of channels.
    """

    def __init__(self, split: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.split = split
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 8)
        self.wide, self.back = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.back(self.wide(x).relu())


def by_width(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], -1, 4)


def by_number(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], 4, 4)


def test_heads_go_where_the_code_does_not_count_them() -> None:
    model = Heads(by_width)
    made: Any = pdp_fx.transplant(pruned(model, torch.randn(2, 5, 8), Channels(ratio=0.5)), model)
    assert made.qkv.out_features == 24


def test_code_that_counts_what_is_gone_is_refused_unless_that_stays() -> None:
    model, example = Heads(by_number), torch.randn(2, 5, 8)
    with pytest.raises(VerifyError, match=r"Heads fails with its smaller layers: .*shape.*py:\d+\)"):
        pdp_fx.transplant(pruned(model, example, Channels(ratio=0.5)), model)
    rest = pruned(model, example, Channels(ratio=0.5), overrides={"qkv": None, "out": None})
    made: Any = pdp_fx.transplant(rest, model)
    torch.testing.assert_close(made(example), pdp_fx.convert(rest)(example))
    assert made.wide.out_features == 6


@pytest.mark.parametrize("rule", [Channels(ratio=0.5), Unstructured(0.5)])
def test_a_weight_that_is_computed_stays_computed_or_is_refused(rule: Rule) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    prepared = pruned(model, torch.randn(2, 4), rule)
    if isinstance(rule, Channels):
        made: Any = pdp_fx.transplant(prepared, model)
        assert made[0].parametrizations.weight.original1.shape == (4, 4)
    else:
        with pytest.raises(VerifyError, match="or by a weight that it computes"):
            pdp_fx.transplant(prepared, model)


class Averages(nn.Module):
    """Divides by the number of channels that it once had, as an attribute of a module or of its class."""

    last_width = 8

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.width = nn.Linear(4, 8), nn.Linear(8, 3), 8

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x * (x.shape[-1] / self.counted()))

    def counted(self) -> int:
        return self.width


class AveragesOfClass(Averages):
    def counted(self) -> int:
        return self.last_width


class CountedHeads(Heads):
    """Counts its heads, and the channels of each, before it is called."""

    def __init__(self) -> None:
        super().__init__(self.into_heads)
        self.num_heads, self.head_dim, self.embed_dim = 4, 4, 16

    def into_heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim)


def test_numbers_that_a_module_has_of_its_layers_are_counted_anew_where_that_fits() -> None:
    model = Averages()
    made: Any = pdp_fx.transplant(pruned(model, torch.randn(2, 4), Channels(ratio=0.5)), model)
    assert (made.width, made.last_width, model.width) == (4, 8, 8)
    attention = CountedHeads()
    spec = {"wide": None, "back": None}
    prepared = pruned(attention, torch.randn(2, 5, 8), Channels(ratio=0.5), overrides=spec)
    made = pdp_fx.transplant(prepared, attention)
    assert (made.num_heads, made.head_dim, attention.num_heads) == (2, 4, 4)
    x = torch.randn(3, 7, 8)
    torch.testing.assert_close(made(x), pdp_fx.convert(prepared)(x))


def test_numbers_are_counted_by_the_layers_that_they_are_of() -> None:
    attention = CountedHeads()
    spec = {"wide": Channels(ratio=0.25)}
    prepared = pruned(attention, torch.randn(2, 5, 8), Channels(ratio=0.5), overrides=spec)
    made: Any = pdp_fx.transplant(prepared, attention)
    assert made.wide.out_features == 0.75 * attention.wide.out_features
    assert (made.num_heads, made.head_dim) == (2, 4)
    x = torch.randn(3, 7, 8)
    torch.testing.assert_close(made(x), pdp_fx.convert(prepared)(x))


def test_numbers_of_channels_that_others_become_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 8), Transposed(16, 8), nn.ReLU(), nn.Linear(16, 3))
    made: Any = pdp_fx.transplant(pruned(model, torch.randn(2, 5, 4), Channels(ratio=0.5)), model)
    assert made[1].outputs == 8


def test_a_model_that_fails_on_the_example_is_refused() -> None:
    class Fails(nn.Linear):
        fails = False

        def forward(self, input: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("not now")
            return super().forward(input)

    model = nn.Sequential(Fails(4, 8), nn.Linear(8, 2))
    prepared = pruned(model, torch.randn(2, 4), Channels(ratio=0.5))
    other = copy.deepcopy(model)
    other[0].fails = True  # pyright: ignore[reportArgumentType]
    with pytest.raises(VerifyError, match="ValueError: not now"):
        pdp_fx.transplant(prepared, other)


def test_another_result_is_refused() -> None:
    model = AveragesOfClass()
    with pytest.raises(VerifyError, match="AveragesOfClass with its smaller layers returns another tensor"):
        pdp_fx.transplant(pruned(model, torch.randn(2, 4), Channels(ratio=0.5)), model)


class Slightly(nn.Module):
    """Goes by the number of its channels, a little.

    Args:
        share: how much each channel that is gone changes.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(4, 8), nn.Linear(8, 3), share

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x * (1 + self.share * (x.shape[-1] - 8)))


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1e-8), (torch.float32, 1e-6), (torch.bfloat16, 0.02)]
)
def test_what_rounding_would_hide_is_refused(dtype: torch.dtype, share: float) -> None:
    model = Slightly(share).to(dtype)
    prepared = pruned(model, torch.randn(2, 4, dtype=dtype), Channels(ratio=0.5))
    with pytest.raises(VerifyError, match="Slightly with its smaller layers returns another tensor"):
        pdp_fx.transplant(prepared, model)


class InFloat32(Slightly):
    """Takes inputs of float32 only, so that it does not run in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.ones_like(x, dtype=torch.float32) * x.float())


@pytest.mark.parametrize(("share", "taken"), [(0.0, True), (1e-3, False)])
def test_a_model_that_does_not_run_in_float64_is_compared_as_it_is(share: float, taken: bool) -> None:
    model = InFloat32(share)
    prepared = pruned(model, torch.randn(2, 4), Channels(ratio=0.5))
    with contextlib.nullcontext() if taken else pytest.raises(VerifyError, match="returns another tensor"):
        pdp_fx.transplant(prepared, model)


class Force(nn.Module):
    """Differentiates in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.last(self.first(at).tanh()).sum()
        return torch.autograd.grad(energy, at, create_graph=True)[0]


def test_a_model_that_differentiates_is_compared() -> None:
    model, x = Force().double(), torch.randn(2, 3).double()
    prepared = pruned(model, x, Unstructured(0.5))
    made = pdp_fx.transplant(prepared, model)
    torch.testing.assert_close(made(x), pdp_fx.convert(prepared)(x), rtol=0, atol=1e-12)
    assert size(made) < size(model)


class Listens(nn.Module):
    """Keeps what a layer gives by a method of its own, and has a table that `forward` does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.table = nn.Embedding(9, 8), nn.Embedding(9, 8)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight = self.shared.weight
        self.kept = torch.zeros(0)
        self.hidden.register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, result: Tensor) -> None:
        self.kept = result.detach()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.table(ids)).relu())


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
def test_hooks_are_those_of_the_copy_and_what_nobody_reads_stays_tied(rule: Rule) -> None:
    model, ids = Listens().double(), torch.randint(9, (2, 3))
    made: Any = pdp_fx.transplant(pruned(model, ids, rule), model)
    more = torch.randint(9, (5, 4))
    result = made(more)
    assert made.kept.shape[:2] == (5, 4)
    torch.testing.assert_close(made.head(made.kept.relu()), result, rtol=0, atol=0)
    assert made.shared.weight is made.table.weight is made.head.weight
    assert made.shared.embedding_dim == made.shared.weight.shape[1]


class Aliases(nn.Module):
    """Has its layers under several names, keeps a mean as a parameter, and an auxiliary head for training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.stem, self.stages = self.layers[0], [self.layers[1]]
        self.head, self.auxiliary = nn.Linear(16, 4), nn.Linear(4, 2)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.head(self.stages[0](self.stem(x).relu()).relu())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return (y - self.mean, self.auxiliary(y)) if self.training else (y - self.mean,)

    def hidden(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).relu())


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
def test_layers_of_several_names_stay_one_and_what_training_uses_is_as_trained(rule: Rule) -> None:
    model, x = Aliases().double(), torch.randn(3, 8).double()
    prepared = pruned(model, x, rule)
    fresh = Aliases().double()
    made: Any = pdp_fx.transplant(prepared, fresh)
    assert made.stem is made.layers[0]
    assert made.stages[0] is made.layers[1]
    assert size(made.stem) < size(model.stem)
    torch.testing.assert_close(made.hidden(x), made.stages[0](made.stem(x).relu()), rtol=0, atol=0)
    assert torch.equal(made.auxiliary.weight, model.auxiliary.weight)
    assert not torch.equal(fresh.auxiliary.weight, model.auxiliary.weight)
    made.train()(x)[1].sum().backward()


class Warms(nn.Module):
    """Has a number that is the number of its channels by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.steps = nn.Parameter(torch.ones(8)), 8

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain / (self.steps if self.training else 1)


def test_numbers_that_need_not_change_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 8), Warms(), nn.ReLU(), nn.Linear(8, 2))
    made: Any = pdp_fx.transplant(pruned(model, torch.randn(2, 4), Channels(ratio=0.5)), model)
    assert (made[1].gain.shape, made[1].steps) == ((4,), 8)


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    prepared = pruned(model, torch.randn(2, 4), Channels(ratio=0.5))
    with pytest.raises(StateError, match=r"no parameter 0\.weight of shape \(8, 4\)"):
        pdp_fx.transplant(prepared, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    with pytest.raises(StateError, match="the second model is prepared, too"):
        pdp_fx.transplant(prepared, prepared)
    with pytest.raises(StateError, match="needs the model that was given to prepare, got 3"):
        pdp_fx.transplant(prepared, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(StateError, match="came from pdp_fx.prepare"):
        pdp_fx.transplant(model, model)
    with pytest.raises(StateError, match="without example inputs"):
        pdp_fx.transplant(pruned(model, None, Unstructured(0.5)), model)
    waiting = pdp_fx.prepare(model, at_once(Channels(ratio=0.5)), torch.randn(2, 4))
    with pytest.raises(StateError, match="nothing is pruned"):
        pdp_fx.transplant(waiting, model)


class FillsBuffer(nn.Module):
    """Makes a table when it is first called, as biases by distance are made."""

    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.register_buffer("table", -torch.arange(x.shape[1], dtype=x.dtype), persistent=False)
        assert self.table is not None
        return x + self.table[: x.shape[1], None]


def test_a_buffer_that_the_first_call_makes_goes_with_the_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), FillsBuffer())
    prepared = pruned(model, torch.randn(2, 5, 4), Channels(ratio=0.5))
    made: Any = pdp_fx.transplant(prepared, model)
    assert made[0].out_features == 4
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(made(x), prepared.eval()(x))


class CallsForNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu()
        made, other = self.last(x), self.other(x)
        return (made, other) if self.training else made


def test_a_layer_that_eval_mode_calls_for_nothing_is_a_reason() -> None:
    model = CallsForNothing()
    prepared = pruned(model, torch.randn(2, 4), Channels(ratio=0.5))
    with pytest.raises(VerifyError, match="cannot be multiplied .* it calls a layer for nothing in eval"):
        pdp_fx.transplant(prepared, model)
