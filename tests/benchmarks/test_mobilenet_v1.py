from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.mobilenet_v1 import MobileNetV1


@contextmanager
def multiply_accumulates(model: nn.Module) -> Generator[list[int]]:
    """Collect one count for each call of a convolution or linear layer, for one image."""
    counts: list[int] = []

    def count(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        positions = output.shape[2:].numel() if output.ndim == 4 else 1
        counts.append(layer.get_parameter("weight").numel() * positions)

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    yield counts
    for handle in handles:
        handle.remove()


def test_mobilenet_v1_has_the_published_size() -> None:
    with torch.device("meta"):
        model = MobileNetV1()
        image = torch.empty(1, 3, 224, 224)
    with multiply_accumulates(model) as counts:
        assert model(image).shape == (1, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_231_976
    assert sum(counts) == 568_740_352
