import contextlib
import copy
import dataclasses
import math
import statistics
import sys
from collections import UserDict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_structure

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from pdp_fx.tracing.sizes import Session, live
from pdp_fx.tracing.steps import Attribute
from tests.tracing.checks import Computes, exact, opaque, targets


class Windows(nn.Module):
    """Cuts an image into windows and puts it together again, with sizes read from tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        size = 2
        rows, columns = h // size, math.ceil(w / size)
        x = x.view(n, c, rows, size, columns, size).permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, c)
        x = self.linear(x)
        x = x.view(n, rows, columns, size, size, c).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(n, c, h, w) * c**-0.5


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.size(1), device=x.device)
        causal = torch.ones(x.shape[1], x.shape[1]).tril().to(x)
        return causal @ (x + self.table(steps)[None, : x.shape[-2]])


def test_sizes_stay_computations() -> None:
    exact(Windows(), torch.randn(2, 4, 4, 6), torch.randn(3, 4, 4, 6), torch.randn(1, 4, 8, 2))


def test_positions_grow_with_the_input() -> None:
    exact(Positions(), torch.randn(2, 5, 4), torch.randn(3, 7, 4))


class ByExample(nn.Module):
    """Spreads its positions over the batch, unless there are as many rows of them as examples."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        if places.shape[0] != x.shape[0]:
            places = places.expand(x.shape[0], -1)
        return x * places[torch.arange(x.shape[0])]


class One(ByExample):
    """Takes a batch of one only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(1, 4))


def test_a_batch_of_one_is_not_taken_for_another_axis_of_one() -> None:
    exact(ByExample(), torch.randn(1, 4), torch.randn(3, 4))
    exact(ByExample(), torch.randn(2, 4), torch.randn(1, 4))


def test_a_model_for_one_example_is_traced_on_one() -> None:
    exact(One(), torch.randn(1, 4))


class ByNumpy(nn.Module):
    """Takes the batch size through code that makes a plain number of it."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = x.view(self.rows(x.shape), -1, 4)
        y = self.attention(y, y, y, need_weights=False)[0]
        return y.view(x.shape) if scale is None else y.view(x.shape) * scale[..., None]


@pytest.mark.parametrize("rows", [lambda s: int(np.prod(np.array(s[:1]))), lambda s: s[:1].numel()])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_size_that_becomes_a_plain_number_is_checked(rows: Any, size: int) -> None:
    x = torch.randn(size, 5, 4)
    gm = exact(ByNumpy(rows), (x, torch.ones(size, 5)))
    with pytest.raises(AssertionError, match=rf"holds for a batch of {size} only"):
        gm(torch.randn(3, 5, 4), torch.ones(3, 5))


class ChosenByNumpy(nn.Module):
    """Places of the second axis, from an array of whole numbers or of booleans."""

    def __init__(self, places: Any) -> None:
        super().__init__()
        self.linear, self.places = nn.Linear(4, 4), np.array(places)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x[:, self.places] = 0
        return x[:, self.places].sum(1, keepdim=True) + x


@pytest.mark.parametrize("places", [[2, 0], [3], [True, False, False, True, False]])
def test_arrays_of_numpy_choose_places(places: Any) -> None:
    exact(ChosenByNumpy(places), torch.randn(2, 5, 4), torch.randn(3, 5, 4))


class Reversed(nn.Module):
    """Places that NumPy makes of a size."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, np.arange(x.shape[1])[::-1].copy()]


def test_places_that_numpy_makes_of_a_size_are_checked() -> None:
    gm = exact(Reversed(), torch.randn(2, 5, 4), torch.randn(3, 5, 4))
    with pytest.raises(AssertionError, match="decides by sizes"):
        gm(torch.randn(2, 6, 4))


class Shuffled(nn.Module):
    """Other places at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, np.random.permutation(x.shape[1])]


def test_numbers_of_numpy_are_added_as_constants() -> None:
    """Each field of a table has places of its own, as in recommenders."""

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first = nn.Embedding(9, 4), np.array((0, 3, 6), dtype=np.int64)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x + x.new_tensor(self.first).unsqueeze(0))

    gm = exact(Fields(), torch.randint(3, (2, 3)), torch.randint(3, (5, 3)))
    assert not opaque(gm)


def test_places_that_numpy_draws_are_refused() -> None:
    with pytest.raises(TraceError, match="random numbers from outside torch"):
        trace(Shuffled(), torch.randn(2, 5, 4))


class AskingByNumpy(ByNumpy):
    """Does so, and looks at its numbers unless it is being compiled."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling() and x.abs().amax() > 1e9:
            x = x.clamp(-1e9, 1e9)
        return super().forward(x, scale)


def rows(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape).cos()


class Optional(ByNumpy):
    """Takes nothing that cannot be left out."""

    def forward(self, x: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        assert x is not None
        return super().forward(x, scale)


@pytest.mark.parametrize("example", [{"x": rows(1, 5, 4)}, (rows(1, 5, 4), rows(1, 5))])
def test_inputs_that_can_be_left_out_are_checked_too(example: Any) -> None:
    gm = exact(Optional(lambda s: s[:1].numel()), example)
    given = (rows(3, 5, 4), rows(3, 5))
    with pytest.raises(AssertionError, match="holds for a batch of 1 only"):
        gm(*given[: len(example)])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_size_is_checked_whatever_the_example_holds(size: int) -> None:
    gm = exact(ByNumpy(lambda s: s[:1].numel()), torch.zeros(size, 5, 4))
    with pytest.raises(AssertionError, match=f"holds for a batch of {size} only"):
        gm(rows(3, 5, 4))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_size_is_checked_for_the_same_word_over_and_over(size: int) -> None:
    class OfWords(ByNumpy):
        def __init__(self) -> None:
            super().__init__(lambda s: s[:1].numel())
            self.table = nn.Embedding(2, 4)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(self.table(x), scale)

    gm = exact(OfWords(), torch.ones(size, 5, dtype=torch.int64))
    with pytest.raises(AssertionError, match=f"holds for a batch of {size} only"):
        gm(torch.zeros(3, 5, dtype=torch.int64))


def test_a_graph_of_the_compiled_model_is_held_to_its_batch_too() -> None:
    gm = exact(AskingByNumpy(lambda s: s[:1].numel()), (torch.randn(1, 5, 4), torch.ones(1, 5)))
    with pytest.raises(AssertionError, match="holds for a batch of 1 only"):
        gm(torch.randn(3, 5, 4), torch.ones(3, 5))


def test_the_number_of_rows_that_numpy_reads_from_another_axis_is_no_batch_size() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1, int(np.prod(x.shape[1:])))

    exact(Narrow(), torch.randn(1, 5, 4), torch.randn(3, 5, 4))


def test_a_size_is_written_once_for_each_tensor_and_axis() -> None:
    gm = exact(Windows(), torch.randn(2, 4, 4, 6))
    reads = [node.args for node in gm.graph.nodes if node.target == "size"]
    assert len(reads) == len(set(reads))


class Checked(nn.Module):
    """Compares sizes in checks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 4
        assert self.linear.weight.shape[0] == 2
        torch._assert(x.dim() == 2 and x.size(0) < 8, "too many")
        if x.size(0) >= 8:
            x = x[:8]
        return self.linear(x)


