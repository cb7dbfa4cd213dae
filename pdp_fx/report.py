"""Numbers per layer: weights, zeros, softness of the masks, multiply-accumulates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, fx, nn

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.channels.analysis import analyse
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context
from pdp_fx.errors import TraceError
from pdp_fx.example_inputs import fresh, normalised, trial
from pdp_fx.passes.find_sites import FindSites, Sites
from pdp_fx.planning import parameters_of, weight_of
from pdp_fx.policy import MaskPolicy, NMPolicy, from_inputs
from pdp_fx.pruner import Pruner, find_all, find_one, refuse_empty
from pdp_fx.sharding import gathered, reshard
from pdp_fx.spec import PruneSpec, Unstructured
from pdp_fx.trace import trace
from pdp_fx.tracing.examples import ExampleInputs

COUNTS = ("weights", "left", "sparsity", "target", "soft", "MACs", "MACs left")


@dataclass(frozen=True)
class Row:
    """One conv or linear weight.

    Attributes:
        layer: the module that owns it.
        rule: how it is pruned: unstructured, 2:4, channels, or the empty string.
        shape: shape of the stored weight.
        weights: number of stored weights.
        left: number of weights that are not 0 under the hard masks; removed channels count as 0.
        target: share of its units that are pruned at the end of the ramp, or None while that is not fixed.
        soft: share of its units with 0.01 < m < 0.99 now, or None without a mask. For a weight that produces
            channels of several groups it is the mean over the groups, weighted by their rows.
        macs: multiply-accumulates of one example when dense; None without example inputs, and for a weight
            inside a module that could only be run as a whole.
        macs_left: multiply-accumulates of one example with the weights that are left, or None like ``macs``.
    """

    layer: str
    rule: str
    shape: tuple[int, ...]
    weights: int
    left: int
    target: float | None
    soft: float | None
    macs: int | None
    macs_left: int | None

    @property
    def sparsity(self) -> float:
        """Share of the weights that are 0 or removed; 0 if there are none."""
        return 1 - self.left / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Report:
    """All conv and linear weights of a model in graph order; ``str`` gives the table.

    Attributes:
        rows: one per weight.
        parameters: number of all parameters of the model.
    """

    rows: tuple[Row, ...]
    parameters: int

    @property
    def sparsity(self) -> float:
        """Share of all conv and linear weights that are 0 or removed; 0 if there are none."""
        weights = sum(row.weights for row in self.rows)
        return 1 - sum(row.left for row in self.rows) / weights if weights else 0.0

    @property
    def macs(self) -> int | None:
        """Multiply-accumulates of one example when dense (conv and linear weights only)."""
        counts = [row.macs for row in self.rows if row.macs is not None]
        return sum(counts) if counts else None

    @property
    def macs_left(self) -> int | None:
        """Multiply-accumulates of one example with the weights that are left."""
        counts = [row.macs_left for row in self.rows if row.macs_left is not None]
        return sum(counts) if counts else None

    def to_dict(self) -> dict[str, object]:
        """Plain values, ready for `json.dump`."""
        totals: dict[str, object] = {
            "parameters": self.parameters,
            "sparsity": self.sparsity,
            "macs": self.macs,
        }
        rows = [asdict(row) | {"shape": list(row.shape), "sparsity": row.sparsity} for row in self.rows]
        return totals | {"macs_left": self.macs_left, "rows": rows}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        headers = ("layer", "rule", "shape", *COUNTS)
        body = [
            (
                row.layer,
                row.rule,
                "x".join(map(str, row.shape)),
                f"{row.weights:,}",
                f"{row.left:,}",
                f"{row.sparsity:.2%}",
                "" if row.target is None else f"{row.target:.2%}",
                "" if row.soft is None else f"{row.soft:.2%}",
                _millions(row.macs),
                _millions(row.macs_left),
            )
            for row in self.rows
        ]
        total = (
            "total",
            "",
            "",
            f"{sum(r.weights for r in self.rows):,}",
            f"{sum(r.left for r in self.rows):,}",
        )
        body.append((*total, f"{self.sparsity:.2%}", "", "", _millions(self.macs), _millions(self.macs_left)))
        right = ("left", "left", "left", *(["right"] * len(COUNTS)))
        return tabulate(body, headers=headers, tablefmt="simple", disable_numparse=True, colalign=right)


def _millions(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.3f} M"


def report(model: nn.Module, example_inputs: ExampleInputs | None = None) -> Report:
    """Count the weights and multiply-accumulates of ``model``, layer by layer.

    Args:
        model: a prepared model, a converted one, or any module. If it holds a prepared model, as a wrapper
            does, that one is counted.
        example_inputs: needed for multiply-accumulates of a model that `prepare` did not make; of one that
            it made they are counted if that was given inputs. They are counted for one example: total over
            the batch, divided by the first axis of the first input.

    Raises:
        StateError: the model holds several prepared models, or is on the meta device.
        TraceError: a model that was never prepared cannot be traced, or fails on the inputs.
    """
    found = find_all(model)
    refuse_empty(model, "report")
    if found:
        reshard(model)
        return _of_prepared(*find_one(model, "report"))
    gm = model if isinstance(model, fx.GraphModule) else trace(model, example_inputs)
    inputs = normalised(example_inputs)
    ctx = Context(PruneSpec(Unstructured(0.5)), inputs)
    channels = None
    try:
        FindSites().run(gm, ctx)
        if inputs is not None:
            with trial(gm):
                channels = analyse(gm, fresh(inputs))
    except Exception as err:
        if inputs is None:
            raise
        said = next(iter(str(err).splitlines()), "")
        raise TraceError(f"the model fails on the example inputs: {type(err).__name__}: {said}") from err
    names = [site.parameter for site in ctx.get(Sites).weights]
    weights = {name: weight_of(gm, name).detach() for name in names}
    uses = _uses(channels)
    rows = [_row(name, weight, weight, uses, uses) for name, weight in weights.items()]
    return Report(tuple(rows), sum(parameter.numel() for parameter in gm.parameters()))


def _of_prepared(gm: fx.GraphModule, pruner: Pruner) -> Report:
    masks: dict[str, list[MaskPolicy]] = {}
    for _, mask in pruner.mask_items():
        for name in mask.parameters_read:
            masks.setdefault(name, []).append(mask)
    rows: list[Row] = []
    with torch.no_grad(), gathered(*pruner.masks.values()):
        gone = gone_classes(gm, pruner)
        uses, uses_left = _uses(pruner.channels), _uses(pruner.channels, gone)
        soft = {mask: _soft_share(mask, parameters_of(gm, mask)) for _, mask in pruner.mask_items()}
        for name in pruner.weights:
            weight, mine = weight_of(gm, name).detach(), masks.get(name, [])
            left = _without(_hardened(gm, weight, mine), name, gone, pruner.channels)
            facts = [_of_mask(mask, soft[mask], name, weight) for mask in mine]
            rows.append(_row(name, weight, left, uses, uses_left, facts))
    return Report(tuple(rows), sum(parameter.numel() for parameter in gm.parameters()))


def _hardened(gm: fx.GraphModule, weight: Tensor, masks: Sequence[MaskPolicy]) -> Tensor:
    """The weight with zeros where masks of single weights prune it."""
    for mask in masks:
        if not isinstance(mask, ChannelPolicy):
            pruned = mask.pruned(*parameters_of(gm, mask))
            pruned = from_inputs(pruned, mask.axis) if isinstance(mask, NMPolicy) else pruned
            weight = torch.where(pruned, torch.zeros_like(weight), weight)
    return weight


@dataclass(frozen=True)
class _Masked:
    """What one mask does to a weight.

    Attributes:
        rule: as in `Row`.
        share: the share of the weight's rows that the mask covers.
        target: as in `Row`.
        soft: as in `Row`.
    """

    rule: str
    share: float
    target: float | None
    soft: float


def _of_mask(mask: MaskPolicy, soft: float, name: str, weight: Tensor) -> _Masked:
    if isinstance(mask, NMPolicy):
        return _Masked(f"{mask.keep}:{mask.of}", 1.0, 1 - mask.keep / mask.of, soft)
    target = int(mask.target) if mask.allocated else None
    if not isinstance(mask, ChannelPolicy):
        return _Masked("unstructured", 1.0, None if target is None else target / weight.numel(), soft)
    producer = mask.producers[mask.parameters_read.index(name)]
    places = producer.places
    share = 1.0 if places is None else sum(place >= 0 for place in places) / len(places)
    return _Masked("channels", share, None if target is None else target / mask.width, soft)


def gone_classes(gm: fx.GraphModule, pruner: Pruner) -> np.ndarray:
    """For every channel class whether the hard masks drop it now; empty if none can be."""
    gone = np.zeros(0 if pruner.channels is None else len(pruner.channels.classes), dtype=bool)
    masks = [mask for _, mask in pruner.mask_items() if isinstance(mask, ChannelPolicy)]
    for (group, _), mask in zip(pruner.groups, masks, strict=True):
        gone[group.classes[mask.pruned(*parameters_of(gm, mask)).cpu().numpy()]] = True
    return gone


def _without(weight: Tensor, name: str, gone: np.ndarray, channels: ChannelMap | None) -> Tensor:
    """The weight with zeros in the rows and columns of dropped channels."""
    if channels is None or not gone.any():
        return weight
    for axis in range(weight.ndim):
        classes = channels.slots.get(Slot(name, axis))
        # A layer that was put into the place of one, such as another head, may have more rows.
        if classes is not None and len(classes) == weight.shape[axis]:
            dropped = torch.from_numpy(np.flatnonzero(gone[classes])).to(weight.device)
            weight = weight.index_fill(axis, dropped, 0)
    return weight


def _soft_share(mask: MaskPolicy, weights: list[Tensor]) -> float:
    values = mask.values(*weights)
    return float(((values > 0.01) & (values < 0.99)).float().mean())


_Use = tuple[float, tuple[np.ndarray, ...]]
"""How often each number of a weight is used for one example, and of which part of it (`Contraction.part`)."""


def _row(
    name: str,
    weight: Tensor,
    left: Tensor,
    uses: Mapping[str, list[_Use]],
    uses_left: Mapping[str, list[_Use]],
    masks: Sequence[_Masked] = (),
) -> Row:
    targets = [mask.target for mask in masks if mask.target is not None]
    shares = [mask.share for mask in masks]
    return Row(
        layer=name.removesuffix(".weight"),
        rule=" and ".join(dict.fromkeys(mask.rule for mask in masks)),
        shape=tuple(weight.shape),
        weights=weight.numel(),
        left=int(torch.count_nonzero(left)),
        target=_mean(targets, shares) if targets and len(targets) == len(masks) else None,
        soft=_mean([mask.soft for mask in masks], shares) if masks else None,
        macs=_macs(uses[name], torch.ones_like(weight)) if name in uses else None,
        macs_left=_macs(uses_left[name], left) if name in uses_left else None,
    )


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    """The mean of values that hold for parts of a weight; what no mask covers counts as 0."""
    total = max(sum(shares), 1.0)
    return sum(value * share for value, share in zip(values, shares, strict=True)) / total


def _uses(channels: ChannelMap | None, gone: np.ndarray | None = None) -> dict[str, list[_Use]]:
    """How weights are used, of which a use was seen.

    Where one is used for each of some channels it is used less often without those that are gone.
    """
    found: dict[str, list[_Use]] = {}
    if channels is None:
        return found
    for use in channels.contractions:
        stays = 1.0 if gone is None else math.prod(1.0 - gone[classes].mean() for classes in use.across)
        found.setdefault(use.weight, []).append((use.positions * stays / channels.batch, use.part))
    return found


def _macs(uses: Sequence[_Use], weight: Tensor) -> int:
    """The multiply-accumulates of the numbers of a weight that are not 0."""
    nonzero = weight != 0
    total = sum(positions for positions, part in uses if not part) * int(nonzero.count_nonzero())
    for positions, part in uses:
        if part:
            used = nonzero
            for axis, indices in enumerate(part):
                used = used.index_select(axis, torch.from_numpy(indices).to(weight.device))
            total += positions * int(used.count_nonzero())
    return round(total)
