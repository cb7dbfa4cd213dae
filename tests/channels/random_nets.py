"""Random nets for property tests: any operation on any tensor that is there, branches and reuse included.

A net is a tuple of steps, so a failing one can be printed, shortened, and written down as a test:

    RandomNet((Step("conv", (0,), 1), Step("relu", (1,)), Step("add", (1, 2))))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.channels.random_layers import LAYERS
from tests.channels.random_ops import JOINS, PURE, Shape, compute, fits

INPUT: Shape = ("image", 3, 4)


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        op: a name in LAYERS, PURE or JOINS, or "again" for a layer that another step owns.
        sources: the tensors it takes: 0 is the input, n the result of step n.
        knob: a number from 0 to 3 that each operation reads in its own way; for "again" the step.
    """

    op: str
    sources: tuple[int, ...]
    knob: int = 0


def shape_after(steps: tuple[Step, ...], shapes: list[Shape], step: Step) -> Shape | None:
    """The shape that one more step gives, or None if it does not fit."""
    taken = [shapes[source] for source in step.sources]
    if step.op == "again":
        owner = steps[step.knob - 1]
        return shapes[step.knob] if shapes[owner.sources[0]] == taken[0] else None
    return LAYERS[step.op][0](taken[0], step.knob) if step.op in LAYERS else fits(step.op, taken, step.knob)


class RandomNet(nn.Module):
    """Runs its steps one after the other; every result that no step takes is read by a last layer."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleDict()
        shapes = [INPUT]
        for number, step in enumerate(steps, 1):
            if step.op in LAYERS:
                self.layers[str(number)] = LAYERS[step.op][1](shapes[step.sources[0]], step.knob)
            shape = shape_after(steps, shapes, step)
            if shape is None:
                raise ValueError(f"{step} does not fit {[shapes[source] for source in step.sources]}")
            shapes.append(shape)
        taken = {source for step in steps for source in step.sources}
        for number, (kind, channels, _) in enumerate(shapes):
            if number and number not in taken:
                head = nn.Conv2d(channels, 3, 1) if kind == "image" else nn.Linear(channels, 3)
                self.layers[f"head_{number}"] = head

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [x]
        for number, step in enumerate(self.steps, 1):
            taken = [made[source] for source in step.sources]
            owner = step.knob if step.op == "again" else number
            made.append(self._result(step, str(owner), taken))
        heads = [(number, f"head_{number}") for number in range(len(made))]
        return [self.layers[head](made[number]) for number, head in heads if head in self.layers]

    def _result(self, step: Step, owner: str, taken: list[Tensor]) -> Tensor:
        return self.layers[owner](taken[0]) if owner in self.layers else compute(step.op, taken, step.knob)


@st.composite
def random_steps(draw: Callable[[Any], Any], most: int = 12) -> tuple[Step, ...]:
    """Steps that fit each other; they start with a layer and prefer the latest results."""
    steps = (Step("conv_bn_relu", (0,), draw(st.integers(0, 3))),)
    shapes = [INPUT, *_shapes(steps)]
    for _ in range(draw(st.integers(1, most))):
        step = _drawn(draw, steps, shapes)
        shape = None if step is None else shape_after(steps, shapes, step)
        if step is not None and shape is not None:
            steps, shapes = (*steps, step), [*shapes, shape]
    return steps


def _shapes(steps: tuple[Step, ...]) -> list[Shape]:
    shapes = [INPUT]
    for step in steps:
        found = shape_after(steps, shapes, step)
        if found is not None:
            shapes.append(found)
    return shapes[1:]


def _drawn(draw: Callable[[Any], Any], steps: tuple[Step, ...], shapes: list[Shape]) -> Step | None:
    """A step on tensors that are there; None if nothing of its sort fits."""
    knob = draw(st.integers(0, 3))
    last = len(shapes) - 1
    source = last if draw(st.integers(0, 3)) else draw(st.integers(0, last))
    sort = draw(st.sampled_from(("layer", "layer", "pure", "pure", "join", "again")))
    if sort == "again":
        owners = [
            n
            for n, step in enumerate(steps, 1)
            if step.op in LAYERS and shapes[step.sources[0]] == shapes[source]
        ]
        return Step("again", (source,), draw(st.sampled_from(owners))) if owners else None
    if sort == "join":
        pairs = [
            (name, other)
            for name in JOINS
            for other in range(len(shapes))
            if fits(name, [shapes[source], shapes[other]], knob)
        ]
        if not pairs:
            return None
        name, other = draw(st.sampled_from(pairs))
        return Step(name, (source, other))
    table = (
        [name for name in LAYERS if LAYERS[name][0](shapes[source], knob)]
        if sort == "layer"
        else [name for name in PURE if fits(name, [shapes[source]], knob)]
    )
    return Step(draw(st.sampled_from(table)), (source,), knob) if table else None


def pictures(batch: int) -> tuple[Tensor, ...]:
    """Inputs for a random net."""
    return (torch.randn(batch, INPUT[1], INPUT[2], INPUT[2], dtype=torch.float64),)
