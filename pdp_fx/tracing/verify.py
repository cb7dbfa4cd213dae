"""Running a model or its graph on the example inputs, and comparing the two bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pdp_fx.tracing.inputs import ExampleCall
from pdp_fx.tracing.preserve import generator_states, preserved
from pdp_fx.tracing.structure import tensors


@dataclass(frozen=True)
class Outcome:
    """What is compared of one run.

    Attributes:
        kind: the type of what the model returned.
        results: the tensors in it.
        buffers: the buffers afterwards, by name.
        generator: the state of torch's random number generator afterwards.
        other_generators: the states of Python's and numpy's.
    """

    kind: type
    results: tuple[torch.Tensor, ...]
    buffers: Mapping[str, torch.Tensor]
    generator: torch.Tensor
    other_generators: tuple[Any, ...]

    def is_near(self, other: "Outcome") -> bool:
        """Whether another run gives the same up to a thousand roundings, relative to the output's scale."""
        if self.kind is not other.kind or len(self.results) != len(other.results):
            return False
        return all(_near(mine, theirs) for mine, theirs in zip(self.results, other.results, strict=True))

    def difference(self, other: "Outcome") -> str:
        """How another run differs from this one, as the end of a sentence; empty if it does not."""
        if self.kind is not other.kind:
            return f"returns a {other.kind.__name__}, not a {self.kind.__name__}"
        if len(self.results) != len(other.results):
            return f"returns {len(other.results)} tensors, not {len(self.results)}"
        for index, (mine, theirs) in enumerate(zip(self.results, other.results, strict=True)):
            if not _identical(mine, theirs):
                return f"returns another tensor at position {index}"
        for name, buffer in self.buffers.items():
            if name not in other.buffers or not _identical(buffer, other.buffers[name]):
                return f"leaves another value in the buffer {name}"
        same = self.other_generators == other.other_generators and torch.equal(
            self.generator, other.generator
        )
        return "" if same else "draws other random numbers"


def run(model: nn.Module, example: ExampleCall, training: bool) -> Outcome:
    """Run a model in one mode and put everything back."""
    call = example.fresh()
    with preserved(model):
        model.train(training)
        output = _call(model)(*call.args, **call.kwargs)
        results = tuple(tensor.detach().clone() for tensor in tensors(output))
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        return Outcome(type(output), results, buffers, torch.get_rng_state(), generator_states())


def _call(model: nn.Module) -> Callable[..., Any]:
    """What calls a model; a graph module, called as such, would print its code after an error."""
    return partial(nn.Module.__call__, model) if isinstance(model, fx.GraphModule) else model


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return _identical(one, other)
    scale = one.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item()
    tolerance = 1000 * torch.finfo(one.dtype).eps * scale
    return torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(one, other)