def test_what_was_found_of_a_size_is_checked_once() -> None:
    gm = exact(Checked(), torch.randn(2, 4))
    calls = ["dim", "eq", "_assert", "size", "size", "lt", "eq", "_assert", "_assert", "linear"]
    assert targets(gm) == calls
    with pytest.raises(AssertionError, match=r"test_sizes.py:\d+ decides by sizes"):
        gm(torch.randn(8, 4))


class Deciding(nn.Module):
    """Does something to what it gets that depends on sizes."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


def padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 4
    return nn.functional.pad(x, (0, missing)).relu() if missing else x


def halved(x: Tensor) -> Tensor:
    length = x.size(2)
    while length > 3:
        x, length = x[..., ::2], (length + 1) // 2
    return x


def turned(x: Tensor) -> Tensor:
    return x.mT if x.shape[1:] == (4, 8) else x


def by_logarithm(x: Tensor) -> Tensor:
    for _ in range(int(np.log2(x.shape[2]))):
        x = x + 1
    return x


def by_product(x: Tensor) -> Tensor:
    return x / np.prod(x.shape[1:]).item()


def by_the_longer(x: Tensor) -> Tensor:
    return x.flip(max((2, x.shape[2]), (1, 6))[0]) + max([x.shape[2]], key=abs) + max([x.shape[1]])


def by_positions(x: Tensor) -> Tensor:
    return x * 2 if (torch.arange(x.shape[2]) > 6).any() else x


def by_their_list(x: Tensor) -> Tensor:
    return x + sum(torch.arange(x.shape[2]).tolist())


def by_their_array(x: Tensor) -> Tensor:
    return x + float(torch.arange(x.shape[2]).numpy().mean())


def by_equality(x: Tensor) -> Tensor:
    return x * 2 if torch.equal(torch.tensor(x.shape[1:]), torch.tensor([4, 8])) else x


def by_table(x: Tensor) -> Tensor:
    return x * {5: 2.0, 8: 3.0}[x.shape[2]]


def by_name(x: Tensor) -> Tensor:
    return x * {"width5": 2.0, "width8": 3.0}[f"width{x.shape[2]}"]


def by_text(x: Tensor) -> Tensor:
    return x * len(str(x.shape[2]) + 2 * "more")


def by_repeating(x: Tensor) -> Tensor:
    return x * sum([0.5] * x.shape[2])


def by_bits(x: Tensor) -> Tensor:
    return x * x.shape[2].bit_count()


def by_parts(x: Tensor) -> Tensor:
    return x * math.frexp(x.shape[2])[0]


def by_another(x: Tensor) -> Tensor:
    return x * 2 if x.is_same_size(x[..., :5]) else x


def by_a_generator(x: Tensor) -> Tensor:
    return x * torch.randn(x.shape[2], generator=torch.Generator().manual_seed(3)).sum()


BY_SIZES = (
    *(padded, halved, turned, by_logarithm, by_product, by_the_longer),
    *(by_positions, by_their_list, by_their_array, by_equality, by_table, by_name, by_text),
    *(by_repeating, by_bits, by_parts, by_another, by_a_generator),
)


@pytest.mark.parametrize("act", BY_SIZES)
def test_a_graph_does_not_go_the_way_of_other_sizes(act: Any) -> None:
    gm = exact(Deciding(act), rows(1, 4, 8), rows(3, 4, 8))
    says = r"test_sizes.py:\d+ decides by sizes, and by these otherwise"
    with pytest.raises(RuntimeError if act is by_positions else AssertionError, match=says):
        gm(rows(1, 4, 5))


@pytest.mark.parametrize("place", ["<ipython-input-3-b1946ac92492>", "<stdin>", "<string>"])
def test_a_graph_does_not_go_another_way_than_code_without_a_file(place: str) -> None:
    names: dict[str, Any] = {}
    exec(
        compile("def act(x):\n    return -x if x.size(2) > int(x.size(1) * 1.5) else x", place, "exec"), names
    )
    gm = exact(Deciding(names["act"]), rows(1, 4, 8))
    with pytest.raises(AssertionError, match=f"^{place}:2 decides by sizes"):
        gm(rows(1, 4, 5))


def test_a_graph_of_a_graph_goes_the_same_way() -> None:
    gm = exact(exact(Deciding(padded), rows(1, 4, 8)), rows(1, 4, 8), rows(3, 4, 12))
    with pytest.raises(AssertionError, match="decides by sizes, and by these otherwise"):
        gm(rows(1, 4, 5))


def test_a_graph_goes_the_same_way_at_other_sizes() -> None:
    exact(Deciding(padded), rows(1, 4, 8), rows(2, 4, 12))
    exact(Deciding(padded), rows(1, 4, 7), rows(2, 4, 5))
    exact(Deciding(halved), rows(1, 4, 8), rows(2, 4, 9))


def overlapping(x: Tensor) -> Tensor:
    batch, channel, place = x.stride()
    windows = x.as_strided((*x.shape[:2], x.shape[2] - 1, 2), (batch, channel, place, place))
    return windows.sum(3) * x[:, 1:].storage_offset() + x.nbytes  # pyright: ignore[reportReturnType]


def test_strides_and_bytes_are_those_of_the_sizes_at_hand() -> None:
    exact(Deciding(overlapping), rows(1, 4, 8), rows(3, 4, 5))


def test_chunks_may_be_fewer_than_were_asked_for() -> None:
    gm = exact(Deciding(lambda x: x * len(x.chunk(3, 2))), rows(1, 4, 8), rows(1, 4, 9))
    with pytest.raises(AssertionError, match=r"goes up to 3 in this graph"):
        gm(rows(1, 4, 4))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: torch.cat(list(x)),
        lambda x: torch.stack([part for part in x], 1),  # noqa: C416 a comprehension runs a frame of its own
        lambda x: torch.cat(x.split(1), 2),
        lambda x: torch.stack(tensors=x.unbind(0)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_of_all_parts_that_goes_on_whole_may_be_of_any_length(act: Any, size: int) -> None:
    exact(Deciding(act), rows(size, 4, 8), rows(1, 4, 8), rows(2, 4, 8), rows(4, 4, 9))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: torch.cat(parts := list(x)) * len(parts),
        lambda x: torch.cat(parts := list(x)) + parts[0].mean(),
        lambda x: torch.cat(list(x)[::-1]),
        lambda x: torch.cat(list(x)[-1:]),
        lambda x: torch.cat([*x, *x]) if x.unbind(0) else x,
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_of_parts_that_is_used_otherwise_has_the_length_of_the_example(act: Any, size: int) -> None:
    gm = exact(Deciding(act), rows(size, 4, 8))
    with pytest.raises(AssertionError, match=f"holds for a batch of {size} only"):
        gm(rows(size + 1, 4, 8))


def test_a_list_of_parts_along_an_axis_whose_size_was_not_tried_is_checked() -> None:
    gm = exact(Deciding(lambda x: torch.cat(x.unbind(2))), rows(2, 4, 8), rows(3, 4, 8))
    with pytest.raises(AssertionError, match="goes up to 8 in this graph"):
        gm(rows(2, 4, 9))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.unbind(2)[-1],
        lambda x: torch.cat(x.unbind(2)[:3]),
        lambda x: torch.cat(x.split(1, 2)[1:]),
        lambda x: torch.cat(x.unbind(2)[::2]),
        lambda x: x.unbind(2)[x.shape[2] - 1],
    ],
)
def test_parts_that_are_not_counted_from_the_first_are_those_of_the_example(act: Any) -> None:
    gm = exact(Deciding(act), rows(1, 4, 2), rows(3, 4, 2))
    with pytest.raises(AssertionError, match="goes up to 2 in this graph"):
        gm(rows(1, 4, 4))


def test_a_part_that_is_counted_from_the_first_is_there_at_all_sizes() -> None:
    exact(Deciding(lambda x: x.unbind(2)[1]), rows(1, 4, 2), rows(3, 4, 5))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "returned",
    [
        lambda x: {"rows": torch.cat(list(x))},
        lambda x: {"rows": list(x), "again": (torch.cat(list(x)), [x.split(1)])},
        lambda x: x.unbind(),
        list,
    ],
)
def test_a_list_of_all_parts_that_is_returned_may_be_of_any_length(returned: Any, size: int) -> None:
    gm = exact(Deciding(returned), rows(size, 4, 2), rows(3, 4, 2), rows(1, 4, 2))
    assert tree_structure(gm(rows(3, 4, 2))) == tree_structure(returned(rows(3, 4, 2)))


@pytest.mark.parametrize("returned", [lambda x: list(x)[:2], lambda x: [part * 2 for part in x]])
@pytest.mark.parametrize("size", [2, 3])
def test_other_lists_of_parts_that_are_returned_have_the_length_of_the_example(
    returned: Any, size: int
) -> None:
    gm = exact(Deciding(returned), rows(size, 4, 2))
    with pytest.raises(AssertionError, match=f"(batch of|goes up to) {size} "):
        gm(rows(size + 1, 4, 2))


INSISTS = r"test_sizes.py:\d+ reads a size, and the model computes another thing by a number"


def unseen(number: float) -> float:
    """A float that is made as the model runs, and so takes sizes for plain numbers."""
    return float(str(number))


def by_a_number_on_the_left(x: Tensor) -> Tensor:
    return x * (unseen(0.5) * x.shape[2])


def by_a_comparison_with_a_float(x: Tensor) -> Tensor:
    return x * 2 if unseen(5.5) < x.shape[2] else x


def by_a_list_of_them(x: Tensor) -> Tensor:
    return x * [1.0, 2.0, 3.0, 5.0, 7.0, 8.0, 9.0, 11.0, 12.0][x.shape[2]]


@pytest.mark.parametrize("act", [by_a_number_on_the_left, by_a_comparison_with_a_float, by_a_list_of_them])
def test_a_number_made_of_a_size_unseen_holds_the_graph_to_the_size(act: Any) -> None:
    gm = exact(Deciding(act), rows(1, 4, 8), rows(3, 4, 8))
    with pytest.raises(AssertionError, match=INSISTS):
        gm(rows(1, 4, 5))


TABLE = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 5.0]


def by_a_coarse_table(x: Tensor) -> Tensor:
    return x * TABLE[x.shape[2] // 4]


def by_a_part_of_a_list(x: Tensor) -> Tensor:
    return x * sum(TABLE[: x.shape[2]])


def by_a_text(x: Tensor) -> Tensor:
    return x * {"8": 2.0}.get("%d" % x.shape[2], 1.0)  # noqa: UP031


def by_a_limit(x: Tensor) -> Tensor:
    return x * max(int(unseen(0.01) * x.shape[2]), 1)


def by_an_upper_limit(x: Tensor) -> Tensor:
    return x * min(unseen(0.5) * x.shape[2], 1.0)


def beside_no_number(x: Tensor) -> Tensor:
    return by_a_text(x).masked_fill(x > 100, float("nan"))


def beside_a_repair(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = x.nan_to_num()
    return by_a_text(x)


def by_a_copy(x: Tensor) -> Tensor:
    return x * TABLE[copy.deepcopy({"size": x.shape})["size"][2] // 4]


def by_a_fraction(x: Tensor) -> Tensor:
    return x * (x.shape[2] / 4).is_integer()


def by_the_longer_of_two(x: Tensor) -> Tensor:
    rows, columns = (unseen(0.5) * size for size in x.shape[1:])
    return x * 2 if rows > columns else x


def by_steps(x: Tensor) -> Tensor:
    left = int(unseen(0.5) * x.shape[2])
    while left:
        x, left = x * 2, left - 1
    return x


@pytest.mark.parametrize(
    "act",
    [
        *(by_a_coarse_table, by_a_part_of_a_list, by_a_text, by_a_limit, by_an_upper_limit, by_steps),
        *(beside_no_number, beside_a_repair, by_a_copy, by_the_longer_of_two),
    ],
)
def test_a_size_is_insisted_on_where_no_size_near_it_makes_a_difference(act: Any) -> None:
    gm = exact(Deciding(act), rows(1, 4, 8), rows(3, 4, 8))
    with pytest.raises(AssertionError, match=INSISTS):
        gm(rows(1, 4, 1024))


class WithGuide(nn.Module):
    """Takes an image and one of half its size, so that no size is another alone."""

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        return x * guide.repeat_interleave(2, 1) * (unseen(0.5) * guide.shape[1])


def test_a_size_is_insisted_on_that_changes_with_others_only() -> None:
    gm = exact(WithGuide(), (rows(2, 8), rows(2, 4)), (rows(3, 8), rows(3, 4)))
    with pytest.raises(AssertionError, match=INSISTS):
        gm(rows(2, 12), rows(2, 6))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.reshape(-1, int(np.prod(x.shape[1:]))),
        lambda x: x * ([1.0] * x.shape[2] == [1.0] * x.size(2)),
        lambda x: x * x.new_tensor(np.arange(x.shape[1]).sum() / 6),
        lambda x: limited(x, unseen(0.5) * x.shape[2]),
    ],
)
def test_what_the_graph_computes_or_checks_already_is_not_insisted_on(act: Any) -> None:
    gm = exact(Deciding(act), rows(2, 4, 8))
    assert "another thing by a number" not in gm.code


def limited(x: Tensor, length: float) -> Tensor:
    if length > 100:
        raise ValueError("too long")
    return x


class BySelected(nn.Module):
    """Goes by how many numbers of a buffer are selected: by their sign, or by a mask."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act
        self.register_buffer("v", torch.tensor([1.0, 2.0, -1.0, 3.0]))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.act(self)


