"""Bytes alive at the paper's three spots: model and optimizer, after the forward, after the backward pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.overhead_models import Variant


@dataclass(frozen=True)
class Spots:
    """Bytes of tensors; ``peak`` is the most that was ever alive within the step."""

    created: int
    after_forward: int
    after_backward: int
    peak: int

    def to_dict(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


def measure(
    variant: Variant, optimizers: list[torch.optim.Optimizer], batch: tuple[Any, Any], precision: str
) -> Spots:
    """Run one forward and backward pass of a trained variant, and read off what is alive when.

    On a GPU its allocator answers. On the CPU the profiler's record of every allocation does, beside the
    tensors that are known to be alive before.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    if batch[0].device.type == "cuda":
        return _on_gpu(variant, batch, precision)
    return _on_cpu(variant, optimizers, batch, precision)


def _on_gpu(variant: Variant, batch: tuple[Any, Any], precision: str) -> Spots:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    created = torch.cuda.memory_allocated()
    loss = variant.loss(*batch, precision)
    after_forward = torch.cuda.memory_allocated()
    loss.backward()
    return Spots(created, after_forward, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def _on_cpu(
    variant: Variant, optimizers: list[torch.optim.Optimizer], batch: tuple[Any, Any], precision: str
) -> Spots:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        with record_function("spot: created"):
            loss = None
        loss = variant.loss(*batch, precision)
        with record_function("spot: after_forward"):
            pass
        loss.backward()
        with record_function("spot: after_backward"):
            pass
    recorder: Any = trace.profiler
    events = recorder.kineto_results.events()
    spots = {event.name()[6:]: event.start_ns() for event in events if event.name().startswith("spot: ")}
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    before = _bytes_alive(variant, optimizers)
    created = sum(size for time, size in changes if time < spots["created"])
    alive, peak = before - created, before
    at: dict[str, int] = {}
    for name, end in spots.items():
        at[name] = before - created + sum(size for time, size in changes if time < end)
    for time, size in changes:
        alive += size
        peak = max(peak, alive) if time >= spots["created"] else peak
    return Spots(at["created"], at["after_forward"], at["after_backward"], peak)


def _bytes_alive(variant: Variant, optimizers: list[torch.optim.Optimizer]) -> int:
    tensors = [*variant.model.parameters(), *variant.model.buffers()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
