"""What a model decides by the dtypes of tensors: the graph insists on it, or does as the model does."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdp_fx import Channels, PruneSpec, Schedule, convert, prepare, step
from pdp_fx.trace import trace
from tests.tracing.checks import exact, under

HALF_KINDS = torch.float16, torch.bfloat16
EPSILON = {torch.float32: 0.5, torch.float64: 0.25, torch.float16: 2.0, torch.bfloat16: 3.0}


class Decides(nn.Module):
    """Does something by the dtype of a result or of a weight."""

    def __init__(self, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.layer, self.weight = act, nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x), self.weight)


def clamped(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float16:
        x = x.clamp(-0.1, 0.1)
    return x * weight


def looked_up(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * EPSILON[x.dtype]


def looked_up_or_not(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.dtype
    return x * weight * EPSILON.get(kind, 1.0)


def named(x: Tensor, weight: Tensor) -> Tensor:
    size, kind = x.shape[0], x.dtype
    scale = 3.0 if kind is not torch.float32 else 1.0
    return x * weight * scale / size


def kind_of(x: Tensor) -> torch.dtype:
    return x.dtype


def returned(x: Tensor, weight: Tensor) -> Tensor:
    return (x if kind_of(x) not in HALF_KINDS else x.abs()) * weight


def by_bytes(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * x.dtype.itemsize


def of_weight(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.abs()
    return x * weight


def unequal(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype).abs()
    return x * weight


def converts(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    return F.linear(x, weight.diag())


def of_parts(x: Tensor, weight: Tensor) -> Tensor:
    if x[0].dtype != weight[:2].dtype:
        x = x.abs()
    return x * weight


class Kept:
    dtype = torch.float32


def as_kept(x: Tensor, weight: Tensor) -> Tensor:
    return (x.abs() if x.dtype != Kept.dtype else x) * weight if Kept.dtype == weight.dtype else x * 2


def unequal_names(x: Tensor, weight: Tensor) -> Tensor:
    mine = x.dtype
    theirs = weight.dtype
    return (x.abs() if mine != theirs else x) * weight


def one_of_two(x: Tensor, weight: Tensor) -> Tensor:
    return (x if x.dtype in (weight.dtype, torch.float16) else x.abs()) * weight


def lowest(dtype: torch.dtype, factor: float = 1.0) -> float:
    return -factor if dtype == torch.float16 else 3 * factor


class Lowest(nn.Module):
    """Gives a number by a dtype that it is told."""

    def forward(self, size: int, *, kind: torch.dtype) -> float:
        return lowest(factor=2.0, dtype=kind) / size


LOWEST = Lowest()


def asked(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * lowest(x.dtype)


def asked_twice(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.dtype
    return x * weight * LOWEST(x.shape[1], kind=kind)


def promoted(x: Tensor, weight: Tensor) -> Tensor:
    kind = torch.promote_types(x.dtype, torch.bfloat16)
    return (x.to(torch.float64) * weight).to(kind)


def promoted_together(x: Tensor, weight: Tensor) -> Tensor:
    return (x.to(torch.float64) * weight).to(torch.promote_types(x.dtype, weight.dtype))


def of_result(x: Tensor, weight: Tensor) -> Tensor:
    kind = torch.result_type(x, weight)
    return x.double().to(kind) * weight.to(torch.result_type(weight, 2.5))


def in_a_generator(x: Tensor, weight: Tensor) -> Tensor:
    return x * (weight.abs() * 2 if any(each.dtype == torch.float16 for each in (x, weight)) else weight)


def matched(x: Tensor, weight: Tensor) -> Tensor:
    match x.dtype:
        case torch.float32:
            return x * weight
        case _:
            return x * weight * 2


def paired(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * {(torch.float32, torch.float32): 2.0}.get((x.dtype, weight.dtype), 3.0)


def by_its_place(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * [torch.float32, torch.float64, torch.bfloat16, torch.float16].index(x.dtype)


def by_the_size_of_a_number(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * getattr(x.dtype, "itemsize")  # noqa: B009 models write it so


def by_type(x: Tensor, weight: Tensor) -> Tensor:
    return (x.abs() if "Half" in x.type() or x.type().endswith("DoubleTensor") else x) * weight


def of_type(x: Tensor, weight: Tensor) -> Tensor:
    kind = weight.type()
    return x * weight * torch.arange(4).type(kind) + torch.arange(4).type(dtype=x.type())


def of_one_kind(x: Tensor, weight: Tensor) -> Tensor:
    return (x if x.type() == weight.type() else x.abs().type(weight.type())) * weight


def spelt(x: Tensor, weight: Tensor) -> Tensor:
    kind = str(x.dtype)
    return (x.abs() if "16" in kind else x) * weight


def formatted(x: Tensor, weight: Tensor) -> Tensor:
    return (x.abs() if f"{x.dtype}"[-2:] == "16" else x) * weight


def put_into_a_text(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.dtype
    return (x.abs() if "%s" % kind in ("torch.float16", "torch.bfloat16") else x) * weight  # noqa: UP031


def formatted_by_name(x: Tensor, weight: Tensor) -> Tensor:
    return (x.abs() if "{}".format(x.dtype).endswith("16") else x) * weight  # noqa: UP032


def said(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.dtype
    text = f"of {x.dtype}"
    if len(x) > 100:
        raise ValueError(f"too many of {kind}, " + text)
    return x * weight


def got(x: Tensor, weight: Tensor) -> Tensor:
    return (x.abs() if getattr(x, "dtype") == torch.float64 else x) * weight  # noqa: B009 models write it so


def of_an_attribute(x: Tensor, weight: Tensor) -> Tensor:
    kept = SimpleNamespace()
    kept.kind = x.dtype
    return (x if kept.kind == torch.float32 else x.abs()) * weight


def of_attributes_in_turn(x: Tensor, weight: Tensor) -> Tensor:
    kept = SimpleNamespace()
    kept.now = x.dtype
    kept.last = kept.now
    kept.now = kept.last
    return (x if kept.now == torch.float32 else x.abs()) * weight


def of_a_list(x: Tensor, weight: Tensor) -> Tensor:
    kinds = [x.dtype, weight.dtype]
    return (x if kinds[0] == torch.float32 else x.abs()) * weight


def of_a_set(x: Tensor, weight: Tensor) -> Tensor:
    return (x if {part.dtype for part in (x, weight)} == {torch.float32} else x.abs()) * weight


def of_a_dict(x: Tensor, weight: Tensor) -> Tensor:
    kinds = {"x": x.dtype, "weight": weight.dtype}
    return (x if kinds.get("x") == torch.float32 else x.abs()) * weight


def put_into_a_dict(x: Tensor, weight: Tensor) -> Tensor:
    kinds: dict[str, torch.dtype] = {}
    kinds["x"] = x.dtype
    return (x if kinds["x"] == torch.float32 else x.abs()) * weight


def by_options(x: Tensor, weight: Tensor) -> Tensor:
    options: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    return x * weight * torch.full((4,), 0.3, **options)


def back_by_a_function(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.dtype

    def back(y: Tensor) -> Tensor:
        return y.to(kind)

    return back((x * weight).float().softmax(-1))


def back_by_a_default(x: Tensor, weight: Tensor) -> Tensor:
    def back(y: Tensor, kind: torch.dtype = x.dtype) -> Tensor:
        return y.to(kind)

    return back((x * weight).float().softmax(-1))


def back_by_a_list(x: Tensor, weight: Tensor) -> Tensor:
    parts = [x, weight]
    kinds = [part.dtype for part in parts]
    first, second = (part.float().exp().to(kind) for part, kind in zip(parts, kinds, strict=True))
    return first * second


def back_by_an_attribute(x: Tensor, weight: Tensor) -> Tensor:
    kept = SimpleNamespace(before=x.dtype)
    return (x * weight).float().softmax(-1).to(kept.before)


def kind_and_size(x: Tensor) -> tuple[torch.dtype, int]:
    return x.dtype, x.shape[0]


def back_by_a_pair(x: Tensor, weight: Tensor) -> Tensor:
    kind, _ = kind_and_size(x)
    return (x * weight).float().softmax(-1).to(kind)


def back_or_else(x: Tensor, weight: Tensor) -> Tensor:
    kind = None or x.dtype
    return (x * weight).float().softmax(-1).to(kind)


def back_to_the_first(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.dtype
    y = x.float() * weight.to(weight.dtype)
    return (y * x.to(dtype=weight.dtype)).to(kind)


def back_by_one_of_two(x: Tensor, weight: Tensor) -> Tensor:
    kind, other = x.dtype, weight.dtype
    return (x.to(other).softmax(-1) * weight).to(kind)


def given_back(y: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
    return y.softmax(-1).to(weight.dtype).to(kind)


def back_by_an_argument(x: Tensor, weight: Tensor) -> Tensor:
    return given_back(x.float() * weight, weight, x.dtype)


def to_a_constant(x: Tensor, weight: Tensor) -> Tensor:
    kind = {"full": torch.float32}["full"]
    return (x * weight).to(kind).softmax(-1).to(x.dtype)


OTHERS = {torch.float16, torch.bfloat16, torch.float64}
HALVES = {torch.float16, torch.bfloat16}

FAILING: dict[Callable[[Tensor, Tensor], Tensor], tuple[set[torch.dtype], set[torch.dtype]]] = {
    clamped: ({torch.float16}, {torch.float16}),
    looked_up: (OTHERS, HALVES),
    looked_up_or_not: (OTHERS, HALVES),
    named: (OTHERS, HALVES),
    returned: (HALVES, HALVES),
    by_bytes: (OTHERS, HALVES),
    of_weight: (HALVES, set()),
    unequal: (set(), HALVES),
    unequal_names: (set(), HALVES),
    of_parts: (set(), HALVES),
    as_kept: (OTHERS, HALVES),
    converts: (set(), set()),
    one_of_two: (OTHERS, HALVES),
    asked: ({torch.float16}, {torch.float16}),
    asked_twice: ({torch.float16}, {torch.float16}),
    paired: (OTHERS, HALVES),
    by_its_place: (OTHERS, HALVES),
    by_the_size_of_a_number: (OTHERS, HALVES),
    promoted: ({torch.bfloat16, torch.float64}, {torch.bfloat16}),
    of_result: (OTHERS, set()),
    in_a_generator: ({torch.float16}, {torch.float16}),
    matched: (OTHERS, HALVES),
    promoted_together: (OTHERS, set()),
    by_type: (OTHERS, HALVES),
    of_type: (set(), set()),
    of_one_kind: (set(), HALVES),
    spelt: (OTHERS, HALVES),
    formatted: (OTHERS, HALVES),
    put_into_a_text: (OTHERS, HALVES),
    formatted_by_name: (OTHERS, HALVES),
    said: (set(), set()),
    got: ({torch.float64}, set()),
    of_an_attribute: (OTHERS, HALVES),
    of_attributes_in_turn: (OTHERS, HALVES),
    of_a_list: (OTHERS, HALVES),
    of_a_set: (OTHERS, HALVES),
    of_a_dict: (OTHERS, HALVES),
    put_into_a_dict: (OTHERS, HALVES),
    by_options: (OTHERS, HALVES),
    back_by_a_function: (OTHERS, HALVES),
    back_by_a_default: (OTHERS, HALVES),
    back_by_a_list: (OTHERS, HALVES),
    back_by_an_attribute: (OTHERS, HALVES),
    back_by_a_pair: (OTHERS, HALVES),
    back_or_else: (set(), set()),
    back_to_the_first: (set(), set()),
    back_by_one_of_two: (set(), set()),
    back_by_an_argument: (set(), set()),
    to_a_constant: (set(), set()),
}
"""Ways to decide by a dtype, and where a graph of float32 fails: after which casts, under which autocasts."""


def fails(gm: Callable[[Tensor], Tensor], model: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether the graph insists on a dtype; if it does not, it gives what the model gives."""
    try:
        found = gm(x)
    except AssertionError as err:
        if " decides by " not in str(err):
            raise
        return True
    wanted = model(x)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    return False