@pytest.mark.parametrize(
    "act",
    [
        lambda net: TABLE[net.v[net.v > 0].shape[0]],
        lambda net: 2.0 if net.v[net.v > 0].shape[0] > 2 else 1.0,
        lambda net: 2.0 if len((net.v > 0).nonzero()) > 2 else 1.0,
    ],
)
def test_code_that_goes_by_the_numbers_of_a_buffer_is_held_to_them(act: Any) -> None:
    gm = exact(BySelected(act), rows(2, 4))
    assert isinstance(gm.v, Tensor)
    gm.v.copy_(torch.tensor([-1.0, -2.0, -1.0, -1.0]))
    with pytest.raises(AssertionError, match="decides by sizes"):
        gm(rows(2, 4))


def test_code_may_go_by_how_many_a_stored_mask_selects() -> None:
    net = BySelected(lambda net: 2.0 if net.v[net.mask].shape[0] > 2 else 1.0)
    assert "_assert" not in exact(net, rows(2, 4)).code


class ByTruth(nn.Module):
    """Reads from a tensor whether an axis is long."""

    def forward(self, x: Tensor) -> Tensor:
        is_long = (torch.arange(x.shape[1]) > 5).any().item()
        return 2 * x if is_long else x


def test_a_truth_that_is_read_from_a_tensor_of_sizes_is_checked() -> None:
    gm = exact(ByTruth(), (rows(2, 4),), (rows(3, 5),))
    with pytest.raises(RuntimeError, match="decides by sizes"):
        gm(rows(2, 8))
    again = exact(gm, (rows(2, 4),), (rows(3, 5),))
    with pytest.raises(RuntimeError, match="decides by sizes"):
        again(rows(2, 8))


