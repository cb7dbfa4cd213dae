import copy
import dataclasses
import importlib
import io
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import pdp_fx
from pdp_fx import Channels, Unstructured
from pdp_fx.plain import plain
from pdp_fx.spec import Rule
from pdp_fx.trace import trace
from tests.nets import NETS, listing, net, pruned, shake

Way = Callable[[fx.GraphModule], fx.GraphModule]


class Awkward(nn.Module):
    """What `torch.fx` cannot trace again: a buffer cut by a size, a slice assigned to, a random number."""

    table: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.randn(20, 6))
        self.register_buffer("scratch", torch.ones(6), persistent=False)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        x = self.norm(self.fc(x)) + self.table[: x.shape[0]] * scale
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1]
        noise = torch.rand(()) + self.scratch
        return {"sum": shifted + noise, "first": torch.ops.aten.clamp.default(x, 0.0)}


def copy_of(bare: fx.GraphModule) -> fx.GraphModule:
    return copy.deepcopy(bare)


def pickled(bare: fx.GraphModule) -> fx.GraphModule:
    return pickle.loads(pickle.dumps(bare))


def saved(bare: fx.GraphModule) -> fx.GraphModule:
    file = io.BytesIO()
    torch.save(bare, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Way] = {
    "deepcopy": copy_of,
    "pickle": pickled,
    "torch.save": saved,
    "copied and pickled": lambda bare: pickled(copy_of(bare)),
    "pickled twice": lambda bare: pickled(pickled(bare)),
    "saved, copied and saved": lambda bare: saved(copy_of(saved(bare))),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def awkward() -> tuple[fx.GraphModule, Tensor]:
    x = torch.randn(4, 6)
    return plain(trace(shake(Awkward()), x)), x


def same(one: nn.Module, other: nn.Module, x: Tensor) -> bool:
    outputs: list[dict[str, Tensor]] = []
    for model in (one, other):
        torch.manual_seed(3)
        outputs.append(model(x))
    return outputs[0].keys() == outputs[1].keys() and all(
        torch.equal(outputs[0][key], outputs[1][key]) for key in outputs[0]
    )


@every_way
def test_what_comes_back_is_the_same_graph(way: Way) -> None:
    bare, x = awkward()
    back = way(bare)
    assert listing(back) == listing(bare)
    assert back.code == bare.code
    assert list(back.state_dict()) == list(bare.state_dict())
    assert type(back).__name__ == "Awkward"
    assert same(bare, back, x)
    # Nothing is frozen: neither the number of rows nor the random number.
    assert same(bare, back, torch.randn(7, 6))
    assert not torch.equal(back(x)["sum"], back(x)["sum"])


@every_way
def test_training_flags_and_added_attributes_come_along(
    way: Way,
) -> None:
    bare, _ = awkward()
    assert not any(module.training for module in bare.modules())
    assert not any(module.training for module in way(bare).modules())
    assert all(module.training for module in way(bare.train()).modules())


def test_a_shallow_copy_is_pickled_exactly() -> None:
    bare, x = awkward()
    shallow = copy.copy(bare)
    assert shallow.get_parameter("fc.weight") is bare.get_parameter("fc.weight")
    assert same(bare, pickled(shallow), x)


def test_added_attributes_are_pickled() -> None:
    bare, _ = awkward()
    bare.classes = ["cat", "dog"]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert vars(pickled(bare))["classes"] == ["cat", "dog"]


@every_way
@pytest.mark.parametrize("name", NETS)
def test_ordinary_nets_come_back_bit_for_bit(name: str, way: Way) -> None:
    model, x = net(name)
    bare = plain(trace(model, x))
    back = way(bare)
    assert torch.equal(back(x), bare(x))
    assert not {id(p) for p in back.parameters()} & {id(p) for p in bare.parameters()}


def test_shared_tensors_and_modules_stay_shared() -> None:
    model, x = net("tied")
    back = pickled(plain(trace(model, x)))
    assert back.get_parameter("encoder.weight") is back.get_parameter("decoder.weight")


def test_the_pickle_names_nothing_of_ours() -> None:
    bare, _ = awkward()
    assert b"pdp_fx" not in pickle.dumps(bare)


READER = """
import pickle, sys, torch
sys.modules["pdp_fx"] = None
with open(sys.argv[1], "rb") as file:
    model, x, expected = pickle.load(file)
torch.manual_seed(3)
found = model(x)
assert all(torch.equal(found[key], expected[key]) for key in expected)
assert isinstance(model, torch.fx.GraphModule)
again = pickle.loads(pickle.dumps(model))
torch.manual_seed(3)
found = again(x)
assert all(torch.equal(found[key], expected[key]) for key in expected)
"""


def test_a_reader_needs_torch_only(tmp_path: Path) -> None:
    bare, x = awkward()
    torch.manual_seed(3)
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps((bare, x, bare(x))))
    command = [sys.executable, "-c", READER, str(path)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)


