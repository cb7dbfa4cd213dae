"""Measuring the outputs of graphs: how far they differ, and how far rounding moves them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from pdp_fx.example_inputs import trial
from pdp_fx.tracing.examples import ExampleCall, Inputs
from pdp_fx.tracing.generators import random_state
from pdp_fx.tracing.structure import flat_tensors, tensors_and_numbers
from pdp_fx.tracing.verify import called

aten = torch.ops.aten
_PRODUCTS = frozenset(
    (aten.convolution, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot)
)


def eval_outputs(gm: fx.GraphModule, inputs: Inputs) -> tuple[Tensor, ...]:
    """Run ``gm`` in eval mode and return all outputs that are tensors or numbers.

    Random numbers in it depend on the seed and on the order of indices only, not on the layout of memory.
    """
    with trial(gm):
        before = random_state()
        result = called(gm, ExampleCall(*inputs).fresh())
        drawn = random_state() != before
    if drawn:
        with trial(gm), InOrder():
            result = called(gm, ExampleCall(*inputs).fresh())
    return tuple(torch.as_tensor(leaf).detach().clone() for leaf in tensors_and_numbers(result))


class InOrder(TorchDispatchMode):
    """Draws random numbers in the order of indices.

    By default they are drawn in the order of memory, which may differ between two convolutions with equal
    results.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(first, Tensor):
            return func(*args, **(kwargs or {}))
        ordered = first.contiguous()
        result = func(ordered, *args[1:], **(kwargs or {}))
        return first.copy_(ordered) if result is ordered else result


def rounding_effect(gm: fx.GraphModule, inputs: Inputs, labels: bool = True, roundings: int = 1) -> float:
    """How far the eval outputs move if every product is rounded differently, relative to their scale.

    Removing channels changes the order in which products are summed up, and so their last bits. A model that
    amplifies these bits cannot be compared more closely than this.

    Args:
        gm: a prepared model.
        inputs: what to run it on.
        labels: as in `relative_difference`.
        roundings: by how many roundings each product is moved.
    """
    outputs = eval_outputs(gm, inputs)
    with Rounded(roundings):
        moved = eval_outputs(gm, inputs)
    return relative_difference(moved, outputs, labels)


class Rounded(TorchDispatchMode):
    """Moves the results of products up or down by some roundings, at random but alike in every run."""

    def __init__(self, roundings: int = 1) -> None:
        super().__init__()
        self.roundings = roundings
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS and result.is_floating_point():
            up = torch.randint(0, 2, result.shape, generator=self.generator, device="cpu").to(result)
            result = result * (1 + self.roundings * torch.finfo(result.dtype).eps * (2 * up - 1))
        return result


class Precision(TorchDispatchMode):
    """Watches whether any operation inside the block computes in less than float64.

    Attributes:
        double: False as soon as one has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.double = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in flat_tensors(result):
            if tensor.is_floating_point():
                self.double = self.double and tensor.dtype == torch.float64
        return result


def relative_difference(
    outputs: tuple[Tensor, ...], reference: tuple[Tensor, ...], labels: bool = True
) -> float:
    """The largest difference of any output, relative to the largest finite reference value of that output.

    Args:
        outputs: the outputs to judge.
        reference: what they should be.
        labels: whether outputs that are not floating-point or complex numbers must be equal.

    Returns:
        infinity if shapes, labels, or the infinite and NaN values, such as those of masked logits, differ.
    """
    if [tuple(out.shape) for out in outputs] != [tuple(ref.shape) for ref in reference]:
        return math.inf
    pairs = zip(outputs, reference, strict=True)
    return max((_difference(out, ref, labels) for out, ref in pairs), default=0.0)


def _difference(out: Tensor, ref: Tensor, labels: bool) -> float:
    """`relative_difference` of one output; 0 if there is nothing to compare."""
    if not (ref.is_floating_point() or ref.is_complex()):
        return math.inf if labels and not torch.equal(out, ref) else 0.0
    finite = ref.isfinite()
    if not torch.allclose(out[~finite], ref[~finite], rtol=0, atol=0, equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    scale = ref[finite].abs().max().clamp(min=torch.finfo(ref.dtype).tiny)
    difference = float((out - ref)[finite].abs().max() / scale)
    return math.inf if math.isnan(difference) else difference