def as_complex(number: Tensor) -> float:
    return complex(number).real


def as_text(number: Tensor) -> float:
    return float(str(number).partition("(")[2].rstrip(")."))


def picked_by_numpy(number: Tensor) -> float:
    return np.arange(9)[int(number)].item()  # does not assert that there are as many


class ByNumber(nn.Module):
    """Goes by a number in a tensor that follows from sizes, or from what it is given."""

    def __init__(self, read: Callable[[Tensor], float], of_given: bool = False) -> None:
        super().__init__()
        self.read, self.of_given = read, of_given

    def forward(self, x: Tensor) -> Tensor:
        number = x.abs().sum().floor() if self.of_given else torch.tensor(x.shape[1])
        return 2 * x if self.read(number) > 5 else x


@pytest.mark.parametrize("read", [as_complex, as_text, picked_by_numpy])
def test_a_number_that_is_read_in_odd_ways_is_checked(read: Callable[[Tensor], float]) -> None:
    gm = exact(ByNumber(read), (rows(2, 4),))
    with pytest.raises(AssertionError, match="decides by sizes|insists|computes another thing"):
        gm(rows(2, 7))


@pytest.mark.parametrize("read", [as_complex, as_text, picked_by_numpy])
def test_a_number_that_is_given_is_not_taken_for_a_plain_one(read: Callable[[Tensor], float]) -> None:
    with pytest.raises(TraceError):
        trace(ByNumber(read, of_given=True), torch.full((1, 4), 0.9))


def test_a_graph_goes_by_whether_a_size_is_a_multiple() -> None:
    gm = exact(Deciding(by_a_fraction), rows(1, 4, 8), rows(3, 4, 8), rows(1, 4, 1024))
    with pytest.raises(AssertionError, match="decides by sizes"):
        gm(rows(1, 4, 1023))


def test_whether_a_quotient_is_whole_is_checked() -> None:
    gm = exact(ByNumber(lambda number: 9.0 if (number.item() / 5).is_integer() else 1.0), (rows(2, 4),))
    x = rows(1, 3)
    assert torch.equal(gm(x), x)
    with pytest.raises(AssertionError, match="decides by sizes"):
        gm(rows(2, 5))


def test_an_axis_of_one_index_is_tried_longer() -> None:
    gm = exact(Deciding(by_a_number_on_the_left), rows(1, 4, 1), rows(3, 4, 1))
    with pytest.raises(AssertionError, match=INSISTS):
        gm(rows(1, 4, 5))


class InTraining(nn.Module):
    """Makes an unseen number of a size in training mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (unseen(0.5) * x.shape[2] if self.training else x.shape[2])


def test_sizes_are_tried_in_training_mode_too() -> None:
    gm = exact(InTraining(), rows(2, 4, 8), rows(3, 4, 8))
    with pytest.raises(AssertionError, match=INSISTS):
        gm.train()(rows(2, 4, 5))


class OneSizeInTraining(nn.Module):
    """Takes rows of one length only in training mode, and makes an unseen number of it in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            assert x.shape[2] == 8
            return x
        return x * (unseen(0.5) * x.shape[2])


def test_sizes_are_tried_that_one_mode_takes() -> None:
    gm = exact(OneSizeInTraining(), rows(2, 4, 8), rows(3, 4, 8))
    with pytest.raises(AssertionError, match=INSISTS):
        gm.eval()(rows(2, 4, 5))


def by_the_batch_on_the_right(x: Tensor) -> Tensor:
    return x * (unseen(1.0) / x.shape[0])


def by_a_list_of_batches(x: Tensor) -> Tensor:
    return x * [1.0, 2.0, 3.0, 5.0][x.shape[0]]


def by_a_text_of_the_batch(x: Tensor) -> Tensor:
    return x * len(str(x.shape[0]))


def by_a_table_of_batches(x: Tensor) -> Tensor:
    return x * {30: 2.0}.get(x.shape[0], 3.0)


def by_a_set_of_batches(x: Tensor) -> Tensor:
    return x * (2.0 if x.shape[0] in {16, 30} else 3.0)


