"""One line for each variant: the table that is printed, and the same numbers for results.json."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from pdp_fx.demo.measure import Size, latencies, multiply_accumulates, save
from pdp_fx.demo.variants import Run, Variant
from pdp_fx.spec import Channels

LATENCY_BATCH = 64

NOTE = f"""\
Accuracy: mean of all seeds on the test images, and lowest to highest. Everything else is of the first seed, save
the difference: the largest of all seeds, as a share of the largest output.
Latency: one thread, {LATENCY_BATCH} images, medians of alternating runs; the dense net still has its batch norms, the others have
them folded. Stored zeros are not skipped: they make the compressed file smaller, and nothing faster.
"""


@dataclass(frozen=True)
class Summary:
    """The numbers of one variant.

    Attributes:
        asked: the target, in words.
        reached: share of weights that are zero, or of multiply-accumulates saved; None for the dense net.
        accuracy: share of test images classified rightly, by seed.
        parameters: how many numbers the model stores as parameters.
        nonzero: how many of them are not zero.
        macs: multiply-accumulates of one image, stored zeros included.
        size: bytes of the saved model.
        latency: seconds of one forward pass, divided by those of the dense net.
        difference: see `Pruning`; the largest of all seeds, None for the dense net.
        layers: share of each layer's weights that is zero or removed.
    """

    variant: str
    asked: str
    reached: float | None
    accuracy: tuple[float, ...]
    parameters: int
    nonzero: int
    macs: int
    size: Size
    latency: float
    difference: float | None
    layers: Mapping[str, float]


def summarise(runs: Mapping[Variant, Sequence[Run]], images: Tensor, out: Path, rounds: int) -> list[Summary]:
    """Measure the first seed's models side by side and save them to `out`; the first variant is the baseline."""
    models = {variant.name: results[0].model for variant, results in runs.items()}
    seconds = latencies(models, images[:LATENCY_BATCH], rounds)
    dense, unit = next(iter(models.values())), next(iter(seconds.values()))
    summaries: list[Summary] = []
    for variant, results in runs.items():
        model = models[variant.name]
        parameters = [parameter.detach() for parameter in model.parameters()]
        macs = multiply_accumulates(model, images[:1])
        prunings = [run.pruning for run in results if run.pruning is not None]
        saved = 1 - macs / multiply_accumulates(dense, images[:1])
        summaries.append(
            Summary(
                variant=variant.name,
                asked=variant.asked,
                reached=_reached(variant, results[0], saved),
                accuracy=tuple(run.accuracy for run in results),
                parameters=sum(parameter.numel() for parameter in parameters),
                nonzero=sum(int(parameter.count_nonzero()) for parameter in parameters),
                macs=macs,
                size=save(model, out / f"{variant.file_name}.pt2", images),
                latency=seconds[variant.name] / unit,
                difference=max((pruning.difference for pruning in prunings), default=None),
                layers=layer_sparsity(dense, model),
            )
        )
    return summaries


def layer_sparsity(dense: nn.Module, model: nn.Module) -> dict[str, float]:
    """Return the share of each weight of the dense net that is zero in, or gone from, the model."""
    return {
        name.removesuffix(".weight"): 1 - int(model.get_parameter(name).count_nonzero()) / weight.numel()
        for name, weight in dense.named_parameters()
        if weight.ndim > 1
    }


def table(summaries: Sequence[Summary]) -> str:
    """Return the table as text, with the notes it needs."""
    return tabulate([_cells(summary) for summary in summaries], headers="keys", stralign="right") + "\n\n" + NOTE


def machine() -> dict[str, str]:
    """Return what the numbers were measured with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()}
