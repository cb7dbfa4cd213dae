from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import PruneSpec, Schedule, Unstructured
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import assert_same, assert_same_state, exact, opaque, targets


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        y += x
        return torch.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.gain = nn.Parameter(torch.ones(4, 1, 1))
        self.head = nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.blocks(self.stem(x)) * self.gain * scale
        return self.head(self.dropout(x.mean((2, 3))))


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8)


def test_layers_become_nodes_and_containers_do_not() -> None:
    gm = exact(Net(), images(2), images(5))
    assert {"stem", "head", "dropout"} <= set(targets(gm))
    assert [name for name in targets(gm) if name.startswith("blocks")] == [
        "blocks.0.conv",
        "blocks.0.bn",
        "blocks.1.conv",
        "blocks.1.bn",
    ]


def test_a_node_tells_its_owner_and_its_line() -> None:
    gm = trace(Net(), images(2))
    node = next(node for node in gm.graph.nodes if node.target == "blocks.1.bn")
    line = Residual.forward.__code__.co_firstlineno + 1
    assert (node.meta["owner"], node.meta["source"]) == ("blocks.1", f"test_trace.py:{line}")
    assert all("source" in node.meta for node in gm.graph.nodes)


def test_threads_trace_one_after_another() -> None:
    models, x = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)], torch.randn(2, 4)
    before = nn.Module.__call__, len
    with ThreadPoolExecutor(3) as pool:
        assert [len(gm.graph.nodes) for gm in pool.map(lambda model: trace(model, x), models)] == [4] * 3
    assert (nn.Module.__call__, len) == before


def test_hooks_of_the_model_itself_need_a_run() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    model.register_forward_pre_hook(lambda _, args: (3 * args[0],))
    with pytest.raises(TraceError, match="Sequential has hooks of its own.*pass example_inputs"):
        trace(model)
    with pytest.warns(UserWarning, match="the hooks of the model are not called any more"):
        assert torch.equal(trace(model, x)(x), model(x))


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 4)], ids=["symbolic", "recorded"])
def test_a_layer_whose_forward_was_replaced_is_looked_into(inputs: Tensor | None) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    layer.forward = lambda input: functional.linear(input, layer.weight).relu()
    model = nn.Sequential(layer, nn.Linear(4, 2))
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), inputs)
    assert torch.equal(prepared(x), model(x))
    pdp_fx.step(prepared)
    assert torch.equal(pdp_fx.convert(prepared)(x), prepared.eval()(x))


@pytest.mark.parametrize("inputs", [None, torch.randn(2, 4)], ids=["symbolic", "recorded"])
def test_what_no_line_of_the_model_does_has_no_source(inputs: Tensor | None) -> None:
    prepared = pdp_fx.prepare(nn.Sequential(nn.Linear(4, 4)), PruneSpec(Unstructured(0.5)), inputs)
    assert {node.meta.get("source", "") for node in prepared.graph.nodes} == {""}


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_model_is_kept(training: bool) -> None:
    model = Net().train(training)
    model.blocks[1].eval()
    gm = exact(model, images(2))
    flags = dict(gm.named_modules())
    assert all(flags[name].training == module.training for name, module in model.named_modules())


def test_one_image_is_enough_for_batch_norm() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x.mean((2, 3), keepdim=True)))

    model = Pooled()
    gm = trace(model, images(1))
    assert_same(gm, model, images(2))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(images(1))


def test_a_failure_leaves_the_model_as_it_was() -> None:
    class Fails(Net):
        calls: list[int]

        def __init__(self) -> None:
            super().__init__()
            self.calls = []
            self.last: Tensor | None = None

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            self.calls.append(1)
            self.last = super().forward(x)
            torch.rand(3)
            raise RuntimeError("on purpose")

    model, inputs = Fails().train(), images(2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(TraceError, match="the model itself fails on the example inputs in eval mode") as info:
        trace(model, inputs)
    assert str(info.value.__cause__) == "on purpose"
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(generator, torch.get_rng_state())
    assert model.calls == []
    assert model.last is None


def test_a_model_under_no_grad_is_traced_the_same() -> None:
    model = Net()
    with torch.no_grad():
        gm = trace(model, images(2))
        assert not torch.is_grad_enabled()
    assert_same(gm, model, images(2))
    with torch.inference_mode():
        assert targets(trace(model, images(2))) == targets(gm)


def test_without_example_inputs_the_same_graph_results() -> None:
    model = Net()
    gm = trace(model)
    gm.graph.lint()
    assert_same_state(gm, model)
    assert_same(gm, model, images(3))
    named = [name for name in targets(trace(model, images(2))) if "." in name]
    assert [name for name in targets(gm) if "." in name] == named


def test_without_example_inputs_modes_are_followed_too() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x), 0.5, self.training)

    model = nn.Sequential(Drops(), Drops())
    assert_same(trace(model), model, torch.randn(3, 4))


