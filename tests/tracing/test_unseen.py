"""What code that a recording does not look into gives back besides tensors, and leaves behind."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import modules
from torch.utils._python_dispatch import TorchDispatchMode

from pdp_fx import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import Around, exact, opaque

LEFT = SimpleNamespace(number=0)


def agree_or_refuse(gm: nn.Module, model: nn.Module, *lengths: int) -> int:
    """Compare a graph with its model on sequences of other lengths; returns how many the graph refuses."""
    refused = 0
    for length in lengths:
        x = torch.randn(2, length, 4)
        wanted = model.eval()(x)
        LEFT.number = 99
        try:
            got = gm.eval()(x)
        except (AssertionError, KeyError):
            refused += 1
        else:
            assert torch.equal(got, wanted)
    return refused


@dataclass
class Record:
    tensor: Tensor
    found: Any


class Pair(NamedTuple):
    tensor: Tensor
    found: Any


def tagged(x: Tensor, found: Any) -> Tensor:
    x.tag = found  # pyright: ignore[reportAttributeAccessIssue]
    return x


PLACES: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[Any], tuple[Tensor, Any]]]] = {
    "tuple": (lambda x, found: (x, found), lambda r: (r[0], r[1])),
    "dict": (lambda x, found: OrderedDict(x=x, found=[found]), lambda r: (r["x"], r["found"][0])),
    "key": (lambda x, found: (x, {found: 1}), lambda r: (r[0], next(iter(r[1])))),
    "record": (Record, lambda r: (r.tensor, r.found)),
    "named tuple": (Pair, lambda r: (r.tensor, r.found)),
    "object": (lambda x, found: SimpleNamespace(x=x, found=found), lambda r: (r.x, r.found)),
    "deque": (lambda x, found: (x, deque([found])), lambda r: (r[0], r[1][0])),
    "attribute": (tagged, lambda r: (r, r.tag)),
}
FOUND: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], float]]] = {
    "int": (lambda x: x.shape[1], float),
    "float": (lambda x: 0.5 * x.shape[1], float),
    "text": (lambda x: f"{x.shape[1]}", float),
    "bytes": (lambda x: b"%d" % x.shape[1], float),
    "range": (lambda x: range(x.shape[1]), lambda found: float(len(found))),
    "size": (lambda x: x.shape, lambda found: float(found[1])),
    "fraction": (lambda x: Fraction(x.shape[1], 3), float),
    "class": (lambda x: int if x.shape[1] > 5 else float, lambda found: 2.0 if found is int else 1.0),
    "dtype": (
        lambda x: torch.half if x.shape[1] > 5 else torch.float,
        lambda found: 2.0 if found is torch.half else 1.0,
    ),
    "None": (lambda x: None if x.shape[1] > 5 else 1, lambda found: 2.0 if found is None else 1.0),
}


class Counts(nn.Module):
    """Keeps a number for its next call, so that it is kept whole, and gives something that it has found."""

    def __init__(self, find: Callable[[Tensor], Any], put: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.find, self.put, self.calls = find, put, 0

    def forward(self, x: Tensor) -> Any:
        self.calls = min(self.calls + 1, 2)
        return self.put(x * self.calls, self.find(x))


class Uses(nn.Module):
    """Multiplies by what its part has found."""

    def __init__(self, part: nn.Module, take: Callable[[Any], tuple[Tensor, Any]], number: Any) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), part, nn.Linear(4, 3)
        self.take, self.number = take, number

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.take(self.part(self.first(x)))
        return self.last(x * self.number(found))


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("found", FOUND)
def test_what_a_part_gives_back_is_checked(place: str, found: str) -> None:
    (put, take), (find, number) = PLACES[place], FOUND[found]
    model = Uses(Counts(find, put), take, number)
    gm = trace(model, torch.randn(2, 5, 4))
    assert list(opaque(gm)) == ["part"]
    model.part.calls = 2  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert agree_or_refuse(gm, model, 5) == 0
    followed = found == "size" and place in ("tuple", "dict", "record", "named tuple", "object")
    assert agree_or_refuse(gm, model, 7, 12) == (0 if followed else 2)


class Noisy(nn.Module):
    """Acts differently in training, and gives a number that is always the same."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return (x + torch.randn_like(x) if self.training else x), 0.5


def test_a_number_that_no_tensor_decides_may_come_back() -> None:
    model = Uses(Noisy(), lambda r: r, float)
    gm = exact(model, torch.randn(2, 5, 4), torch.randn(3, 9, 4))
    assert opaque(gm) == {"part": "acts differently in training mode"}


