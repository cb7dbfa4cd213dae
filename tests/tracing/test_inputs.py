import copy
import dataclasses
import enum
import functools
import math
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.channels.nets_norms import Reversed
from tests.nets import at_once
from tests.tracing.checks import exact


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record(OrderedDict[str, Any]):
    """Like the output classes of transformers: a dataclass and a dict at once."""

    scores: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


class Size(enum.Enum):
    HALF = 0.5
    FULL = 1.0


@dataclasses.dataclass
class Given:
    x: Tensor
    scale: float = 1.0


class Holder:
    """An object of a user's own class."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.kind = Holder


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)


class Keywords(Net):
    def forward(self, x: Tensor, *, scale: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.second(torch.relu(self.first(x)))
        if scale is not None:
            y = y * scale
        return y + y if twice else y


class OptionalBias(Net):
    """A bias of None is none to a linear layer, too, but the model does something else then."""

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self.first(x)
        if bias is None:
            return torch.nn.functional.linear(x, self.second.weight) * 2
        return torch.nn.functional.linear(x, self.second.weight, bias)


class Options(Net):
    def forward(self, given: Any, size: Size) -> Tensor:
        if isinstance(given, dict):
            x, scale = given["x"], given.get("scale", 1) + ("other" in given)
        else:
            x, scale = (given.x, given.scale) if isinstance(given, Given) else given
        return self.second(self.first(x)) * (scale or 2) * size.value


class Loss(Net):
    """Wants targets in training mode only."""

    def forward(self, x: Tensor, targets: list[dict[str, Any]] | None = None) -> Tensor:
        y = self.second(self.first(x))
        if not self.training or targets is None:
            return y
        for target in targets:
            y = y + (y - target["y"]).square() * target["weight"]
        return y


class Batch(Net):
    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        x = torch.stack(batch["parts"]).sum(0) + batch["x"]
        return {"logits": self.second(self.first(x)), "x": x}


class Outputs(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        y = self.second(h)
        kinds: dict[str, Any] = {
            "tuple": (y, [h, None, 3]),
            "namedtuple": Pair(y, h),
            "record": Record(scores=y, hidden=(h, x)),
            "ordered": OrderedDict(a=y, b=h),
            "object": Holder(y),
            "sizes": (y, y.shape[0], h.shape),
        }
        return kinds[self.kind]


class Rest(Net):
    def forward(self, *parts: Tensor) -> Tensor:
        return self.second(self.first(torch.cat(parts, 1)[:, : 2 * parts[0].size(1) // 2]))


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


def test_keyword_arguments_keep_their_names_and_defaults() -> None:
    gm = exact(Keywords(), {"x": rows(2), "scale": torch.randn(3)}, {"x": rows(5), "scale": torch.randn(3)})
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    assert [node.target for node in placeholders] == ["x", "scale", "twice"]
    assert [node.args for node in placeholders] == [(), (None,), (False,)]


def test_an_optional_input_that_the_example_leaves_out_stays_out() -> None:
    gm = exact(Keywords(), (rows(2),), (rows(3),))
    with pytest.raises(AssertionError, match="traced with scale=None, twice=False"):
        gm(rows(2), scale=torch.ones(3))


def test_a_plain_argument_keeps_the_value_of_the_example() -> None:
    gm = exact(Keywords(), {"x": rows(2), "twice": True})
    assert torch.equal(gm(torch.ones(1, 4)), gm(torch.ones(1, 4), twice=True))
    with pytest.raises(AssertionError, match="twice=True"):
        gm(rows(2), twice=False)


FOLLOWED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "scaled": lambda x, number: x * number + (1 - number),
    "reversed": lambda x, number: cast(Tensor, Reversed.apply(x * 2, number)),
    "by_a_function": lambda x, number: x * (2 / (1 + math.exp(-10 * number)) - 1),
    "dropped": lambda x, number: torch.nn.functional.dropout(x * 2, number),
    "at_least": lambda x, number: x.clamp(min=max(number, 0.2)),
    "in_a_tensor": lambda x, number: x * torch.tensor([number, 2.0]).sum(),
    "made_whole": lambda x, number: x * int(4 * number),
    "by_chance": lambda x, number: x if torch.rand(1).item() < number else x.flip(0),
}
HELD: dict[str, Callable[[Tensor, float], Tensor]] = {
    "written": lambda x, number: x * (2 if f"{number:.1f}" == "0.5" else 3),
    "as_an_index": lambda x, number: x * [1, 2, 3, 4, 5][int(4 * number)],
    "by_numpy": lambda x, number: x * float(np.exp(number)),
    "by_type": lambda x, number: x * (2 if type(number) is float else 3),
    "by_kind": lambda x, number: x * (2 if isinstance(number, float) else 3),
}


class Numbered(Net):
    """Computes with a number that it is given."""

    def __init__(self, act: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor, number: float = 0.5) -> Tensor:
        return self.second(self.act(self.first(x).relu(), number))


@pytest.mark.parametrize("way", FOLLOWED)
@pytest.mark.parametrize("given", [(), (0.5,)])
def test_a_float_may_be_another_at_each_call(way: str, given: tuple[float, ...]) -> None:
    x = rows(3)
    gm = exact(Numbered(FOLLOWED[way]), (x, *given), *((x, other) for other in (0.9, 0.31, 0.0, 1, 0)))
    with pytest.raises((AssertionError, TypeError)):
        gm(x, None)
    with pytest.raises(AssertionError, match="traced with number=a number"):
        gm(x, torch.tensor(0.5))


@pytest.mark.parametrize("way", HELD)
def test_a_float_of_which_a_plain_one_is_made_stays_what_it_is(way: str) -> None:
    gm = exact(Numbered(HELD[way]), rows(3), (rows(3), 0.5))
    with pytest.raises(AssertionError, match=r"trace with example_inputs (of such numbers|that have it)"):
        gm(rows(3), 0.9)


@pytest.mark.parametrize("ask", [lambda number: number > 0.3, bool, lambda number: number != 0])
def test_a_decision_by_a_float_comes_out_as_it_did(ask: Callable[[float], Any]) -> None:
    def act(x: Tensor, number: float) -> Tensor:
        return x * number if ask(number) else x + 1

    gm = exact(Numbered(act), (rows(3), 0.5), (rows(5), 0.9), (rows(1), 1.0))
    with pytest.raises(
        AssertionError, match=r"decides by numbers, .* trace with example_inputs of such numbers"
    ):
        gm(rows(3), 0.0)


@pytest.mark.parametrize("sign", ["*", "**", "+", ">"])
def test_channels_are_followed_past_a_float_that_may_be_any(sign: str) -> None:
    def act(x: Tensor, number: float) -> Tensor:
        acts = {"*": x * number, "**": x**number, "+": x + number, ">": x.masked_fill(x < 0.1, number)}
        return acts[sign]

    x = rows(6).double()
    model = Numbered(act).double()
    prepared = pdp_fx.prepare(model, at_once(Channels(ratio=0.5)), (x, 2.0))
    for _ in range(2):
        pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_parameter("first.weight").shape[0] == 3
    for number in (2.0, 0.7, 0.0, 1):
        assert torch.allclose(converted(x, number), prepared(x, number), atol=1e-12)


def test_nested_containers_are_reached_into() -> None:
    def batch(n: int, parts: int = 2) -> dict[str, Any]:
        return {"x": rows(n), "parts": [rows(n) for _ in range(parts)]}

    gm = exact(Batch(), (batch(2),), (batch(3),))
    for parts in (1, 3):
        with pytest.raises(AssertionError, match=r"len\(batch\['parts'\]\)=2"):
            gm(batch(2, parts=parts))
    with pytest.raises(AssertionError, match=r"sorted\(batch\)=\['parts', 'x'\]"):
        gm({"x": rows(2)})


class Each(nn.Module):
    """Goes through a list, which has no other check than that of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [self.linear(x) for x in xs]


