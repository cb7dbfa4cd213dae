"""Hooks of layers that lose channels: those that cannot do with fewer keep them, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, VerifyError
from pdp_fx.channels.analysis import HOOKED
from pdp_fx.held_hooks import MOST_ALONE

SPEC = PruneSpec(Channels(0.5), schedule=Schedule(start=0, epsilon=1.0))
Hook = Callable[[Any, Any, Tensor], Tensor | None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 5)
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.last(self.third(x).relu().mean((2, 3)))


def by_channels(layer: Any, inputs: Any, made: Tensor) -> Tensor:
    return made / made.shape[1] ** 0.5


def by_attribute(layer: Any, inputs: Any, made: Tensor) -> Tensor:
    return made / layer.out_channels


def by_places(layer: Any, inputs: Any, made: Tensor) -> Tensor:
    return made[:, torch.arange(7, -1, -1)]


def by_height(layer: Any, inputs: Any, made: Tensor) -> Tensor:
    return made / made.shape[-1]


def by_shape(layer: Any, inputs: Any, made: Tensor) -> Tensor:
    batch, channels, height, width = made.shape
    return made.view(batch, channels, height * width).softmax(-1).view(batch, channels, height, width)


def nothing(layer: Any, inputs: Any, made: Tensor) -> None:
    """Look on."""


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


def prepared(hooks: dict[str, Hook]) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net().double()
    for layer, hook in hooks.items():
        model.get_submodule(layer).register_forward_hook(hook)
    return model, pdp_fx.prepare(model, SPEC, inputs())


def assert_exact(masked: Any, stay: set[str]) -> None:
    """Assert that these layers alone keep all channels, and that what is converted is what was masked."""
    groups = {group.name for group in pdp_fx.explain(masked).groups}
    assert groups == {"first", "second", "third"} - stay
    assert (HOOKED in str(pdp_fx.explain(masked))) == bool(stay)
    pdp_fx.step(masked)
    converted = pdp_fx.convert(masked)
    assert all(converted.get_submodule(layer).out_channels == 8 for layer in stay)
    assert sum(map(Tensor.numel, converted.parameters())) < sum(map(Tensor.numel, masked.parameters()))
    for batch in (2, 3):
        torch.testing.assert_close(
            converted(inputs(batch)), masked.eval()(inputs(batch)), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("hook", [by_channels, by_attribute, by_places])
def test_a_hook_that_needs_all_channels_keeps_them(hook: Hook) -> None:
    _, masked = prepared({"first": hook, "second": nothing})
    assert_exact(masked, {"first"})


@pytest.mark.parametrize("hook", [by_height, by_shape, nothing])
def test_any_other_hook_keeps_none(hook: Hook) -> None:
    _, masked = prepared({"first": hook, "third": hook})
    assert_exact(masked, set())


def test_a_hook_that_needs_all_channels_of_its_input_keeps_those_before_it() -> None:
    _, masked = prepared({"second": lambda _, given, made: made / given[0].shape[1]})
    assert_exact(masked, {"first", "second"})


def test_of_hooks_that_fail_together_as_many_layers_as_are_needed_keep_channels() -> None:
    widths: dict[str, int] = {}

    def notes(layer: Any, inputs: Any, made: Tensor) -> None:
        widths["first"] = made.shape[1]

    def compares(layer: Any, inputs: Any, made: Tensor) -> Tensor:
        return made * (widths["first"] + made.shape[1])

    _, masked = prepared({"first": notes, "second": compares})
    assert_exact(masked, {"first", "second"})


def test_of_many_hooks_all_keep_channels() -> None:
    layers = [nn.Linear(6, 6) for _ in range(MOST_ALONE + 1)]
    for layer in layers[1:]:
        layer.register_forward_hook(nothing)
    layers[0].register_forward_hook(lambda _, __, made: made * made.shape[1])
    model = nn.Sequential(nn.Linear(3, 6), *layers, nn.Linear(6, 2)).double()
    masked = pdp_fx.prepare(model, SPEC, torch.randn(2, 3, dtype=torch.float64))
    assert [group.name for group in pdp_fx.explain(masked).groups] == ["0"]


def test_trials_leave_the_model_as_it_was() -> None:
    model = Net().double()
    model.first.register_forward_hook(lambda *given: model.found.append(given[2]))
    model.second.register_forward_hook(by_channels)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    masked: Any = pdp_fx.prepare(model, SPEC, inputs())
    assert not model.found
    assert int(masked.pdp.counter) == 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    torch.testing.assert_close(masked(inputs(3)), model(inputs(3)), rtol=0, atol=0)


def test_what_fails_for_another_reason_is_not_held_against_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise VerifyError("not a hook's fault")

    with monkeypatch.context() as broken:
        broken.setattr("pdp_fx.api.proved", fails)
        _, masked = prepared({"first": by_height})
    assert HOOKED not in str(pdp_fx.explain(masked))