def test_a_part_that_reads_no_numbers_is_not_run_on_others() -> None:
    """Each such run costs as much as the model."""

    class Counting(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty_like(x).bernoulli_(0.5) if self.training else x

    counts = list[int]()
    for part in (Drops(), nn.Dropout()):
        with Counting() as counting:
            trace(Around(part), torch.randn(2, 4))
        counts.append(counting.products)
    # The first recording shows that it acts differently in training.
    assert counts[0] <= counts[1] + 4


def leave_size(module: nn.Module, x: Any, result: Tensor) -> None:
    LEFT.number = result.shape[1]


def leave_size_in_module(module: Any, x: Any, result: Tensor) -> None:
    module.number = result.shape[1]


def leave_size_before(module: nn.Module, x: tuple[Tensor]) -> None:
    LEFT.number = x[0].shape[1]


def leave_sum(module: nn.Module, x: Any, result: Tensor) -> None:
    LEFT.number = int((result > 0).sum())


class LooksAtHook(nn.Module):
    """Computes with what a hook of its layer has left."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.layer, self.last, self.inside = nn.Linear(4, 4), nn.Linear(4, 3), inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.last(x * (self.layer.number if self.inside else LEFT.number))  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("hook", [leave_size, leave_size_in_module])
def test_a_size_that_a_hook_of_a_layer_leaves_is_insisted_on(hook: Any) -> None:
    model = LooksAtHook(hook is leave_size_in_module)
    model.layer.register_forward_hook(hook)
    assert agree_or_refuse(trace(model, torch.randn(2, 5, 4)), model, 5, 7, 12) == 2


def test_a_size_that_a_hook_leaves_before_its_layer_is_insisted_on() -> None:
    model = LooksAtHook()
    model.layer.register_forward_pre_hook(leave_size_before)
    assert agree_or_refuse(trace(model, torch.randn(2, 5, 4)), model, 5, 7, 12) == 2


def test_a_number_that_a_hook_of_a_layer_reads_does_not_become_a_constant() -> None:
    model = LooksAtHook()
    model.layer.register_forward_hook(leave_sum)
    with pytest.raises(TraceError, match="found in data in layer must get past the graph"):
        trace(model, torch.randn(2, 5, 4))
    around = nn.Sequential(model)
    gm = trace(around, torch.randn(2, 5, 4))
    assert list(opaque(gm)) == ["0"]
    assert agree_or_refuse(gm, around, 5, 7, 12) == 0


def test_a_size_that_a_hook_of_all_modules_leaves_is_insisted_on() -> None:
    model = LooksAtHook()

    def leave(module: nn.Module, x: Any, result: Tensor) -> None:
        if isinstance(module, nn.Linear):
            leave_size(module, x, result)

    handle = modules.module.register_module_forward_hook(leave)
    try:
        assert agree_or_refuse(trace(model, torch.randn(2, 5, 4)), model, 5, 7, 12) == 2
    finally:
        handle.remove()


def with_gradients(layer: nn.Module) -> nn.Module:
    layer.register_full_backward_hook(lambda *_: None)
    return layer


class LeavesSize(nn.Module):
    """Is kept whole for its hook, and leaves a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        LEFT.number = x.shape[1]
        return self.layer(x)


def test_a_size_that_a_part_leaves_is_insisted_on() -> None:
    model = Uses(with_gradients(LeavesSize()), lambda x: (x, None), lambda _: LEFT.number)
    gm = trace(model, torch.randn(2, 5, 4))
    assert list(opaque(gm)) == ["part"]
    assert agree_or_refuse(gm, model, 5, 7, 12) == 2


class Scripted(nn.Module):
    """What TorchScript makes of it is not looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), x.shape[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_what_a_scripted_module_gives_back_is_checked() -> None:
    scripted: Any = torch.jit.script(Scripted())
    model = Uses(scripted, lambda r: r, float)
    gm = trace(model, torch.randn(2, 5, 4))
    assert opaque(gm) == {"part": "is compiled by TorchScript"}
    assert agree_or_refuse(gm, model, 5, 7, 12) == 2


class Sized(torch.autograd.Function):
    """Gives a size beside its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        LEFT.number = x.shape[1]
        return x * 1.0, x.shape[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Apart(torch.autograd.Function):
    """Gives as many tensors as the sequence is long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return tuple(x[:, place] * 1.0 for place in range(x.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.stack(grads, 1)


class Leaves(torch.autograd.Function):
    """Leaves a size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        LEFT.number = x.shape[1]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def of_sized(x: Tensor) -> Tensor:
    x, size = Sized.apply(x)  # pyright: ignore[reportGeneralTypeIssues]
    return x * size


def of_apart(x: Tensor) -> Tensor:
    parts: Any = Apart.apply(x)
    return parts[0] * len(parts)


def of_leaves(x: Tensor) -> Tensor:
    x = Leaves.apply(x)  # pyright: ignore[reportAssignmentType]
    return x * LEFT.number


class LeavesToo(Tensor):
    """Leaves a size where it is multiplied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.mul:
            LEFT.number = args[0].shape[1]
        return super().__torch_function__(func, types, args, kwargs or {})


def of_subclass(x: Tensor) -> Tensor:
    x = (x.as_subclass(LeavesToo) * 1.0).as_subclass(Tensor)
    return x * LEFT.number


def of_unbind(x: Tensor) -> Tensor:
    parts = torch.ops.aten.unbind.int(x, 1)
    return parts[0] * len(parts)


def of_unsafe_split(x: Tensor) -> Tensor:
    parts = torch.unsafe_split(x, 1, 1)
    return parts[0] * len(parts)


LIBRARY = torch.library.Library("unseen", "DEF")
LIBRARY.define("split(Tensor x) -> Tensor[]")
LIBRARY.impl("split", lambda x: [row * 1.0 for row in x.unbind(1)], "CompositeExplicitAutograd")
LIBRARY.define("size(Tensor x) -> (Tensor, int)")
LIBRARY.impl("size", lambda x: (x * 1.0, x.shape[1]), "CompositeExplicitAutograd")


LIBRARY.define("leave(Tensor x, int axis) -> Tensor")


def leave_one(x: Tensor, axis: int) -> Tensor:
    LEFT.number = x.shape[axis] if axis >= 0 else int(x.sum() > 0)
    return x * 1.0


LIBRARY.impl("leave", leave_one, "CompositeExplicitAutograd")


def of_cut(x: Tensor) -> Tensor:
    return torch.ops.unseen.leave(x, 1)[:, : LEFT.number]


def of_split(x: Tensor) -> Tensor:
    parts = torch.ops.unseen.split(x)
    return parts[0] * len(parts)


def of_size(x: Tensor) -> Tensor:
    x, size = torch.ops.unseen.size(x)
    return x * size


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize(
    "function", [of_sized, of_apart, of_leaves, of_cut, of_subclass, of_split, of_unbind, of_unsafe_split]
)
def test_what_functions_give_back_and_leave_is_checked(function: Callable[[Tensor], Tensor]) -> None:
    model = Calls(function)
    assert agree_or_refuse(trace(model, torch.randn(2, 5, 4)), model, 5, 7, 12) == 2


def test_a_number_that_an_operator_leaves_is_no_constant() -> None:
    with pytest.raises(TraceError, match="found in data in leave must get past the graph"):
        trace(Calls(lambda x: torch.ops.unseen.leave(x, -1) * LEFT.number), torch.randn(2, 5, 4))


@pytest.mark.parametrize(("rows", "other"), [(1, 2), (2, 1), (2, 3), (4, 2), (4, 5)])
@pytest.mark.parametrize("use", [lambda x: x[: LEFT.number], lambda x: x + (LEFT.number > 1)])
def test_a_batch_size_that_an_operator_leaves_is_no_constant(
    rows: int, other: int, use: Callable[[Tensor], Tensor]
) -> None:
    model = Calls(lambda x: use(torch.ops.unseen.leave(x, 0))).eval()
    gm, x = trace(model, torch.randn(rows, 5, 4)).eval(), torch.randn(other, 5, 4)
    wanted = model(x)
    try:
        got = gm(x)
    except AssertionError as err:
        assert "holds for a batch of" in str(err)  # noqa: PT017 the graph need not refuse it
    else:
        assert torch.equal(got, wanted)


def test_a_number_of_an_operator_of_others_is_no_constant() -> None:
    """Its name is one of a tensor's methods, too; what it does is not known by that."""
    model = Calls(of_size)
    gm = trace(model, torch.randn(2, 5, 4))
    (reason,) = opaque(gm).values()
    assert "gets a number from size (in its result at [1]) that may depend on numbers in a tensor" in reason
    assert agree_or_refuse(gm, model, 5, 7, 12) == 0


class LeavesWhetherEqual(nn.Module):
    """Is kept whole for its hook, and leaves what a comparison of all numbers says."""

    def forward(self, x: Tensor) -> Tensor:
        LEFT.number = 2 if torch.equal(x, x.abs()) else 3
        return x * 1.0


def test_a_comparison_of_all_numbers_reads_them() -> None:
    model = Uses(with_gradients(LeavesWhetherEqual()), lambda x: (x, None), lambda _: LEFT.number)
    with torch.no_grad():
        model.first.weight.abs_()
        model.first.bias.abs_()
    with pytest.raises(TraceError, match="found in data in part must get past the graph"):
        trace(model, torch.rand(2, 5, 4))


def detect(x: Tensor) -> list[dict[str, Any]]:
    return [{"boxes": x * 1.0} if x.sum() > -1e9 else {}]


class Rescales(nn.Module):
    """Writes into a part of what a part that is kept whole has given, and returns all of it.

    With examples of length five, what it writes is what was there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[dict[str, Any]]:
        found = detect(self.first(x))
        found[0]["boxes"] = found[0]["boxes"] * (x.shape[1] / 5)
        return found


def test_what_is_written_into_a_part_of_a_result_is_in_the_graph() -> None:
    model = Rescales()
    gm = trace(model, torch.randn(2, 5, 4))
    for length in (5, 9):
        x = torch.randn(2, length, 4)
        assert torch.equal(gm(x)[0]["boxes"], model(x)[0]["boxes"])