@pytest.mark.parametrize("length", [2, 4])
def test_lists_of_another_length_are_refused_before_they_are_read(length: int) -> None:
    gm = exact(Each(), ([rows(2) for _ in range(3)],))
    with pytest.raises(AssertionError, match=r"len\(xs\)=3"):
        gm([rows(2) for _ in range(length)])


def test_where_the_model_may_ask_whether_there_is_a_tensor_the_graph_wants_one() -> None:
    gm = exact(OptionalBias(), (rows(2), torch.randn(3)), (rows(3), torch.randn(3)))
    with pytest.raises(AssertionError, match="bias=a tensor"):
        gm(rows(2), None)


def test_what_one_mode_does_not_use_may_be_left_out_there() -> None:
    targets: list[dict[str, Any]] = [{"y": torch.randn(2, 3), "weight": 2.0}]
    gm = exact(Loss(), {"x": rows(2), "targets": targets})
    gm.eval()(rows(3))
    with pytest.raises(AssertionError, match=r"targets\[0\]\['weight'\]=2.0"):
        gm.train()(rows(2), [{**targets[0], "weight": 3.0}])


@pytest.mark.parametrize(
    ("example", "other"),
    [
        ({"scale": 2, "flag": True}, {"scale": 3, "flag": True}),
        ({"scale": 2, "kind": "a"}, {"scale": 2, "kind": "b"}),
        ({"scale": 2, "some": torch.ones(1)}, {"scale": 2, "other": torch.ones(1)}),
        ({"scale": np.float64(2)}, {"scale": np.float64(3)}),
        ((2.0,), (3.0,)),
        ((None,), (1,)),
        (Given(torch.ones(2, 4), 2.0), Given(torch.ones(2, 4), 3.0)),
    ],
)
def test_the_graph_checks_all_in_its_inputs_that_is_no_tensor(example: Any, other: Any) -> None:
    def with_tensor(given: Any) -> Any:
        if isinstance(given, Given):
            return given
        x = torch.ones(2, 4)
        return {"x": x, **given} if isinstance(given, dict) else (x, *given)

    gm = exact(Options(), (with_tensor(example), Size.HALF))
    with pytest.raises(AssertionError, match="traced with"):
        gm(with_tensor(other), Size.HALF)
    with pytest.raises(AssertionError, match="HALF"):
        gm(with_tensor(example), Size.FULL)


