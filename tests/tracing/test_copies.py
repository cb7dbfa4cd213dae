import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pdp_fx import Channels, PruneSpec, Schedule, convert, explain, prepare, step
from pdp_fx.plain import plain
from pdp_fx.trace import trace
from pdp_fx.tracing.module import TracedModule
from tests.tracing.checks import assert_same, exact, targets


class Tied(nn.Module):
    """A tied head, a layer called twice, an unused layer, a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.embedding = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale + self.offset
        x = self.layer(F.dropout(self.layer(x), 0.1, self.training))
        noise = torch.rand(x.shape[0], 1, 1) if self.training else 0.0
        return self.head(x + noise).view(x.shape[0], -1)


def tokens(n: int) -> Tensor:
    return torch.randint(8, (n, 3))


def by_pickle(gm: fx.GraphModule) -> fx.GraphModule:
    return pickle.loads(pickle.dumps(gm))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_acts_the_same_in_both_modes(duplicate: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    model = Tied().eval()
    gm = exact(model, tokens(2), tokens(5))
    other = duplicate(gm)
    assert isinstance(other, TracedModule)
    assert list(other.state_dict()) == list(model.state_dict())
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert other.get_parameter("head.weight") is other.get_parameter("embedding.weight")
    assert other.get_parameter("scale") is not model.scale
    assert targets(other) == targets(gm)
    assert [node.meta for node in other.graph.nodes] == [node.meta for node in gm.graph.nodes]
    assert not other.training
    assert_same(other, model, tokens(4))


def test_a_saved_module_loads(tmp_path: Path) -> None:
    model = Tied()
    gm = exact(model, tokens(2))
    torch.save(gm, tmp_path / "traced.pt")
    assert_same(torch.load(tmp_path / "traced.pt", weights_only=False), model, tokens(2))


class InFormat(nn.Module):
    """Asks for a memory format, which the protocol of torch.save has no way to store."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.contiguous(memory_format=torch.channels_last))
        return self.last(x.relu().clone(memory_format=torch.preserve_format))


def test_a_module_with_memory_formats_is_saved(tmp_path: Path) -> None:
    model, x = InFormat(), torch.randn(2, 3, 4, 4)
    gm = exact(model, x)
    for made in (gm, plain(trace(model, x))):
        torch.save(made, tmp_path / "made.pt")
        found = torch.load(tmp_path / "made.pt", weights_only=False)
        assert torch.equal(found(x), model(x))
        assert found(x).is_contiguous(memory_format=torch.channels_last)


def test_a_dense_checkpoint_loads() -> None:
    gm = trace(Tied(), tokens(2))
    other = Tied()
    gm.load_state_dict(other.state_dict(), strict=True)
    assert_same(gm, other, tokens(2))


def test_a_copied_graph_may_be_edited_without_touching_the_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    gm = trace(model, torch.randn(2, 4))
    gm.delete_submodule("0.1")
    gm.add_submodule("0.mask", nn.Identity())
    assert [name for name, _ in model.named_modules()] == ["", "0", "0.0", "0.1", "1"]


def test_the_graph_compiles_without_a_break() -> None:
    model = Tied()
    gm = exact(model, tokens(2))
    compiled = torch.compile(gm, fullgraph=True, backend="aot_eager")
    for training in (False, True):
        gm.train(training)
        inputs = tokens(2)
        torch.manual_seed(1)
        wanted = gm(inputs)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(inputs), wanted)


def test_the_original_model_still_trains_the_same_parameters() -> None:
    model = Tied().train()
    gm = trace(model, tokens(2))
    gm(tokens(2)).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.startswith("unused"))


class Marked(Tensor):
    """Tensors of a class of the user's, as fastai has them."""


class Marks(nn.Module):
    """Makes its result, and what lies in the middle, tensors of that class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).as_subclass(Marked).relu()
        return self.last(self.mid(x.as_subclass(Tensor)).relu()).as_subclass(Marked)


def test_tensors_of_a_class_of_the_users_are_made() -> None:
    gm = exact(Marks(), torch.randn(2, 4), torch.randn(3, 4))
    assert type(gm(torch.randn(2, 4))) is Marked
    copied = pickle.loads(pickle.dumps(gm))
    assert type(copied(torch.randn(2, 4))) is Marked


def test_channels_go_beside_tensors_of_a_class_of_the_users() -> None:
    torch.manual_seed(0)
    net, x = Marks(), torch.randn(2, 4)
    for width in (4, 2):
        prepared = prepare(net, PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), x)
        assert "a Marked computes in its own way" in str(explain(prepared))
        step(prepared)
        net = convert(prepared)
        assert net.get_parameter("mid.weight").shape == (width, 8)
        torch.testing.assert_close(net(x), prepared.eval()(x))
        written = pickle.dumps(net)
        assert b"pdp_fx" not in written
        assert type(pickle.loads(written)(x)) is Marked
