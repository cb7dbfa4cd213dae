from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, StateError
from pdp_fx.fingerprint import fingerprint, tables


def _prepared() -> fx.GraphModule:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
    )
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(0, 1.0))
    return pdp_fx.prepare(net, spec, torch.randn(2, 3, 6, 6))


def test_modes_weights_steps_and_dtypes_do_not_show() -> None:
    model = _prepared()
    before = fingerprint(model)
    pdp_fx.step(model)
    model.eval().double()
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert fingerprint(model) == before


def _replace_module(model: fx.GraphModule) -> None:
    model.set_submodule("2", nn.Hardtanh())


def _change_setting(model: fx.GraphModule) -> None:
    vars(model.get_submodule("0"))["stride"] = (2, 2)


def _doubled(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 2


def _add_hook(model: fx.GraphModule) -> None:
    model.get_submodule("2").register_forward_hook(_doubled)


def _add_node(model: fx.GraphModule) -> None:
    relu = next(node for node in model.graph.nodes if node.target == "2")
    with model.graph.inserting_after(relu):
        relu.replace_all_uses_with(again := model.graph.call_function(torch.tanh, (relu,)))
    again.args = (relu,)
    model.recompile()


CHANGES = [_replace_module, _change_setting, _add_hook, _add_node]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_what_the_model_does_show(change: Callable[[fx.GraphModule], None]) -> None:
    model = _prepared()
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


@pytest.mark.parametrize("change", [_replace_module, _add_hook, _add_node])
def test_a_model_that_was_changed_after_prepare_is_analysed_again(
    change: Callable[[fx.GraphModule], None],
) -> None:
    model = _prepared()
    change(model)
    pdp_fx.step(model)
    small, images = pdp_fx.convert(model.eval()), torch.randn(3, 3, 6, 6)
    torch.testing.assert_close(small(images), model(images))
    assert small.get_parameter("0.weight").shape[0] == 4


class Shuffled(nn.Module):
    """Channels meet others by a table of indices that is saved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.order: Tensor
        self.register_buffer("order", torch.randperm(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden.index_select(1, self.order) + self.second(hidden))


def test_a_checkpoint_with_other_indices_than_were_prepared_is_refused_by_name() -> None:
    torch.manual_seed(0)
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(0, 1.0))
    model = pdp_fx.prepare(Shuffled(), spec, torch.randn(3, 6))
    model.load_state_dict(Shuffled().state_dict(), strict=False)
    pdp_fx.step(model)
    with pytest.raises(StateError, match="order holds other indices than when the model was prepared"):
        pdp_fx.convert(model)


class Picks(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.table]


def test_tables_are_read_and_can_still_be_resized() -> None:
    gm = fx.symbolic_trace(Picks())
    before = tables(gm)
    assert before.keys() == {"table"}
    assert gm.get_buffer("table").untyped_storage().resizable()
    gm.get_buffer("table").add_(1)
    assert tables(gm) != before