class Reduction(enum.IntEnum):
    """A choice that is a number, too."""

    MEAN = 1


class ByKind(nn.Module):
    """Goes by what kind of number it is given."""

    def forward(self, x: Tensor, given: Any, options: Mapping[str, Any]) -> Tensor:
        kinds = (type(each).__name__ for each in (given, options["all"][0]))
        return sum((x * len(kind) for kind in kinds), x)


KINDS_OF_ONE = [1, True, 1.0, Reduction.MEAN]


@pytest.mark.parametrize("example", KINDS_OF_ONE, ids=repr)
def test_what_equals_a_number_of_the_example_may_be_of_another_type(example: Any) -> None:
    x = rows(2)
    gm = exact(ByKind(), (x, example, {"all": [example]}))
    compiled = torch.compile(gm, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, example, {"all": [example]}), gm(x, example, {"all": [example]}))
    for other in KINDS_OF_ONE:
        if type(other) is not type(example) and not (other is Reduction.MEAN and example == 1):
            with pytest.raises(AssertionError, match="traced with"):
                gm(x, other, {"all": [example]})
            with pytest.raises(AssertionError, match="traced with"):
                gm(x, example, {"all": [other]})


def test_numbers_of_numpy_count_as_those_of_python() -> None:
    gm = exact(ByKind(), (rows(2), 3, {"all": [0.5]}))
    gm(rows(2), np.int64(3), {"all": [np.float64(0.5)]})


