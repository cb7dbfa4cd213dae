"""What a finished model costs: bytes on disk and time, and how far it is from the model it came from."""

import statistics
import time
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Bytes of a saved model, as it is and compressed by zlib at its highest level."""

    plain: int
    compressed: int


def save(model: nn.Module, path: Path, images: Tensor) -> Size:
    """Write the model as a torch.export archive whose batch size stays free, and return its size."""
    # The archive holds its example inputs: a clone, or the storage behind the slice would be saved whole.
    example = images[:2].clone()
    exported = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(exported, path)
    content = path.read_bytes()
    return Size(plain=len(content), compressed=len(zlib.compress(content, level=9)))


def latencies(models: Sequence[nn.Module], images: Tensor, rounds: int) -> list[float]:
    """Return the median seconds of one forward pass of each model, in the mode it is in.

    The models take turns, so that whatever else the machine does falls on all of them alike.
    """
    seconds: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for model, times in zip(models, seconds, strict=True):
                start = time.perf_counter()
                model(images)
                if round_ > 0:
                    times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch use one thread only: small nets gain little from more, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def relative_difference(left: nn.Module, right: nn.Module, images: Tensor) -> float:
    """Return the largest difference between two models' outputs, as a share of the largest output."""
    with torch.inference_mode():
        expected, found = left(images), right(images)
    return ((found - expected).abs().max() / expected.abs().max()).item()
