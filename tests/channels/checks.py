"""The one check that every net must pass: what is converted computes what was prepared."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule
from pdp_fx.masks import ChannelMask
from pdp_fx.ops.kinds import kind_of, named_modules
from pdp_fx.planning import parameters_of
from pdp_fx.pruner import Pruner, find
from pdp_fx.spec import Allocation
from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.structure import are_equal, tensors

ROUNDING = 1e-14
"""What another order of additions does to a float64 output, as when a matrix lies elsewhere in memory."""

EXACT = 1e-9
"""Largest difference of float64 outputs, relative to their scale: a wrong index can do as little as 6e-8."""


@dataclass(frozen=True)
class Outcome:
    """What one run has shown: output channels removed over all weights, and why others stay."""

    removed: int
    reasons: tuple[str, ...]


def randomise(model: nn.Module) -> None:
    """Give every vector of a model values that matter: scales, shifts, running statistics."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim > 1 or not tensor.is_floating_point():
            continue
        with torch.no_grad():
            if name.endswith(("weight", "running_var", "variance")):
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(0, 0.5)


def train(model: nn.Module, batches: list[tuple[Any, ...]]) -> None:
    """A few steps of gradient descent in train mode."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss = sum(out.square().mean() for out in outputs(model, batch))
        if isinstance(loss, Tensor):
            loss.backward()
        # Products of channels with themselves have gradients that would throw a net anywhere.
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """All floating-point outputs, from a run with gradients, which the model may take itself."""
    return [leaf for leaf in tensors(model(*inputs)) if leaf.is_floating_point()]


def difference(model: nn.Module, other: nn.Module, inputs: tuple[Any, ...]) -> float:
    """The largest difference of any output, relative to that output's scale."""
    mine, theirs = ([out.detach() for out in outputs(one, inputs)] for one in (model, other))
    assert [out.shape for out in mine] == [out.shape for out in theirs]
    return max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in zip(mine, theirs, strict=True)
    )


def widths(model: nn.Module) -> dict[str, int]:
    """The number of output channels of every weight, by name."""
    found: dict[str, int] = {}
    owners = dict(named_modules(model))
    for name, weight in model.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        if isinstance(owner, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            found[name] = weight.shape[1] * owner.groups if weight.ndim > 1 else 0
        elif weight.ndim == 3 and kind_of(owner) is None:
            # Matrices in a stack.
            found[name] = sum(weight.shape)
        elif weight.ndim > 1:
            found[name] = weight.shape[1] if isinstance(owner, nn.Embedding) else weight.shape[0]
    return found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, Tensor], when: str) -> None:
    now = model.state_dict()
    assert list(now) == list(before), f"{when} changed the names of the user's parameters"
    changed = [name for name in before if not are_equal(now[name], before[name])]
    assert not changed, f"{when} changed {changed}"


def check_exact(
    model: nn.Module,
    batches: Callable[[int], tuple[Any, ...]],
    rule: Channels,
    allocation: Allocation = "uniform",
    other_batch: int | None = 3,
) -> Outcome:
    """Prepare, train, step and convert a float64 model; compare outputs and sizes all the way.

    Args:
        model: in float64; its vectors are overwritten with random values.
        batches: inputs for a batch size.
        rule: what to prune.
        allocation: as in `PruneSpec`.
        other_batch: another batch size to compare on, or None where the model takes one size only.

    Raises:
        AssertionError: outputs differ, sizes are not exact, or the user's model was changed.
    """
    example, other = batches(2), batches(other_batch or 2)
    randomise(model)
    spec = PruneSpec(rule, (), Schedule(0, 1.0), 1e-4, allocation)
    before = state_of(model)
    prepared = pdp_fx.prepare(model, spec, example)
    assert_same_state(model, before, "prepare")
    for batch in (example, other):
        assert difference(model.eval(), prepared.eval(), batch) <= ROUNDING, "prepare changed the function"
    check_elsewhere(model, prepared, example, ROUNDING)
    train(prepared, [batches(2) for _ in range(3)])
    pdp_fx.step(prepared)
    train(prepared, [batches(2)])
    pruner = pruner_of(prepared.eval())
    reasons = reasons_of(pruner)
    if not any(int(mask.count) for _, mask in pruner.mask_items()):
        return Outcome(0, reasons)
    converted = check_converted(model, prepared, [example, other])
    check_elsewhere(prepared, converted, example, EXACT)
    check_sizes(pruner, prepared, converted)
    left = widths(converted)
    removed = sum(size - left[name] for name, size in widths(model).items() if name in left)
    return Outcome(removed, reasons)


