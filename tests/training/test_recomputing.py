"""What becomes of the parts of a model that it recomputes in backward, by `torch.utils.checkpoint`."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured, WeightPolicy
from pdp_fx.printing import graph_text
from pdp_fx.spec import Rule
from pdp_fx.trace import trace
from tests.tracing.checks import exact
from tests.training.nets import RULES

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.narrow(self.norm(self.wide(x)).relu().tanh()))


class Saves(nn.Module):
    """Recomputes its blocks, or not."""

    def __init__(self, recomputes: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.recomputes, self.reentrant = recomputes, reentrant

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            if self.recomputes and self.training:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
            assert isinstance(x, Tensor)
        return self.head(x.mean((2, 3)))


recompute: Any = partial(checkpoint, use_reentrant=False)


def parts(gm: fx.GraphModule) -> int:
    return gm.code.count("torch.utils.checkpoint.checkpoint(")


class Calls(nn.Module):
    """A layer, called in the way that a test asks for."""

    def __init__(self, how: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x)


def prepared(model: nn.Module, rule: Rule) -> fx.GraphModule:
    """The model in the middle of its ramp."""
    spec = PruneSpec(rule, schedule=Schedule(0, 0.5))
    made = pdp_fx.prepare(model, spec, torch.randn(2, 3, 8, 8))
    pdp_fx.step(made)
    return made


def trained(model: nn.Module, images: Tensor) -> tuple[list[Tensor], int]:
    """The output and the gradients of one pass, and how many numbers it kept for backward."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach(), *gradients], kept


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@every_rule
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_prepared_model_recomputes_what_the_model_recomputes(rule: Rule, reentrant: bool) -> None:
    images = torch.randn(4, 3, 8, 8).requires_grad_()
    _, by_model = trained(Saves(reentrant=reentrant), images)
    gm, plain = prepared(Saves(reentrant=reentrant), rule), prepared(Saves(recomputes=False), rule)
    (found, kept), (wanted, kept_by_plain) = trained(gm, images), trained(plain, images)
    assert_equal(found, wanted)
    masked = sum(parameter.numel() for parameter in gm.parameters() if parameter.ndim > 1)
    assert kept <= by_model + 3 * masked < kept_by_plain / 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_batch_norm_that_counts_its_batch_twice_does_so_in_the_graph(reentrant: bool) -> None:
    exact(Saves(reentrant=reentrant), torch.randn(4, 3, 8, 8).requires_grad_())


@every_rule
def test_a_step_between_forward_and_backward_does_not_reach_what_is_recomputed(rule: Rule) -> None:
    images = torch.randn(4, 3, 8, 8)
    gm, other = prepared(Saves(), rule), prepared(Saves(), rule)
    found = list[list[Tensor | None]]()
    for model, steps in ((gm, False), (other, True)):
        torch.manual_seed(1)
        loss = model(images).square().sum()
        if steps:
            pdp_fx.step(model)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, wanted in zip(*found, strict=True):
        assert one is wanted is None or torch.equal(cast(Tensor, one), cast(Tensor, wanted))


class Counts(WeightPolicy):
    """Counts its calls in training."""

    calls = 0

    def soft(self, weight: Tensor) -> Tensor:
        Counts.calls += 1
        return 1 * weight


def test_masks_are_computed_once() -> None:
    model = Saves()
    spec = PruneSpec(Unstructured(0.5, policy=Counts), schedule=Schedule(0, 0.5))
    gm = pdp_fx.prepare(model, spec, torch.randn(2, 3, 8, 8))
    Counts.calls = 0
    trained(gm, torch.randn(2, 3, 8, 8))
    assert Counts.calls == sum(type(module) is Counts for module in gm.modules()) == 8


def writes_to_its_weight(layer: nn.Linear, x: Tensor) -> Tensor:
    def norms(x: Tensor) -> Tensor:
        if layer.training:
            with torch.no_grad():
                layer.weight.div_(layer.weight.norm())
        return layer(x)

    return recompute(norms, x)