def by_the_batch_in_numpy(x: Tensor) -> Tensor:
    return x * float(np.ceil(x.shape[0] / 20))


def by_a_list_as_long_as_the_batch(x: Tensor) -> Tensor:
    return x * (2.0 if len([0] * x.shape[0]) > 20 else 3.0)


@pytest.mark.parametrize(
    "act",
    [
        by_a_text_of_the_batch, by_a_table_of_batches, by_a_set_of_batches, by_the_batch_in_numpy,
        by_a_list_as_long_as_the_batch,
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_one_batch_more_says_nothing_of_those_that_a_plain_number_tells_apart(act: Any, batch: int) -> None:
    gm = exact(Deciding(act), rows(batch, 4, 3), rows(batch, 4, 5))
    with pytest.raises(AssertionError, match="batch"):
        gm(rows(30, 4, 3))


@pytest.mark.parametrize("most", [np.int64(20), np.float64(20.0), np.float32(20.0), np.int8(20)])
def test_the_batch_may_be_compared_with_a_number_of_numpy(most: Any) -> None:
    def act(x: Tensor) -> Tensor:
        return x * (2.0 if x.shape[0] > most else 3.0)

    gm = exact(Deciding(act), rows(5, 4, 3), rows(7, 4, 5))
    with pytest.raises(AssertionError, match="decides by sizes|batch"):
        gm(rows(30, 4, 3))


class ScaledByNumPy(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x * 2, x[0].numel() * np.log(2.0)


def test_a_size_may_be_computed_with_a_float_of_numpy() -> None:
    gm = exact(ScaledByNumPy(), torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 6))
    assert gm(torch.randn(2, 6))[1] == 6 * np.log(2.0)


@pytest.mark.parametrize("act", [by_the_batch_on_the_right, by_a_list_of_batches])
def test_a_number_made_of_the_batch_unseen_holds_the_graph_to_it(act: Any) -> None:
    gm = exact(Deciding(act), rows(2, 4, 3), rows(2, 4, 5))
    with pytest.raises(AssertionError, match="batch"):
        gm(rows(3, 4, 3))


class ByTheBatchInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (unseen(1.0) / x.shape[0]) if self.training else x


def test_other_batches_are_tried_in_training_mode_too() -> None:
    gm = exact(ByTheBatchInTraining(), rows(2, 4, 3))
    with pytest.raises(AssertionError, match="batch"):
        gm.train()(rows(3, 4, 3))


class Squeezes(nn.Module):
    """Takes away all axes of one index, and puts the batch back if it went."""

    def __init__(self, rank: Callable[[Tensor], int] | None) -> None:
        super().__init__()
        self.conv, self.pool, self.rank = nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), rank

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.conv(x)).squeeze()
        if self.rank is None:
            return y
        return y.unsqueeze(0) if self.rank(y) == 1 else y


@pytest.mark.parametrize(
    "rank", [lambda y: y.ndim, lambda y: y.dim(), lambda y: len(y.shape), lambda y: len(y.size())]
)
def test_code_that_asks_how_many_axes_a_squeeze_has_left_is_held_to_that(
    rank: Callable[[Tensor], int],
) -> None:
    gm = exact(Squeezes(rank), torch.randn(2, 3, 4, 4), torch.randn(5, 3, 4, 4))
    with pytest.raises(AssertionError, match=r"test_sizes.py:\d+ decides by sizes, and by these otherwise"):
        gm(torch.randn(1, 3, 4, 4))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_squeeze_that_nothing_asks_about_is_held_to_nothing(size: int) -> None:
    exact(Squeezes(None), torch.randn(size, 3, 4, 4), torch.randn(1, 3, 4, 4), torch.randn(5, 3, 4, 4))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + unseen(0.1) * (x.shape[3] - x.shape[2]),
        lambda x: x * (unseen(1.0) * x.shape[3] / x.shape[2]),
        lambda x: x * [float(place) for place in range(20)][x.shape[3] - x.shape[2]],
        lambda x: x * max((2, 3), key=lambda axis: x.shape[axis]),
    ],
)
def test_numbers_made_of_two_sizes_that_are_equal_here_hold_the_graph(act: Any) -> None:
    gm = exact(Acting(act), torch.randn(2, 3, 8, 8))
    with pytest.raises(AssertionError, match=f"{INSISTS}|decides by sizes"):
        gm(torch.randn(2, 3, 8, 9))


class Acting(nn.Module):
    """A convolution and a function."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 3, 1), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class ByWidth(nn.Module):
    """Makes an unseen number of the width of images with as many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1.0 / (unseen(2.0) * x.shape[-1]))


def test_axes_of_one_size_are_tried_one_by_one_if_they_do_not_go_together() -> None:
    gm = exact(ByWidth(), torch.rand(2, 8, 8, 8))
    with pytest.raises(AssertionError, match=INSISTS):
        gm(torch.rand(2, 8, 12, 12))


class InWindows(nn.Module):
    """Takes multiples of eight rows only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 8)).sum(1) * (unseen(0.5) * x.shape[1])


def test_twice_the_size_is_tried_too() -> None:
    gm = exact(InWindows(), rows(2, 8, 3))
    with pytest.raises(AssertionError, match=INSISTS):
        gm(rows(2, 16, 3))


class OfTwo(nn.Module):
    """Takes a pair of images in a dict, and a number for each of their columns."""

    def forward(self, images: dict[str, Tensor], weights: Tensor) -> Tensor:
        return (images["left"] * images["right"] * weights).sum(-1) / (unseen(2.0) * weights.shape[0])


def test_sizes_are_tried_in_all_inputs_at_once() -> None:
    images = {"left": torch.randn(2, 3, 6), "right": torch.randn(2, 3, 6)}
    gm = exact(OfTwo(), (images, torch.randn(6)))
    shorter = {name: image[..., :4] for name, image in images.items()}
    with pytest.raises(AssertionError, match=INSISTS):
        gm(shorter, torch.randn(4))
    more = {name: torch.cat([image, image]) for name, image in images.items()}
    torch.testing.assert_close(gm(more, torch.ones(6)), OfTwo()(more, torch.ones(6)))


class WithinCapacity(nn.Module):
    """Each expert takes as many rows as there are in all, made of a float on the left, so none is lost."""

    def __init__(self, place: int, modes: tuple[bool, ...]) -> None:
        super().__init__()
        self.place, self.modes, self.fc = place, modes, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        capacity = 10**6
        if self.training in self.modes:
            capacity = math.ceil(unseen(2.0) * x.shape[self.place])
        taken = torch.ones_like(x).cumsum(self.place) <= capacity
        return self.fc(x) * taken


@pytest.mark.parametrize("modes", [(False, True), (True,), (False,)], ids=["both", "training", "eval"])
@pytest.mark.parametrize(("place", "held"), [(0, "this graph holds for a batch of 2 only"), (1, INSISTS)])
def test_a_number_that_follows_a_size_unseen_is_found_where_outputs_show_nothing(
    place: int, held: str, modes: tuple[bool, ...]
) -> None:
    gm = exact(WithinCapacity(place, modes), rows(2, 5, 4))
    longer = [1, 1]
    longer[place] = 3
    with pytest.raises(AssertionError, match=held):
        gm.train(modes[0])(rows(2, 5, 4).repeat(*longer, 1))


HALF = 0.5


@dataclasses.dataclass
class Ratios:
    """What a model is configured with."""

    kept: float = 0.8


def default_of(size: int, *, ratio: float = 0.25) -> int:
    return int(ratio * size)


class ByFloats(nn.Module):
    """Computes with sizes behind floats: written, global, by default, its own, and its configuration's."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.ratios = 1.5, Ratios()

    @property
    def doubled(self) -> float:
        return 2.0

    @staticmethod
    def moved(size: int) -> float:
        return -0.5 + 3.0 / size

    def forward(self, x: Tensor) -> Tensor:
        long, wide = x.shape[1:]
        x = x.roll(int(HALF * long), 1) * (0.1 * (wide % 4)) + 1.0 / long
        x = x.topk(max(1, int(self.ratios.kept * long)), 1)[0] * (self.doubled**2 - wide)
        return x[..., : math.ceil(self.factor * wide)] + default_of(wide) + self.moved(long)