def test_without_example_inputs_control_flow_is_refused() -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match=r"without example inputs.*test_trace.py:\d+.*pass example_inputs"):
        trace(Decides())


class Compares(nn.Module):
    """Compares tensors with what is none."""

    def forward(self, x: Tensor, state: Any) -> Tensor:
        if not state == None:  # noqa: E711, SIM201 so it is often written
            x = x + 1
        if state != "zeros" and state not in (None, "ones"):
            x = x + state
        return x


def test_comparisons_with_other_things_than_tensors_are_decisions_like_others() -> None:
    exact(Compares(), (torch.randn(2, 4), torch.randn(2, 4)))
    exact(Compares(), (torch.randn(2, 4), None))


class Named(nn.Module):
    """Has a part of a given name in a part of another."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.add_module(outer, nn.ModuleDict({inner: nn.Linear(4, 4)}))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(f"{self.outer}.{self.inner}")(x)


def test_names_that_code_cannot_have_are_refused() -> None:
    for names in (("heads", "global"), ("class", "heads")):
        with pytest.raises(TraceError, match=f"a part '{'.'.join(names)}', which the code .* cannot name"):
            trace(Named(*names), torch.randn(2, 4))
    exact(Named("heads", "self"), torch.randn(2, 4))


def test_lazy_layers_have_to_be_run_first() -> None:
    with pytest.raises(TraceError, match="run the model once"):
        trace(nn.Sequential(nn.LazyLinear(4)), torch.randn(2, 3))


def test_nothing_is_opaque_in_a_plain_net() -> None:
    assert not opaque(trace(Net(), images(2)))


def test_hooks_that_a_first_run_installs_are_taken_out_again() -> None:
    class Captures(nn.Module):
        """Returns what its layers gave, as hooks that the first run installs have seen it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.seen: list[Tensor] = []
            self.installed = False

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            if not self.installed:
                self.installed = True
                self.layers[0].register_forward_hook(self.keep)
            self.seen.clear()
            return self.layers(x), *self.seen

        def keep(self, module: nn.Module, args: object, output: Tensor) -> None:
            self.seen.append(output)

    model = Captures()
    exact(model, torch.randn(2, 4), torch.randn(3, 4))
    assert not model.layers[0]._forward_hooks
    assert not model.seen


class Neighbours(nn.Module):
    """A layer whose result is averaged over the neighbours in a graph."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.adjacency, self.linear = nn.Parameter(adjacency, requires_grad=False), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return torch.sparse.mm(self.adjacency if other is None else other, self.linear(x))


def test_sparse_tensors_are_refused() -> None:
    x, sparse = torch.randn(3, 4), torch.eye(3).to_sparse()
    with pytest.raises(TraceError, match=r"adjacency is stored as sparse_coo.*to_dense\(\)"):
        trace(Neighbours(sparse), x)
    with pytest.raises(TraceError, match="an example input is stored as sparse_coo"):
        trace(Neighbours(torch.eye(3)), (x, sparse))
    assert trace(Neighbours(torch.eye(3)), x)(x).shape == (3, 4)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta")
def test_sparse_buffers_are_read_as_they_are() -> None:
    class Heads(nn.Linear):
        def __init__(self, layout: torch.layout) -> None:
            super().__init__(4, 4)
            self.register_buffer("heads", torch.eye(3).to_sparse(layout=layout), persistent=False)

        def forward(self, input: Tensor) -> Tensor:
            x = super().forward(input)
            return torch.sparse.mm(self.heads, x) if self.training else x

    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        exact(Heads(layout), torch.randn(3, 4))


class Dotted(nn.Module):
    """Holds a parameter by a name that is no attribute's, as containers of nested parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["nested.scale"] = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * cast(Tensor, self._parameters["nested.scale"])


def test_parameters_that_no_attribute_holds_are_refused() -> None:
    with pytest.raises(TraceError, match="0, a Dotted, calls one of its parameters 'nested.scale'"):
        trace(nn.Sequential(Dotted()), torch.randn(3, 4))


class Penalised(nn.Module):
    """A layer, and how far it moves what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.far = nn.Linear(4, 4), nn.MSELoss()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.far(y, x)


def test_a_loss_is_a_layer_to_symbolic_tracing_and_a_function_to_a_recording() -> None:
    model, x = Penalised(), torch.randn(3, 4)
    for gm, target in ((trace(model), "far"), (trace(model, x), functional.mse_loss)):
        node = [*gm.graph.nodes][-2]
        assert node.target == target
        assert "opaque" not in node.meta
        for one, other in zip(gm(x), model(x), strict=True):
            assert torch.equal(one, other)
