"""torch.compile: one graph, no recompilation while the ratio ramps, the losses of eager mode."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from pdp_fx.spec import Rule
from tests.training.nets import RULES, batch, prepared, pruned_counts, sgd, training_step

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts the graphs it is given and hands them on to AOT autograd."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return lookup_backend("aot_eager")(gm, inputs)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_one_graph_serves_the_whole_ramp_with_the_losses_of_eager_mode(rule: Rule) -> None:
    eager = prepared(rule)
    twin = copy.deepcopy(eager)
    backend = Counting()
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    eager_sgd, twin_sgd = sgd(eager), sgd(twin)
    for seed in range(8):
        expected = training_step(eager, eager_sgd, seed)
        assert training_step(twin, twin_sgd, seed, compiled) == pytest.approx(expected, rel=1e-5)
    assert backend.graphs == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]
    assert pruned_counts(twin) == pruned_counts(eager)
    assert any(pruned_counts(twin))


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_model_compiled_for_sizes_that_vary_has_the_losses_of_eager_mode(rule: Rule) -> None:
    eager = prepared(rule)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=True)
    eager_sgd, twin_sgd = sgd(eager), sgd(twin)
    for seed in range(6):
        expected = training_step(eager, eager_sgd, seed)
        assert training_step(twin, twin_sgd, seed, compiled) == pytest.approx(expected, rel=1e-5)
    assert not counters["graph_break"]
    assert not counters["recompiles"]
    assert pruned_counts(twin) == pruned_counts(eager)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_evaluation_compiles_in_one_graph_for_every_ratio(rule: Rule) -> None:
    model = prepared(rule)
    optimizer = sgd(model)
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(4):
        training_step(model.train(), optimizer, seed)
        with torch.no_grad():
            expected = model.eval()(batch()[0])
            torch.testing.assert_close(compiled(batch()[0]), expected, rtol=1e-5, atol=1e-6)
    assert backend.graphs == 1


def test_step_takes_a_compiled_model() -> None:
    model = prepared(RULES["unstructured"])
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    training_step(compiled, sgd(compiled), 0)
    assert int(model.get_buffer("pdp.counter")) == 1


COMPILE_FIRST_THING = """
import torch
from tests.training.nets import RULES, batch, prepared
model = prepared(RULES["unstructured"])
torch.compile(model, fullgraph=True, backend="aot_eager")(batch()[0]).sum().backward()
"""


@pytest.mark.long
def test_a_fresh_process_compiles_what_it_has_prepared() -> None:
    """Other tests import torch.compile before they trace a model, which hides what tracing replaces."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", COMPILE_FIRST_THING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_inductor_trains_as_eager_mode_does(rule: Rule) -> None:
    eager = prepared(rule)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True)
    eager_sgd, twin_sgd = sgd(eager), sgd(twin)
    for seed in range(8):
        expected = training_step(eager, eager_sgd, seed)
        assert training_step(twin, twin_sgd, seed, compiled) == pytest.approx(expected, rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