def test_floats_see_the_sizes_that_they_are_combined_with() -> None:
    model = ByFloats()
    before = {name: value for name, value in vars(model).items() if isinstance(value, float)}
    exact(model, rows(2, 8, 6), rows(3, 5, 7), rows(1, 12, 9))
    assert type(HALF) is type(model.factor) is type(model.ratios.kept) is float
    assert all(getattr(model, name) is value for name, value in before.items())
    assert not any(type(value) is not float for value in ByFloats.moved.__code__.co_consts if value == -0.5)


def test_floats_of_notebooks_and_of_classes_in_functions_see_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (0.5 * x.shape[1])

    notebook = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    cell = """
from torch import nn
RATIO = 0.8
class Typed(nn.Module):
    def forward(self, x):
        return x.topk(int(RATIO * x.shape[1]), 1)[0] * 0.5
"""
    exec(compile(cell, "<ipython-input-1-aa>", "exec"), vars(notebook))
    for model in (Inside(), vars(notebook)["Typed"]()):
        exact(model, rows(2, 8, 6), rows(2, 5, 6), rows(3, 12, 6))


def test_comparisons_of_floats_with_sizes_are_checked() -> None:
    gm = exact(Deciding(lambda x: x * 2 if 5.5 < x.shape[2] else x), rows(1, 4, 8), rows(2, 4, 6))  # noqa: SIM300
    with pytest.raises(AssertionError, match=r"test_sizes.py:\d+ decides by sizes"):
        gm(rows(1, 4, 5))


class Cools(nn.Module):
    """Keeps a float from call to call, which is no other for being looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature = 0.9 * self.temperature
        return x / self.temperature


def test_floats_that_change_from_call_to_call_are_found() -> None:
    model = Cools()
    with pytest.raises(TraceError, match="temperature"):
        trace(model, rows(2, 4))
    assert type(model.temperature) is float
    assert model.temperature == 1.0


def as_square(x: Tensor) -> Tensor:
    side = int(math.sqrt(x.shape[2]))
    return x.unflatten(2, (side, side)).mT.flatten(2)


def cut(x: Tensor) -> Tensor:
    return x[..., : min(size for size in x.shape[1:])] + x[..., -min(x.shape[1], x.shape[2], 100) :] * max(
        x.shape[2], 9
    )


def scaled(x: Tensor) -> Tensor:
    return x / float(x.shape[1] * x.shape[2]) + math.gcd(x.shape[2], 6) + math.log(x.shape[2], 2)


def shifted(x: Tensor) -> Tensor:
    return x * (x.shape[2] << 1 | 1) + (~x.shape[2] ^ 5) + math.cos(x.shape[2]) + math.factorial(x.shape[1])


def by_a_product_of_all(x: Tensor) -> Tensor:
    return x.flatten(1) * math.prod(x.shape) + math.prod((size for size in x.shape[1:]), start=2)


def by_the_largest(x: Tensor) -> Tensor:
    return x * max(x.shape[1:]) + min([x.shape[2]])


def last_position(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[2])
    last = place[-1:]
    place += 1
    return x * last.item()


def told(x: Tensor) -> Tensor:
    if x.shape[2] < 1:
        raise ValueError(f"{x.shape[2]} is too short")
    print(x.shape, f"{x.shape[2]:5}", str(x.shape[0]))  # noqa: T201
    return x


@pytest.mark.parametrize(
    "act", [as_square, cut, scaled, shifted, by_a_product_of_all, by_the_largest, last_position, told]
)
def test_functions_of_sizes_stay_computations(act: Any) -> None:
    exact(Deciding(act), rows(1, 4, 4), rows(3, 4, 16), rows(2, 4, 9), rows(2, 4, 1))


def test_ways_that_lead_to_the_same_end_are_not_told_apart() -> None:
    gm = exact(ByExample(), torch.randn(3, 4))
    assert "_assert" not in targets(gm)


def test_sizes_of_weights_are_read_from_the_weights() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(-1, self.linear.weight.shape[0])

    assert targets(exact(Scaled(), torch.randn(2, 4))) == ["linear", "linear.weight", "size", "view"]


def test_the_number_of_elements_and_a_constants_item_stay_alive() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            count = torch.tensor([x.shape[0], 2]).max().item()
            return x.sum() / x.numel() + torch.zeros(int(count) if count < 0 else 1)

    exact(Mean(), torch.randn(2, 4), torch.randn(3, 4))


def named(x: Tensor) -> int:
    shape = x.shape
    return shape[1:].numel()


def sliced_and_named(x: Tensor) -> int:
    inner: torch.Size = x.size()[1:]
    return inner[:1].numel() * inner[1:].numel()


@pytest.mark.parametrize("product", [lambda x: x.shape[1:].numel(), named, sliced_and_named])
def test_the_product_of_a_shape_stays_alive(product: Callable[[Tensor], int]) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return y.reshape(-1, product(y)).sum(1) / product(y) + y.shape.numel()

    exact(Flat(), torch.randn(2, 3, 4, 4), torch.randn(4, 3, 4, 2))


def test_the_device_is_read_from_the_tensor() -> None:
    gm = exact(Positions(), torch.randn(2, 5, 4))
    reads = [node for node in gm.graph.nodes if node.target is getattr]
    assert [node.args[1] for node in reads] == ["device"]


def test_live_numbers_act_like_numbers() -> None:
    session = Session(lambda fact, on_purpose: None)
    n: Any = live(6, Attribute("n"), session)
    assert (n + 1, 1 + n, n // 4, n % 4, -n, n / 4, n**2, 7 - n, divmod(n, 4)) == (
        7,
        7,
        1,
        2,
        -6,
        1.5,
        36,
        1,
        (1, 2),
    )
    assert (math.floor(n / 4), math.ceil(n / 4), round(n / 4), abs(-n)) == (1, 2, 2, 6)
    assert {n: "six"}[6] == "six"
    assert n == 6
    assert n > 5
    assert copy.deepcopy(n) is n
    assert vars(n * 2)["value"].args == (Attribute("n"), 2)
    assert n + 0 is n
    assert 1 * n is n


def test_live_numbers_end_with_their_recording() -> None:
    session = Session(lambda fact, on_purpose: None)
    n = live(6, Attribute("n"), session)
    session.open = False
    assert type(n + 1) is int
    assert type(copy.copy(n)) is int
    assert type(math.floor(n / 4)) is int


class Counts(nn.Module):
    """Divides by the number of rows, counts places by it, and asks whether there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x
        order = x.sum(-1).argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return self.linear(x[order])[back] / len(x) + len(self.linear.weight)


