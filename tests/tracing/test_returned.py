"""Numbers that parts which are kept whole return, and inputs that only training needs."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdp_fx import Channels, PruneSpec, Schedule, convert, prepare, step
from pdp_fx.trace import trace
from pdp_fx.tracing import exact
from pdp_fx.tracing.examples import TRIALS, ExampleCall
from pdp_fx.tracing.outcome import Outcome
from pdp_fx.tracing.verify import difference, tried
from tests.tracing.checks import opaque


@dataclass
class Record:
    tensor: Tensor
    number: Any


class Pair(NamedTuple):
    tensor: Tensor
    number: Any


class Slotted:
    __slots__ = ("number", "tensor")

    def __init__(self, tensor: Tensor, number: Any) -> None:
        self.tensor, self.number = tensor, number


PUT: dict[str, Callable[[Tensor, Any], Any]] = {
    "tuple": lambda x, number: (x, number),
    "list": lambda x, number: [x, number],
    "dict": lambda x, number: {"tensor": x, "number": number},
    "record": Record,
    "named tuple": Pair,
    "object": lambda x, number: SimpleNamespace(tensor=x, number=number),
    "object with slots": Slotted,
    "nested": lambda x, number: SimpleNamespace(tensor=x, number=[(number, 1), (number, 2)]),
}
FOUND: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda x: x.shape[1],
    "float": lambda x: x.shape[1] / 2,
    "number of NumPy": lambda x: np.int64(x.shape[1]),
    "number of data": lambda x: int(x.abs().sum().item() * 10) % 5 + 1,
}


def take(made: Any) -> tuple[Tensor, Any]:
    if isinstance(made, tuple | list):
        tensor, number = made
    elif isinstance(made, dict):
        tensor, number = made["tensor"], made["number"]
    else:
        tensor, number = made.tensor, made.number
    return tensor, number[0][0] if isinstance(number, list) else number


class Counts(nn.Module):
    """Keeps a number for its next call, so that it is kept whole, and gives one that it has found."""

    def __init__(self, put: Callable[[Tensor, Any], Any], find: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.put, self.find, self.calls = put, find, 0

    def forward(self, x: Tensor) -> Any:
        self.calls = min(self.calls + 1, 2)
        return self.put(x * self.calls, self.find(x))


class Takes(nn.Module):
    """Is kept whole, and takes all that another part has made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, made: Any) -> Tensor:
        self.calls = min(self.calls + 1, 2)
        x, number = take(made)
        return x.repeat(1, 1, int(number))[..., :4] / float(number)


class Passes(nn.Module):
    """Multiplies by a number that a part gives, or hands all that it gives to another part."""

    def __init__(self, part: nn.Module, on: bool) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), part, nn.Linear(4, 3)
        self.takes = Takes() if on else None

    def forward(self, x: Tensor) -> Tensor:
        made = self.part(self.first(x))
        if self.takes is not None:
            return self.last(self.takes(made))
        x, number = take(made)
        return self.last(x * (2 * number + 1))


def agree(model: nn.Module, gm: nn.Module, training: bool, *args: Any) -> bool:
    """Whether a graph gives what its model gives; it may also refuse the call."""
    example = ExampleCall(args, {})
    wanted, got = tried(model, example, training), tried(gm, example, training, model)
    assert isinstance(wanted, Outcome), wanted
    if isinstance(got, AssertionError):
        return False
    assert isinstance(got, Outcome), got
    assert not wanted.difference(got)
    return True


@pytest.mark.long
@pytest.mark.parametrize("on", [False, True], ids=["computes", "passes on"])
@pytest.mark.parametrize("put", PUT)
@pytest.mark.parametrize("found", FOUND)
def test_a_number_that_a_part_gives_is_another_for_other_inputs(found: str, put: str, on: bool) -> None:
    model = Passes(Counts(PUT[put], FOUND[found]), on)
    gm = trace(model, torch.randn(2, 5, 4))
    assert "part" in opaque(gm)
    for shape in ((2, 5), (2, 8), (3, 3), (1, 12)):
        assert agree(model, gm, False, torch.randn(*shape, 4))