class Defaults:
    """An object whose values are those of its class, unless it is given others."""

    scale = 2.0


@dataclasses.dataclass
class Scaled:
    """A record with a value of its class."""

    x: Tensor
    scale: ClassVar[float] = 2.0


class Row(list[float]):
    """A list of a class of its own."""


class Scales(nn.Module):
    """Multiplies by what an object says."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x * (given[1] if isinstance(given, list) else given.scale)


@pytest.mark.parametrize(
    "given", [Defaults(), Scaled(torch.ones(2)), Row([1.0, 2.0])], ids=lambda given: type(given).__name__
)
def test_values_of_its_class_and_of_a_list_that_is_an_object_are_those_of_the_example(given: Any) -> None:
    gm = exact(Scales(), (rows(2), copy.deepcopy(given)))
    x = rows(3)
    assert torch.equal(gm(x, given), x * 2)
    if isinstance(given, list):
        given[1] = 7.0
    else:
        given.scale = 7.0
    with pytest.raises(AssertionError, match=r"traced with .*given(\.scale|\[1\])=2.0"):
        gm(rows(3), given)


DOUBLED: Callable[[Tensor], Tensor] = lambda x: x * 2  # noqa: E731


class Settings:
    """An object without tensors that holds itself."""

    def __init__(self, kind: str) -> None:
        self.kinds, self.itself = [kind], self


class Follows(nn.Module):
    """Does what it is given says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        x = self.layer(x)
        if isinstance(given, Settings):
            return x.relu() if given.kinds == ["relu"] else x.tanh()
        if isinstance(given, type):
            return x.relu() if issubclass(given, nn.ReLU) else x.tanh()
        return cast(Tensor, given(x)) if callable(given) else x * sum(given)


@pytest.mark.parametrize(
    ("example", "other", "said"),
    [
        (torch.relu, torch.tanh, "given=relu"),
        (DOUBLED, lambda x: x * 3, "given=<lambda>"),
        (nn.ReLU, nn.Tanh, "given=ReLU"),
        (frozenset({1, 2}), frozenset({1, 3}), r"given=frozenset\(\{1, 2\}\)"),
        (b"\x01", b"\x02", r"given=b'\\x01'"),
        (Settings("relu"), Settings("tanh"), r"given\.kinds\[0\]='relu'"),
    ],
)
def test_functions_and_objects_among_the_inputs_must_be_those_of_the_example(
    example: Any, other: Any, said: str
) -> None:
    model, x = Follows(), rows(2)
    gm = exact(model, (x, example))
    for graph in (gm, pickle.loads(pickle.dumps(gm)) if example is not DOUBLED else copy.deepcopy(gm)):
        assert torch.equal(graph(x, example), model(x, example))
        with pytest.raises(AssertionError, match=f"traced with.* {said}"):
            graph(x, other)


@pytest.mark.parametrize("kind", ["ReLU", "Generator", "Random", "partial"])
def test_what_a_graph_cannot_tell_from_others_is_no_example_input(kind: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "ReLU": nn.ReLU,
        "Generator": torch.Generator,
        "Random": random.Random,
        "partial": lambda: functools.partial(torch.clamp, min=0),
    }
    for given in (made[kind](), [made[kind]()], {"a": (made[kind](),)}):
        with pytest.raises(TraceError, match=f"{kind}.*let the model hold it"):
            trace(Follows(), (rows(2), given))


def test_a_tensor_with_an_attribute_of_its_own_is_no_example_input() -> None:
    x = rows(2)
    x.scale = 5.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TraceError, match="attribute 'scale' of its own.*as another input"):
        pdp_fx.prepare(Net(), at_once(Channels(0.5)), x)