def test_the_length_of_a_tensor_stays_alive() -> None:
    gm = exact(Counts(), torch.randn(3, 4), torch.randn(5, 4))
    assert len(torch.randn(3, 4)) == 3
    assert targets(gm).count("size") == 3


FAILING: dict[str, Callable[[int], float]] = {
    "//": lambda n: 12 // (n - 6),
    "%": lambda n: n % (n - 6),
    "/": lambda n: 0.5 / (n - 6),
    "<<": lambda n: 1 << (n - 8),
    "sqrt": lambda n: math.sqrt(n - 8),
    "log": lambda n: math.log(n - 6),
}


class Catches(nn.Module):
    """Goes on with another factor where arithmetic with a size fails."""

    def __init__(self, compute: Callable[[int], float], checks: bool) -> None:
        super().__init__()
        self.net, self._compute, self._checks = nn.Linear(4, 4), compute, checks

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        try:
            factor = self._compute(length)
        except (ZeroDivisionError, ValueError):
            factor = 5
        x = self.net(x) * factor
        return x[:, :-1] if self._checks and length > 3 else x


@pytest.mark.parametrize("compute", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("checks", [False, True])
def test_the_graph_insists_on_sizes_with_which_arithmetic_fails(
    compute: Callable[[int], float], checks: bool
) -> None:
    model = Catches(compute, checks)
    gm = exact(model, torch.randn(2, 6, 4), torch.randn(3, 6, 4))
    for length in (3, 7, 9, 12):
        with pytest.raises(AssertionError, match=r"decides by sizes|holds for inputs of size 6 only"):
            gm(torch.randn(2, length, 4))


class Parses(nn.Module):
    """Reads a size out of the text of an error, and refuses nothing; a check decides by another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            raise ValueError(f"{x.shape[1]}")
        except ValueError as err:
            x = self.net(x) * int(str(err))
        return x[:, :-1] if x.shape[1] > 3 else x


def test_a_size_that_the_graph_refuses_does_not_end_the_search_for_wrong_ones() -> None:
    gm = exact(Parses(), torch.randn(2, 6, 4))
    for length in (3, 5, 12):
        with pytest.raises(AssertionError, match="holds for inputs of size 6 only"):
            gm(torch.randn(2, length, 4))


class Packed(nn.Module):
    """Sequences of different lengths through a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        result, _ = self.rnn(packed)
        return pad_packed_sequence(result, batch_first=True, total_length=x.shape[1])[0]


def test_packed_sequences_are_made_when_the_graph_runs() -> None:
    gm = exact(Packed(), (torch.randn(3, 5, 4), torch.tensor([5, 2, 3])))
    model = Packed()
    model.load_state_dict(gm.state_dict())
    other = torch.randn(2, 5, 4), torch.tensor([3, 5])
    assert torch.equal(gm.eval()(*other), model.eval()(*other))


def by_a_remainder_of_a_power(x: Tensor) -> Tensor:
    return x * pow(x.shape[2], 2, 7)


def by_a_mean(x: Tensor) -> Tensor:
    return x * statistics.mean([x.shape[2], 4])


@pytest.mark.parametrize("act", [by_a_remainder_of_a_power, by_a_mean])
def test_what_makes_plain_numbers_of_sizes_holds_the_graph_to_them(act: Any) -> None:
    gm = exact(Deciding(act), rows(1, 4, 8), rows(3, 4, 8))
    with pytest.raises(AssertionError, match=f"decides by sizes|{INSISTS}"):
        gm(rows(1, 4, 6))


class FallsBack(nn.Module):
    """Does something else where an operation does not bear the sizes."""

    def __init__(self, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.layer, self.positions = act, nn.Linear(4, 4), nn.Parameter(torch.randn(1, 7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x), self.positions)


def positions_or_mean(x: Tensor, positions: Tensor) -> Tensor:
    try:
        return x + positions
    except RuntimeError:
        return x + positions.mean(1, keepdim=True)


def seventh_or_none(x: Tensor, positions: Tensor) -> Tensor:
    try:
        return x * positions[:, x.shape[1] :].sum() + x[:, 6:7] * x[:, 6].sum()
    except IndexError:
        return x * 2


def pairs_or_none(x: Tensor, positions: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        x = x.unflatten(1, (2, -1)).sum(1)
    return x * positions[:, :1]


@pytest.mark.parametrize("act", [positions_or_mean, seventh_or_none, pairs_or_none])
def test_the_graph_insists_on_sizes_with_which_an_operation_fails(
    act: Callable[[Tensor, Tensor], Tensor],
) -> None:
    failing = 5 if act is pairs_or_none else 6
    gm = exact(
        FallsBack(act), torch.randn(2, failing, 4), torch.randn(3, failing, 4), torch.randn(1, failing, 4)
    )
    with pytest.raises(AssertionError, match="decides by sizes"):
        gm(torch.randn(2, 8, 4))


class Counter(nn.Module):
    """Counts up from the batch size, a step at a time."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        for _ in range(self.steps):
            count = count + 1
        return self.linear(x) * count


def test_a_size_may_be_computed_in_many_steps() -> None:
    exact(Counter(400), torch.randn(2, 4), torch.randn(5, 4))
    with pytest.raises(TraceError, match="in more steps, each from the one before, than can be followed"):
        trace(Counter(5_000), torch.randn(2, 4))


class LoopsOverExamples(nn.Module):
    """Takes examples one by one, those of a batch of one only, or of all."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.linear = always, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.always or len(x) == 1:
            return torch.stack([self.linear(x[place]) for place in range(len(x))])
        return self.linear(x)


def test_a_loop_over_the_batch_is_traced_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdp_fx.trace._from_other_batch", None)
    gm = exact(LoopsOverExamples(always=True), torch.randn(2, 4))
    with pytest.raises(AssertionError, match="holds for a batch of 2 only"):
        gm(torch.randn(3, 4))


def test_a_loop_for_a_batch_of_one_is_not_taken_for_the_way_of_all() -> None:
    exact(LoopsOverExamples(always=False), torch.randn(1, 4), torch.randn(2, 4), torch.randn(5, 4))


def takes_the_last(x: Tensor) -> Tensor:
    return x / x.shape[-1]


def asks_for_the_last(x: Tensor) -> Tensor:
    return x / x.size(-1)


def takes_all_but_the_first(x: Tensor) -> Tensor:
    return x / math.prod(x.shape[1:])


def unpacks_the_rest(x: Tensor) -> Tensor:
    *lead, width = x.shape
    return x / (math.prod(lead) + width)


def tries_to_unpack(x: Tensor) -> Tensor:
    try:
        batch, width = x.shape
    except ValueError:
        return x
    return x / (batch * width)


def walks_the_sizes(x: Tensor) -> Tensor:
    return x * sum(place * size for place, size in enumerate(x.shape))


def matches_the_sizes(x: Tensor) -> Tensor:
    match x.shape:
        case (batch, width):
            return x / (batch * width)
        case _:
            return x


@pytest.mark.parametrize(
    "act",
    [
        takes_the_last,
        asks_for_the_last,
        takes_all_but_the_first,
        unpacks_the_rest,
        tries_to_unpack,
        walks_the_sizes,
        matches_the_sizes,
    ],
)
def test_what_is_done_with_a_shape_may_go_by_how_many_axes_there_are(act: Any) -> None:
    model = Computes(act)
    gm = trace(model, (torch.randn(2, 4),))
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(gm(x), model(x))
    with pytest.raises(AssertionError, match="asks how many axes a tensor has, and x has 2 in this graph"):
        gm(torch.randn(2, 3, 4))


def test_fewer_axes_are_refused_before_a_size_that_is_not_there_is_asked_for() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.tensor(x.shape).sum()

    gm = trace(Net(), (torch.randn(2, 4),))
    with pytest.raises(AssertionError, match="asks how many axes a tensor has, and x has 2 in this graph"):
        gm(torch.randn(4))


def takes_the_first(x: Tensor) -> Tensor:
    return x / x.shape[0]


def takes_the_first_two(x: Tensor) -> Tensor:
    return x / math.prod(x.shape[:2])


def unpacks_two(x: Tensor) -> Tensor:
    batch, width = x.shape[:2]
    return x / (batch + width)


@pytest.mark.parametrize("act", [takes_the_first, takes_the_first_two, unpacks_two])
def test_sizes_that_are_counted_from_the_first_are_there_whatever_follows(act: Any) -> None:
    model = Computes(act)
    gm = trace(model, (torch.randn(2, 4),))
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(gm(x), model(x))


class Broadcasts(nn.Module):
    """Divides by how many numbers there are in the shape to which two inputs are broadcast."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum() / math.prod(torch.broadcast_shapes(x.shape, y.shape, (1,)))


def test_the_shape_to_which_others_are_broadcast_is_computed_anew() -> None:
    model = Broadcasts()
    gm = trace(model, (torch.randn(2, 5, 4), torch.randn(2, 1, 4)))
    x, y = torch.randn(2, 7, 4), torch.randn(2, 1, 4)
    torch.testing.assert_close(gm(x, y), model(x, y))
    with pytest.raises(AssertionError, match="by sizes"):
        gm(torch.randn(2, 1, 4), torch.randn(2, 5, 4))


class Listed(Sequence[int]):
    """Sizes in a class of their own."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, place: Any) -> Any:
        return self.sizes[place]


def is_listed(x: Tensor) -> Tensor:
    return x if x.shape[1] in Listed(4, 6) else x * 2


def counts_in_list(x: Tensor) -> Tensor:
    return x * Listed(4, 6).count(x.shape[1])


def is_a_value(x: Tensor) -> Tensor:
    return x if x.shape[1] in UserDict(a=4, b=6).values() else x * 2


@pytest.mark.parametrize("act", [is_listed, counts_in_list, is_a_value])
def test_pythons_own_classes_compare_for_the_model(act: Any) -> None:
    model = Computes(act)
    gm = trace(model, (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    torch.testing.assert_close(gm(x), model(x))
    with pytest.raises(AssertionError, match="by sizes"):
        gm(torch.randn(2, 5))


def is_small(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] in (1, 2) else x


def is_a_power(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] in (2, 4, 8) else x


def stacks_some(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(0)[:4])


def pairs_some(x: Tensor) -> Tensor:
    return torch.stack([row * number for row, number in zip(x, range(4), strict=False)])


@pytest.mark.parametrize(
    ("act", "batch"), [(is_small, 1), (is_a_power, 4), (stacks_some, 2), (pairs_some, 2)]
)
def test_another_batch_says_nothing_of_all_others(act: Any, batch: int) -> None:
    model = Computes(act)
    gm = trace(model, (torch.randn(batch, 4),))
    for size in (1, 2, 3, 6):
        x = torch.randn(size, 4)
        try:
            got = gm(x)
        except AssertionError:
            continue
        torch.testing.assert_close(got, model(x))
    x = torch.randn(batch, 4)
    torch.testing.assert_close(gm(x), model(x))


def tries_a_view(x: Tensor) -> Tensor:
    try:
        x.view(x.shape[0], -1, 4)
    except RuntimeError:
        return x * 2
    return x


def tries_in_a_call(x: Tensor) -> Tensor:
    def second_row() -> None:
        x[1]

    factor = 1.0
    try:
        second_row()
    except IndexError:
        factor = 2.0
    return x * factor


@pytest.mark.parametrize(("act", "shape"), [(tries_a_view, (2, 6)), (tries_in_a_call, (1, 8))])
def test_what_is_only_tried_fails_in_the_graph_too(act: Any, shape: tuple[int, ...]) -> None:
    model = Computes(act)
    gm = exact(model, torch.randn(2, 8), torch.randn(3, 12))
    x = torch.randn(shape)
    assert torch.equal(model(x), x * 2)
    with pytest.raises((RuntimeError, IndexError), match=r"is invalid for input of size 12|out of bounds"):
        gm(x)