def check_elsewhere(
    model: nn.Module, made_of_it: nn.Module, example: tuple[Any, ...], tolerance: float
) -> None:
    """At other sizes than the example's, what was made of a model fails or gives what the model gives."""
    call = ExampleCall(example, {})
    for elsewhere in (other for size in call.sizes() for other in call.resized(size)):
        compare_where_both_work(model, made_of_it, elsewhere.args, tolerance)


def compare_where_both_work(
    model: nn.Module, made_of_it: nn.Module, inputs: tuple[Any, ...], tolerance: float
) -> None:
    """Compare outputs, unless one of the two refuses these inputs."""
    works = False
    with contextlib.suppress(Exception):
        outputs(model, inputs)
        outputs(made_of_it, inputs)
        works = True
    if works:
        found = difference(model, made_of_it, inputs)
        assert found <= tolerance, f"differs by {found:.1e} at other sizes"


def halved(model: nn.Module, inputs: tuple[Any, ...]) -> fx.GraphModule:
    """The model in float64, prepared with half of the channels of every group masked."""
    spec = PruneSpec(Channels(ratio=0.5), (), Schedule(0, 1.0), allocation="uniform")
    prepared = pdp_fx.prepare(model.double(), spec, inputs)
    pdp_fx.step(prepared)
    return prepared


def check_converted(
    model: nn.Module, prepared: fx.GraphModule, batches: list[tuple[Any, ...]]
) -> fx.GraphModule:
    """Convert and compare with the prepared model; neither it nor the user's model may change."""
    before, prepared_before = state_of(model), state_of(prepared)
    converted = pdp_fx.convert(prepared)
    assert_same_state(model, before, "convert")
    assert_same_state(prepared, prepared_before, "convert")
    for batch in batches:
        found = difference(prepared, converted, batch)
        assert found <= EXACT, f"converted differs by {found:.1e}"
    return converted


def pruner_of(prepared: fx.GraphModule) -> Pruner:
    """The state that `prepare` has added."""
    found = find(prepared)
    assert found is not None
    return found[1]


def reasons_of(pruner: Pruner) -> tuple[str, ...]:
    """Why channels stay; every group that stays must say so."""
    silent = [group.name for group in pruner.kept if not group.reasons]
    assert not silent, f"{silent} stay without a reason"
    return tuple(str(reason) for group in pruner.kept for reason in group.reasons)


def check_sizes(pruner: Pruner, prepared: fx.GraphModule, converted: fx.GraphModule) -> None:
    """Every axis of every parameter loses exactly the channels that the masks have dropped."""
    masks = [mask for _, mask in pruner.mask_items() if isinstance(mask, ChannelMask)]
    assert [int(mask.count) for mask in masks] == [int(mask.target) for mask in masks]
    dropped: list[int] = []
    for (group, _), mask in zip(pruner.groups, masks, strict=True):
        gone = mask.pruned(*parameters_of(prepared, mask))
        assert int(gone.sum()) == int(mask.count), (
            f"{group.name} drops {int(gone.sum())}, not {int(mask.count)}"
        )
        dropped += group.classes[gone.numpy()].tolist()
    assert pruner.channels is not None
    left = dict(converted.named_parameters())
    for slot, classes in pruner.channels.slots.items():
        if slot.tensor in left:
            expected = len(classes) - int(np.isin(classes, dropped).sum())
            assert left[slot.tensor].shape[slot.axis] == expected, f"{slot} has not {expected} entries"