def test_a_mask_sees_what_a_part_writes_to_its_weight() -> None:
    x = torch.randn(3, 4)
    gm = pdp_fx.prepare(
        Calls(writes_to_its_weight), PruneSpec(Unstructured(0.5), schedule=Schedule(0, 0.5)), x
    )
    pdp_fx.step(gm)
    with torch.no_grad():
        gm.get_parameter("layer.weight").mul_(100)
    whole = copy.deepcopy(gm)
    for node in whole.graph.nodes:
        node.meta.pop("recomputed", None)
    whole.recompile()
    assert parts(gm) == 1
    assert parts(whole) == 0
    with torch.no_grad():
        assert torch.equal(gm(x), whole(x))


@every_rule
def test_copies_recompute_too_and_a_converted_model_does_not(rule: Rule) -> None:
    images = torch.randn(4, 3, 8, 8)
    gm = prepared(Saves(), rule)
    wanted, kept = trained(copy.deepcopy(gm), images)
    found, kept_by_pickled = trained(pickle.loads(pickle.dumps(gm)), images)
    assert_equal(found, wanted)
    assert kept_by_pickled == kept
    pdp_fx.step(gm)
    small = pdp_fx.convert(gm)
    assert "checkpoint" in gm.code
    assert "checkpoint" not in small.code
    torch.testing.assert_close(small(images), gm.eval()(images))


def test_compiled_models_recompute_in_one_graph() -> None:
    model = Saves().eval()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.drop.p = 0.0
    images = torch.randn(4, 3, 8, 8)
    gm = prepared(model.train(), RULES["unstructured"])
    wanted, _ = trained(copy.deepcopy(gm), images)
    found, _ = trained(torch.compile(gm, fullgraph=True), images)  # pyright: ignore[reportArgumentType]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def nested(layer: nn.Linear, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return layer(x).relu()

    def outer(x: Tensor) -> Tensor:
        return layer(recompute(inner, x)).tanh()

    return recompute(outer, x)


def of_weights_alone(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, recompute(lambda: layer.weight.tanh().exp()))


def several_results(layer: nn.Linear, x: Tensor) -> Tensor:
    first, (second, rows) = recompute(lambda x: (layer(x), (x.exp(), x.shape[0])), x)
    return first * second / rows + x


def nothing_at_all(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(recompute(lambda x: x, x))


def by_keyword(layer: nn.Linear, x: Tensor) -> Tensor:
    return recompute(lambda x, scale: layer(x) * scale.exp(), x, scale=x)


@pytest.mark.parametrize(
    ("how", "count"),
    [(nested, 1), (of_weights_alone, 1), (several_results, 1), (nothing_at_all, 0), (by_keyword, 1)],
)
def test_whatever_is_given_to_a_part_and_comes_from_it(
    how: Callable[[nn.Linear, Tensor], Tensor], count: int
) -> None:
    model = Calls(how)
    gm = exact(model, torch.randn(3, 4).requires_grad_())
    assert parts(gm) == count
    x = torch.randn(5, 4)
    assert_equal(trained(gm, x)[0], trained(copy.deepcopy(model), x)[0])


def test_eval_mode_is_the_models() -> None:
    model = Saves()
    gm = trace(model, torch.randn(2, 3, 8, 8))
    assert parts(gm) == 3
    gm.eval()
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))
    assert torch.equal(gm(x), model(x))


def test_the_printed_graph_numbers_the_parts() -> None:
    gm = prepared(Saves(), RULES["unstructured"])
    lines = graph_text(gm).splitlines()
    start = lines[0].index("recomputed")
    numbers = {line.split()[0]: line[start : start + 10].strip() for line in lines[2:]}
    assert [numbers[name] for name in ("stem", "blocks_0_wide", "blocks_2_narrow", "head")] == [
        "",
        "1",
        "3",
        "",
    ]
    assert "recomputed" not in graph_text(prepared(Saves(recomputes=False), RULES["unstructured"]))