@pytest.mark.parametrize("act", FAILING)
def test_decisions_hold_after_a_cast_or_fail(act: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Decides(act), torch.randn(3, 4)
    gm = exact(model, x, torch.randn(3, 4))
    failed = {
        dtype
        for dtype in (torch.float32, *OTHERS)
        if fails(copy.deepcopy(gm).to(dtype), copy.deepcopy(model).to(dtype), x.to(dtype))
    }
    assert failed == FAILING[act][0]


@pytest.mark.parametrize("act", FAILING)
def test_decisions_hold_under_autocast_or_fail(act: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Decides(act), torch.randn(3, 4)
    gm = exact(model, x)
    failed = {dtype for dtype in HALVES if fails(partial(under, dtype, gm), partial(under, dtype, model), x)}
    assert failed == FAILING[act][1]


class Converts(nn.Module):
    """Two layers, and a conversion between them where it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if x.dtype != self.last.weight.dtype:
            x = x.to(self.last.weight.dtype)
        return self.last(x)


def test_a_model_that_converts_where_needed_is_pruned_by_channels_and_compiled() -> None:
    torch.manual_seed(0)
    model, x = Converts(), torch.randn(3, 4)
    prepared = prepare(model, PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), x)
    assert torch.equal(under(torch.bfloat16, prepared, x), under(torch.bfloat16, model, x))
    compiled = torch.compile(prepared, fullgraph=True, backend="eager")
    assert torch.equal(under(torch.bfloat16, compiled, x), under(torch.bfloat16, model, x))
    step(prepared)
    small = convert(prepared)
    assert small.get_parameter("first.weight").shape == (4, 4)
    torch.testing.assert_close(small(x), prepared.eval()(x))
    assert small.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


class Masks(nn.Module):
    """Adds a mask, or selects by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return self.layer(x).masked_fill(mask, 0.0)
        return self.layer(x) * mask


def test_the_graph_insists_on_the_kind_of_inputs_that_decides() -> None:
    model, x, mask = Masks(), torch.randn(3, 4), torch.rand(3, 4) < 0.5
    gm = exact(model, (x, mask))
    with pytest.raises(AssertionError, match="decides by mask.dtype == torch.bool"):
        gm(x, mask.long())
    gm = exact(model, (x, mask.long()))
    assert torch.equal(gm(x, mask.int()), model(x, mask.int()))
    with pytest.raises(AssertionError):
        gm(x, mask)


def on_gpu(x: Tensor, weight: Tensor) -> Tensor:
    return (x.abs() if x.device.type == "cuda" else x) * weight


def on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    return (x if x.device.type == "cpu" else x.abs()) * weight


def one_of_kinds(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.device.type
    return (x.abs() if kind in ("cuda", "mps") else x) * weight


def a_device(x: Tensor, weight: Tensor) -> Tensor:
    return (x if x.device == torch.device("cpu") else x.abs()) * weight


def no_device(x: Tensor, weight: Tensor) -> Tensor:
    return (x if x.device != torch.device("cuda") else x.abs()) * weight


def together(x: Tensor, weight: Tensor) -> Tensor:
    if weight.device != x.device:
        weight = weight.to(x.device).abs()
    return x * weight


def of_one_type(x: Tensor, weight: Tensor) -> Tensor:
    kind = x.device.type
    if x.device.type != weight.device.type or kind != weight.device.type:
        return x.abs()
    return x * weight


def together_by_name(x: Tensor, weight: Tensor) -> Tensor:
    mine = x.device
    theirs = weight.device
    return x * weight if mine == theirs else x.abs() * weight.to(mine)


def in_text(x: Tensor, weight: Tensor) -> Tensor:
    return x * (weight.abs() if "cuda" in weight.device.type else weight)


def kept_there(device: torch.device) -> float:
    return 2.0 if device.type == "cpu" else 3.0


def in_a_function(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight * kept_there(x.device)


def not_there(x: Tensor, weight: Tensor) -> Tensor:
    return x.abs() * weight if x.is_cuda or weight.is_cuda else x * weight


def nowhere(x: Tensor, weight: Tensor) -> Tensor:
    device = x.device
    return x * weight if device is not None else x.abs() * weight  # pyright: ignore[reportUnnecessaryComparison]


def there(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight if x.is_cpu else x.abs() * weight


MOVED: dict[Callable[[Tensor, Tensor], Tensor], bool] = {
    on_gpu: False,
    on_cpu: True,
    one_of_kinds: False,
    a_device: True,
    no_device: False,
    together: False,
    together_by_name: False,
    of_one_type: False,
    in_text: False,
    in_a_function: True,
    not_there: False,
    nowhere: False,
    there: True,
}
"""Ways to decide by a device, and whether a graph of the CPU fails on another."""


@pytest.mark.parametrize("act", MOVED)
def test_decisions_hold_on_another_device_or_fail(act: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm = exact(Decides(act), torch.randn(3, 4), torch.randn(2, 4)).to("meta")
    found: Tensor | None = None
    try:
        found = gm(torch.randn(3, 4, device="meta"))
    except AssertionError as err:
        if " decides by " not in str(err):
            raise
    assert (found is None) == MOVED[act]


class Placed(nn.Module):
    """Says where it is by a property."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        """That of its parameters."""
        return next(parameter.device for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        if self.device != x.device:
            x = x.to(self.device).abs()
        return self.layer(x)


def test_a_property_is_compared_with_what_it_reads() -> None:
    gm = exact(Placed(), torch.randn(3, 4))
    assert gm.to("meta")(torch.randn(3, 4, device="meta")).shape == (3, 4)


class InBlocks(nn.Module):
    """Leaves autocast in a block."""

    def __init__(self, block: Callable[[Tensor], torch.autocast]) -> None:
        super().__init__()
        self.block, self.layer = block, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with self.block(x):
            return self.layer(x.float())


BLOCKS: dict[Callable[[Tensor], torch.autocast], bool] = {
    lambda x: torch.autocast(x.device.type, enabled=False): True,
    lambda x: torch.autocast(device_type=str(x.device), enabled=False): True,
    lambda x: torch.autocast("cpu", enabled=False): False,
    lambda _: torch.autocast("cpu", torch.float16): False,
}
"""Blocks, and whether they are for the device of a tensor."""


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_autocast_are_for_the_device_of_the_model(
    block: Callable[[Tensor], torch.autocast],
) -> None:
    model, x = InBlocks(block), torch.randn(3, 4)
    gm = exact(model, x)
    assert torch.equal(under(torch.bfloat16, gm, x), under(torch.bfloat16, model, x))
    enters = [node for node in gm.graph.nodes if node.target is torch.amp.autocast_mode._enter_autocast]
    assert [node.args[0] != "cpu" for node in enters] == [BLOCKS[block]]
    compiled = torch.compile(gm, fullgraph=True, backend="eager")
    assert torch.equal(under(torch.bfloat16, compiled, x), under(torch.bfloat16, model, x))


class Window(nn.Module):
    """Multiplies by a window."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.window


def test_a_module_that_is_made_and_moved_to_where_a_tensor_is_follows_it() -> None:
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return Window().to(y)(y)

    model = Windowed()
    gm = exact(model, torch.randn(3, 4))
    x = torch.randn(5, 4)
    for dtype in (torch.float64, torch.bfloat16):
        wanted, got = model.to(dtype)(x.to(dtype)), gm.to(dtype)(x.to(dtype))
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)
    model.float()
    gm.float()
    assert torch.equal(under(torch.bfloat16, gm, x), under(torch.bfloat16, model, x))


class KeepsItsDtype(nn.Module):
    """Goes back to a dtype that the default of an argument has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)

        def back(y: Tensor, dtype: torch.dtype = x.dtype) -> Tensor:
            return y.to(dtype)

        return self.head(back(x.double() / 3) * 1.1)


def test_under_autocast_a_kept_dtype_is_tried_on_other_numbers_than_zeros() -> None:
    model = KeepsItsDtype()
    gm = trace(model, torch.zeros(2, 4))
    x = torch.randn(2, 4)
    assert torch.equal(gm(x), model(x))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match="a dtype that was kept"):
        gm(x)
