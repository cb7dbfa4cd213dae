"""The numbers of each variant, measured side by side on the finished models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pdp_fx.demo.measure import Size, latencies, save
from pdp_fx.demo.variants import Run, Variant
from pdp_fx.errors import StateError
from pdp_fx.report import Report, report

LATENCY_BATCH = 64


@dataclass(frozen=True)
class Summary:
    """The numbers of one variant; all but `accuracy` and `difference` are of the first seed's model.

    Attributes:
        variant: its name.
        asked: the target, in words.
        reached: share of the weights under masks that are zero, or of the multiply-accumulates that are
            saved; None for the dense net.
        accuracy: share of test images classified rightly, by seed.
        parameters: how many numbers the model stores as parameters.
        nonzero: how many of them are not zero.
        macs: multiply-accumulates of one image, those with stored zeros included.
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
    """Save the first seed's models to `out` and measure them in turns; the first variant is the baseline."""
    models = [results[0].model for results in runs.values()]
    seconds = latencies(models, images[:LATENCY_BATCH], rounds)
    reports = [report(model, images[:1]) for model in models]
    return [
        Summary(
            variant=variant.name,
            asked=variant.asked,
            reached=_reached(results[0], reports[0], found),
            accuracy=tuple(run.accuracy for run in results),
            parameters=found.parameters,
            nonzero=sum(int(parameter.count_nonzero()) for parameter in results[0].model.parameters()),
            macs=_macs(found),
            size=save(results[0].model, out / f"{variant.file_name}.pt2", images),
            latency=median / seconds[0],
            difference=max((run.pruning.difference for run in results if run.pruning), default=None),
            layers=layer_sparsity(reports[0], found),
        )
        for (variant, results), found, median in zip(runs.items(), reports, seconds, strict=True)
    ]


def layer_sparsity(dense: Report, found: Report) -> dict[str, float]:
    """Return the share of each layer's weights in the dense net that is zero in, or gone from, the other."""
    left = {row.layer: row.left for row in found.rows}
    return {row.layer: 1 - left[row.layer] / row.weights for row in dense.rows}


def _reached(run: Run, dense: Report, found: Report) -> float | None:
    if run.pruning is None:
        return None
    saved = 1 - _macs(found) / _macs(dense)
    return saved if saved > 0 else run.pruning.units


def _macs(found: Report) -> int:
    if found.macs is None:
        raise StateError("a report made without example inputs has no MAC counts")
    return found.macs