class Result:
    """What a model of today returns: an object with attributes, a class among them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.sizes, self.kind = logits, [logits.shape[0]], Result


class ReturnsObject(nn.Module):
    """Returns an object, and picks a layer by its data in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.limit = nn.Linear(6, 6), 0.0

    def chosen(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > self.limit and not self.training else -x

    def forward(self, x: Tensor) -> Result:
        return Result(self.fc(self.chosen(x)))


READER_OF_OBJECTS = """
import pickle, sys, torch
sys.path.insert(0, sys.argv[2])
sys.modules["pdp_fx"] = None
with open(sys.argv[1], "rb") as file:
    model, x, expected = pickle.load(file)
for sign, wanted in zip((1, -1), expected):
    found = model(sign * x)
    assert type(found).__name__ == "Result" and found.sizes == [4] and found.kind is type(found)
    assert torch.equal(found.logits, wanted)
"""


def test_a_reader_of_objects_and_methods_needs_torch_and_the_users_code(tmp_path: Path) -> None:
    home = tmp_path / "users_code.py"
    lines = Path(__file__).read_text().split("class Result:")[1].split("READER_OF_OBJECTS")[0]
    home.write_text(f"from torch import Tensor, nn\nclass Result:{lines}")
    sys.path.insert(0, str(tmp_path))
    try:
        model: nn.Module = importlib.import_module("users_code").ReturnsObject().eval()
    finally:
        sys.path.remove(str(tmp_path))
    x = torch.randn(4, 6)
    bare = plain(trace(model, x))
    expected = [model(x).logits, model(-x).logits]
    assert [bare(sign * x).logits.tolist() for sign in (1, -1)] == [found.tolist() for found in expected]
    assert torch.equal(copy_of(bare)(x).logits, expected[0])
    written = pickle.dumps((bare, x, expected))
    assert b"pdp_fx" not in written
    path = tmp_path / "model.pkl"
    path.write_bytes(written)
    command = [sys.executable, "-c", READER_OF_OBJECTS, str(path), str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)


@dataclasses.dataclass
class Record(OrderedDict[str, Any]):
    """Like the output classes of transformers: a dataclass and a dict at once."""

    first: Tensor | None = None
    last: Tensor | None = None


class FillsInReverse(nn.Module):
    """Its record has its items in another order than its fields."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Record:
        record = Record(self.fc(x), x)
        record["last"], record["first"] = record.last, record.first
        return record


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_items_of_a_record_keep_their_order(way: Way) -> None:
    model, x = FillsInReverse(), torch.randn(4, 6)
    gm = trace(model, x)
    bare = way(plain(gm))
    assert b"pdp_fx" not in pickle.dumps(bare)
    for found in (gm(x), bare(x)):
        assert type(found) is Record
        assert list(found) == ["last", "first"]
        assert found.first is found["first"]
        assert found.last is found["last"]
        assert torch.equal(found["first"], model(x)["first"])
        assert torch.equal(found["last"], x)


def test_only_what_the_graph_uses_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model.add_module("unused", nn.Module())
    gm = trace(model[:1], torch.randn(2, 4))
    gm.add_submodule("spare", nn.Linear(100, 100))
    assert [name for name, _ in plain(gm).named_children()] == ["0"]


def twice(x: Tensor) -> Tensor:
    return 2 * x


def test_a_function_that_cannot_be_found_again_is_named() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")

    def local(x: Tensor) -> Tensor:
        return x

    graph.output(graph.call_function(local, (graph.call_function(twice, (x,)),)))
    bare = plain(fx.GraphModule(nn.Module(), graph))
    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(bare)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = 16
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class LooksAtPart(nn.Module):
    """A method of the model itself, which is kept whole, looks at a part that the graph calls."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.tail = Part(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.scaled(x, self.part(x)))

    def scaled(self, x: Tensor, y: Tensor) -> Tensor:
        if getattr(self, "part", None) is not None:
            y = y * 2
        return x * y if x.sum() > 0 else x - y


class ReadsWidth(LooksAtPart):
    def scaled(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y if x.sum() > 0 else x - y / self.part.up.out_features


class ReadsWhatIsNotThere(LooksAtPart):
    def scaled(self, x: Tensor, y: Tensor) -> Tensor:
        if hasattr(self.part, "hidden"):
            y = y / self.part.hidden
        elif hasattr(self.part, "hidden_channels"):
            y = y / cast(float, self.part.hidden_channels)
        return x * y if x.sum() > 0 else x - y


@pytest.mark.parametrize("kind", [LooksAtPart, ReadsWidth, ReadsWhatIsNotThere])
@pytest.mark.parametrize("rule", [Channels(ratio=0.5), Unstructured(0.5)], ids=["channels", "unstructured"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_method_looks_at_a_part_as_before(kind: type[LooksAtPart], rule: Rule, inside: bool) -> None:
    model = kind()
    if inside:
        model = nn.Sequential(model, nn.Linear(3, 8), nn.Linear(8, 2))
    elif (kind, type(rule)) == (ReadsWidth, Channels):
        pytest.skip("all channels stay")
    x = torch.rand(5, 4).double()
    masked = pruned(model.double(), rule, x).eval()
    small = pdp_fx.convert(masked)
    for given in (x, -x):
        torch.testing.assert_close(small(given), masked(given), rtol=0, atol=1e-12)