def test_an_array_is_no_example_input() -> None:
    with pytest.raises(TraceError, match="give it as a tensor"):
        trace(Keywords(), {"x": rows(2), "scale": np.ones(3)})


def test_the_same_tensor_given_twice_is_two_inputs() -> None:
    class Two(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.first(x) - self.first(y)

    x = rows(2)
    exact(Two(), (x, x), (rows(2), rows(2)))


@pytest.mark.parametrize("kind", ["tuple", "namedtuple", "record", "ordered", "object", "sizes"])
def test_outputs_keep_their_type(kind: str) -> None:
    gm = exact(Outputs(kind), rows(2), rows(3))
    output = gm(rows(2))
    if kind == "record":
        assert isinstance(output, Record)
        assert list(output) == ["scores", "hidden"]
    if kind == "object":
        assert vars(output)["kind"] is Holder


def test_arguments_without_names_get_some() -> None:
    gm = exact(Rest(), (rows(2), rows(2)), (rows(3), rows(3)))
    assert [node.target for node in gm.graph.nodes if node.op == "placeholder"] == ["parts_0", "parts_1"]


def test_a_generator_is_not_an_example_input() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(TraceError, match="must be a tensor, a tuple"):
        trace(Keywords(), numbers())  # pyright: ignore[reportArgumentType]


def test_wrong_shapes_are_the_models_own_failure() -> None:
    model = Keywords()
    with pytest.raises(TraceError, match="the model itself fails on the example inputs in eval mode") as info:
        trace(model, torch.randn(2, 5))
    assert isinstance(info.value.__cause__, RuntimeError)


class Masked(nn.Module):
    """Attention with a mask, which may be of booleans or of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Asks(nn.Module):
    """Asks a part of its input for its kind."""

    def forward(self, x: Tensor, masks: dict[str, Tensor]) -> Tensor:
        return x + masks["mask"] if masks["mask"].is_floating_point() else x * masks["mask"]


@pytest.mark.parametrize("kind", ["attention", "part"])
def test_a_mask_of_another_kind_is_refused(kind: str) -> None:
    x, booleans = torch.randn(2, 3, 4), torch.ones(3, 3, dtype=torch.bool).triu(1)
    numbers = torch.zeros(3, 3).masked_fill(booleans, -torch.inf)
    model = Masked() if kind == "attention" else Asks()
    wide = {"attention": lambda mask: mask, "part": lambda mask: {"mask": mask[:, :1]}}[kind]
    for one, other in ((booleans, numbers), (numbers, booleans)):
        gm = exact(model, (x, wide(one)))
        with pytest.raises(AssertionError, match="asks for the dtype of an input"):
            gm(x, wide(other))


@dataclasses.dataclass(slots=True)
class Slotted:
    """An input whose attributes are in slots."""

    features: Tensor
    mask: Tensor | None = None


class Plain:
    """The same without a dataclass, and with a base that has slots, too."""

    __slots__ = ("features",)

    def __init__(self, features: Tensor) -> None:
        self.features = features


class Derived(Plain):
    __slots__ = ("mask",)


class Reads(nn.Module):
    """Reads an attribute, and gives an object of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        return type(given)(self.layer(given.features))


@pytest.mark.parametrize("kind", [Slotted, Plain, Derived])
def test_tensors_in_slots_are_inputs(kind: Any) -> None:
    model = Reads()
    gm = trace(model, (kind(torch.randn(2, 4)),))
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(gm(kind(x)).features, model.layer(x))


HIDING: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "function": (lambda x: lambda: x, lambda given: given()),
    "partial": (lambda x: functools.partial(torch.mul, x), lambda given: given(1)),
    "set": (lambda x: {x}, lambda given: next(iter(given))),
    "deque": (lambda x: deque([x]), lambda given: given[0]),
    "ParameterList": (lambda x: nn.ParameterList([x]), lambda given: given[0]),
}