@pytest.mark.parametrize("found", ["int", "number of data"])
def test_what_a_model_decides_by_such_a_number_is_checked_or_kept_whole(found: str) -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor, number: Any) -> Tensor:
            return x * 2 if number > 3 else x - 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.decides, self.last = (
                Counts(PUT["object"], FOUND[found]),
                Decides(),
                nn.Linear(4, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.decides(*take(self.part(x))))

    model, refused = Model(), 0
    gm = trace(model, torch.randn(2, 5, 4))
    for length in (5, 2, 7, 3, 12):
        refused += not agree(model, gm, False, torch.randn(2, length, 4))
    assert refused == (2 if found == "int" else 0)
    assert ("decides" in opaque(gm)) == (found == "number of data")


class Scaling(nn.Module):
    """Scales pictures, in training by chance, and says how large each has become."""

    def forward(self, images: list[Tensor], boxes: list[Tensor] | None) -> Any:
        scale = 1.5 + float(torch.rand(()).item()) if self.training else 2.0
        if boxes is not None:
            for each in boxes:
                if bool((each[:, 2:] <= each[:, :2]).any()):
                    raise ValueError("the corners of a box are in no order")
            boxes = [each * scale for each in boxes]
        scaled = [nn.functional.interpolate(image[None], scale_factor=scale)[0] for image in images]
        sizes = [(image.shape[-2], image.shape[-1]) for image in scaled]
        height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
        batch = [nn.functional.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in scaled]
        return SimpleNamespace(tensors=torch.stack(batch), sizes=sizes), boxes


class Detector(nn.Module):
    """Finds one box in each picture; in training, its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.net, self.head = Scaling(), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, images: list[Tensor], boxes: list[Tensor] | None = None) -> Any:
        pictures, boxes = self.scaling(images, boxes)
        found = self.head(self.net(pictures.tensors).relu()).mean((2, 3))
        found = torch.stack([row * h / w for row, (h, w) in zip(found, pictures.sizes, strict=True)])
        if self.training:
            assert boxes is not None
            return sum((one - other).abs().mean() for one, other in zip(found, boxes, strict=True))
        return found


def pictures(*sizes: tuple[int, int], boxes: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    corners = torch.rand(boxes, 2)
    box = torch.cat([corners, corners + 1], 1)
    return [torch.rand(3, *size) for size in sizes], [box for _ in sizes]


def test_a_detector_takes_pictures_of_other_sizes_and_in_eval_mode_no_boxes() -> None:
    model = Detector()
    gm = trace(model, pictures((9, 12), (12, 7)))
    assert list(opaque(gm)) == ["scaling"]
    for sizes in (((9, 12), (12, 7)), ((8, 8), (8, 8)), ((20, 5), (6, 16))):
        images, boxes = pictures(*sizes, boxes=3)
        assert agree(model, gm, True, images, boxes)
        assert agree(model, gm, False, images, boxes)
        assert agree(model, gm, False, images)


def test_eval_mode_is_compared_on_other_pictures_whatever_boxes_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Decides(nn.Module):
        def forward(self, found: Tensor) -> Tensor:
            return found * 2 if found.sum().item() > 0 else found

    problems: list[str | None] = []

    def noting(gm: nn.Module, model: nn.Module, call: ExampleCall, training: bool, *more: Any) -> str | None:
        problem = difference(gm, model, call, training, *more)
        if not training:
            problems.append(problem)
        return problem

    monkeypatch.setattr(exact, "difference", noting)
    model = Detector()
    model.add_module("head", nn.Sequential(model.head, Decides()))
    gm = trace(model, pictures((9, 12), (12, 7)))
    assert set(opaque(gm)) == {"scaling", "head.1"}
    assert problems == [""] * TRIALS


def test_a_converted_detector_does_so_too() -> None:
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0))
    model = prepare(Detector(), spec, pictures((9, 12), (12, 7)))
    step(model)
    converted = convert(model)
    assert converted.get_parameter("net.weight").shape[0] == 4
    for sizes in (((9, 12), (12, 7)), ((20, 5), (6, 16))):
        images, _ = pictures(*sizes)
        assert torch.allclose(model.eval()(images), converted.eval()(images), atol=1e-6)


class Weighs(nn.Module):
    """Is kept whole, and in eval mode needs its weights, whatever it does without them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, weights: Tensor | None) -> Tensor:
        self.calls = min(self.calls + 1, 2)
        return x if weights is None else x * weights


def test_an_input_that_says_nothing_in_the_example_is_not_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weighs = nn.Linear(4, 4), Weighs()

        def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
            return self.weighs(self.first(x), weights)

    model, x = Model(), torch.randn(2, 4)
    gm = trace(model, (x, torch.ones(2, 4)))
    weights = torch.rand(2, 4)
    assert torch.equal(gm.eval()(x, weights), model.eval()(x, weights))
    with pytest.raises(AssertionError, match="weights"):
        gm(x)


def periods(x: Tensor) -> Any:
    _, strongest = x.abs().mean((0, 2))[1:].topk(2)
    return x.shape[1] // (strongest + 1).numpy()


class ByArray(nn.Module):
    """Decides by an array of numbers that code gives back which is not looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found, made = periods(x.detach()), torch.zeros(())
        for period in found:
            rows = x[:, :-1] if x.shape[1] % period else x
            made = made + self.narrow(self.wide(rows).relu()).mean(1)
        return made


def test_arrays_that_depend_on_data_keep_the_part_whole() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), ByArray()).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    gm = trace(model, x)
    why = "gets an array from periods whose numbers may depend on those in a tensor"
    assert opaque(gm)["1"].startswith(why)
    for seed in range(8):
        other = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(gm(other), model(other), rtol=0, atol=0)


class ArrayOfSizes(nn.Module):
    """Goes by an array that code gives back which is not looked into, and which no numbers change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for times in steps_of(x):
            x = self.layer(x) * float(times)
        return x


def steps_of(x: Tensor) -> Any:
    if x.isnan().any():
        raise ValueError("NaN")
    return np.arange(1, 4)


def test_arrays_that_are_always_the_same_are_checked() -> None:
    model, x = nn.Sequential(ArrayOfSizes()).double(), torch.randn(2, 8, dtype=torch.float64)
    gm = trace(model, x)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
