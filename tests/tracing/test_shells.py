"""What stands in a graph module for the modules that were traced through."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdp_fx import Channels, PruneSpec, StateError, TraceError, prepare
from pdp_fx.trace import trace
from tests.tracing.checks import exact, opaque


class Block(nn.Module):
    """A layer with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Stack(nn.Sequential):
    """A sequence with a name of its own."""


class Holder(nn.Module):
    """Holds blocks in each of torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.row = Stack(nn.Linear(4, 4), nn.ReLU(), Block())
        self.several = nn.ModuleList([Block(), Block()])
        self.by_name = nn.ModuleDict({"last": Block()})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.several:
            x = x + block(x)
        return self.by_name["last"](self.row(x))


def test_parts_are_found_and_printed_as_in_the_model() -> None:
    model: Any = Holder()
    x = torch.randn(3, 4)
    traced: Any = exact(model, x)
    prepared: Any = pickle.loads(pickle.dumps(prepare(model, PruneSpec(Channels(0.5)), x)))
    assert repr(traced.row) == repr(model.row)
    assert repr(traced.several) == repr(model.several)
    for gm in (traced, prepared):
        assert [len(gm.row), len(gm.several), list(gm.by_name)] == [3, 2, ["last"]]
        assert torch.equal(gm.row[0].weight, model.row[0].weight)
        assert torch.equal(gm.row[-1].layer.weight, model.row[-1].layer.weight)
        assert gm.row[:2][1] is gm.row[1]
        assert torch.equal(gm.several[1].layer.bias, model.several[1].layer.bias)
        assert torch.equal(gm.by_name["last"].layer.bias, model.by_name["last"].layer.bias)


def test_a_part_cannot_be_called() -> None:
    gm: Any = exact(Holder(), torch.randn(3, 4))
    for part, name in ((gm.row, "Stack"), (gm.several[0], "Block")):
        with pytest.raises(StateError, match=f"this {name} cannot be called"):
            part(torch.randn(3, 4))


@pytest.mark.parametrize("when", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_hook_that_never_runs_is_warned_of(when: str) -> None:
    gm: Any = exact(Holder(), torch.randn(3, 4))
    with pytest.warns(UserWarning, match="this hook of a Block never runs"):
        getattr(gm.several[0], f"register_{when}_hook")(print)
    called = list[nn.Module]()
    getattr(gm.several[0].layer, f"register_{when}_hook")(lambda layer, *_: called.append(layer))
    gm(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert called == [gm.several[0].layer]


@pytest.mark.parametrize("when", ["full_backward_pre", "full_backward"])
def test_a_part_with_backward_hooks_stays_whole(when: str) -> None:
    def larger(*gradients: Any) -> Any:
        return tuple(None if each is None else 10 * each for each in gradients[-1])

    model, x = Holder(), torch.randn(3, 4)
    getattr(model.row[2], f"register_{when}_hook")(larger)
    assert opaque(exact(model, x)) == {
        "row.2": "has hooks that are called with its gradients (test_shells.py:42)"
    }
    getattr(model, f"register_{when}_hook")(larger)
    with pytest.raises(TraceError, match="hooks of its own that are called with its gradients"):
        trace(model, x)


def test_hooks_that_are_not_called_any_more_are_warned_of() -> None:
    model, x, seen = Holder(), torch.randn(3, 4), list[Tensor]()
    model.several[0].register_forward_hook(lambda *given: seen.append(given[-1]))
    model.row[0].register_forward_hook(lambda *given: given[-1].neg())
    with pytest.warns(UserWarning, match="the hooks of several.0 are not called any more"):
        gm = trace(model, x)
    wanted = model(x)
    seen.clear()
    assert torch.equal(gm(x), wanted)
    assert not seen