@pytest.mark.parametrize("kind", HIDING)
def test_inputs_that_hide_tensors_are_refused(kind: str) -> None:
    make, read = HIDING[kind]

    class Unpacks(nn.Module):
        def forward(self, given: list[Any]) -> Tensor:
            return read(given[0]) * 2

    with pytest.raises(TraceError, match=f"there is a {kind} in the example inputs"):
        trace(Unpacks(), ([make(torch.randn(2, 4))],))


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes, too, and that does not say so in the way that Python wants."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("kind", [Attributes, MappingProxyType])
def test_inputs_that_cannot_be_copied_are_refused(kind: Any) -> None:
    with pytest.raises(TraceError, match=r"the example inputs cannot be copied \((KeyError|TypeError): "):
        trace(Batch(), (kind({"x": rows(2), "parts": [rows(2)]}),))


class OneOrMany(nn.Module):
    """Takes one sequence or a batch of them.

    Args:
        rank: tells how many axes a tensor has.
    """

    def __init__(self, rank: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.layer, self.rank = nn.Linear(4, 4), rank

    def forward(self, x: Tensor) -> Tensor:
        alone = self.rank(x * 2) == 2
        x = self.layer(x[None] if alone else x)
        x = x - x.mean(1, keepdim=True)
        return x[0] if alone else x


RANKS: tuple[Callable[[Tensor], int], ...] = (
    lambda x: x.dim(),
    lambda x: x.ndim,
    lambda x: len(x.shape),
    lambda x: len(x.size()),
)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("shape", "other"), [((2, 5, 4), (5, 4)), ((5, 4), (2, 5, 4))])
def test_numbers_of_axes_are_those_of_the_example_where_the_model_asks(
    rank: Callable[[Tensor], int], shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    gm = exact(OneOrMany(rank), torch.randn(shape))
    with pytest.raises(AssertionError, match=rf"asks how many axes a tensor has, and x has {len(shape)}"):
        gm(torch.randn(other))


class SizesOfTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.first(x)
        return x if y is None else x + self.second(y).sum(1, keepdim=True) / y.shape[1]


def test_that_a_tensor_is_missing_is_told_before_its_size_is_read() -> None:
    x = torch.randn(2, 8)
    gm = trace(SizesOfTargets(), (x, x))
    with pytest.raises(AssertionError, match="traced with y=a tensor"):
        gm(x)
    padded = {"src": torch.randn(2, 5, 8), "src_key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}
    attention = trace(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), padded)
    with pytest.raises(AssertionError, match="traced with src_key_padding_mask=a tensor"):
        attention(padded["src"])


class Irrep(tuple[int, int]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_that_does_not_say_how_long_it_is_may_be_held() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model.kind = cast(Any, Irrep((1, -1)))
    exact(model, torch.randn(2, 4))


def _weighted(h: Tensor, weight: Tensor) -> Tensor:
    """A weight for each sample, or one for each value."""
    return (h * (weight.unsqueeze(1) if weight.dim() == 1 else weight)).sum()


class OptionallyWeighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        h = self.linear(x)
        return h.sum() if weight is None else _weighted(h, weight)


class WeightedInDict(OptionallyWeighted):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _weighted(self.linear(batch["x"]), batch["weight"])


def test_the_axes_of_optional_arguments_and_of_tensors_inside_others_are_insisted_on() -> None:
    x, each, all_values = torch.randn(3, 4), torch.rand(3), torch.rand(3, 3)
    gm = exact(OptionallyWeighted(), (x, each))
    with pytest.raises(AssertionError, match="asks how many axes a tensor has, and weight has 1"):
        gm(x, all_values)
    assert gm(x, each).isfinite()
    gm = exact(OptionallyWeighted(), (x,))
    assert gm(x).isfinite()
    gm = exact(WeightedInDict(), ({"x": x, "weight": each},))
    with pytest.raises(AssertionError, match=r"and batch\['weight'\] has 1 in this graph"):
        gm({"x": x, "weight": all_values})
