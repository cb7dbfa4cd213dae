"""Numbers per layer: weights, zeros, softness of the masks, multiply-accumulates."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, fx, nn

from pdp_fx.api import normalised
from pdp_fx.channels.analysis import ChannelMap, analyse
from pdp_fx.channels.labels import Slot
from pdp_fx.compiler import Context
from pdp_fx.masks import ChannelMask, Mask, NMMask
from pdp_fx.passes.find_sites import FindSites, Sites
from pdp_fx.pruner import Pruner, find, parameters_of
from pdp_fx.spec import PruneSpec, Unstructured
from pdp_fx.trace import ExampleInputs, trace


@dataclass(frozen=True)
class Row:
    """One conv or linear weight.

    Attributes:
        layer: the module that owns it.
        rule: how it is pruned: unstructured, 2:4, channels, or the empty string.
        shape: shape of the weight as it is stored.
        weights: number of stored weights.
        left: number of weights that are not 0 under the hard masks; removed channels count as 0.
        target: share of its units that go in the end, or None while that is open.
        soft: share of its units with 0.01 < m < 0.99 now, or None without a mask.
        macs: multiply-accumulates of one example when dense, or None without example inputs.
        macs_left: those of the weights that are left.
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
        """Share of the weights that are 0 or removed."""
        return 1 - self.left / self.weights


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
        """Share of all conv and linear weights that are 0 or removed."""
        return 1 - sum(row.left for row in self.rows) / max(sum(row.weights for row in self.rows), 1)

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
        totals = {"parameters": self.parameters, "sparsity": self.sparsity, "macs": self.macs}
        rows = [asdict(row) | {"shape": list(row.shape), "sparsity": row.sparsity} for row in self.rows]
        return totals | {"macs_left": self.macs_left, "rows": rows}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        headers = ("layer", "rule", "shape", "weights", "left", "sparsity", "target", "soft", "MACs", "MACs left")
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
        total = ("total", "", "", f"{sum(r.weights for r in self.rows):,}", f"{sum(r.left for r in self.rows):,}")
        body.append((*total, f"{self.sparsity:.2%}", "", "", _millions(self.macs), _millions(self.macs_left)))
        right = ("left", "left", "left", *(["right"] * 7))
        return tabulate(body, headers=headers, tablefmt="simple", disable_numparse=True, colalign=right)


def _millions(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.3f} M"


def report(model: nn.Module, example_inputs: ExampleInputs = None) -> Report:
    """Count the weights and multiply-accumulates of ``model``, layer by layer.

    Args:
        model: a prepared model, a converted one, or any module.
        example_inputs: needed for multiply-accumulates of a model that was not prepared with them.
            They are counted for one example: total over the batch, divided by the first axis of the
            first input.
    """
    found = find(model)
    if found is not None:
        return _of_prepared(*found)
    gm = model if isinstance(model, fx.GraphModule) else trace(model, example_inputs)
    ctx = Context(PruneSpec(Unstructured(0.5)))
    FindSites().run(gm, ctx)
    inputs = normalised(example_inputs)
    channels = None if inputs is None else analyse(gm, inputs, frozenset())
    names = [site.parameter for site in ctx.get(Sites).weights]
    rows = [_row(name, gm.get_parameter(name), gm.get_parameter(name), None, channels) for name in names]
    return Report(tuple(rows), sum(parameter.numel() for parameter in gm.parameters()))


def _of_prepared(gm: fx.GraphModule, pruner: Pruner) -> Report:
    masks = {name: mask for _, mask in pruner.mask_items() for name in mask.parameters_read}
    gone = gone_classes(gm, pruner)
    rows: list[Row] = []
    with torch.no_grad():
        for name in pruner.weights:
            weight, mask = gm.get_parameter(name).detach(), masks.get(name)
            left = weight
            if mask is not None and not isinstance(mask, ChannelMask):
                left = torch.where(mask.pruned(weight), torch.zeros_like(weight), weight)
            left = _without(left, name, gone, pruner.channels)
            soft = None if mask is None else _soft_share(mask, parameters_of(gm, mask))
            rows.append(_row(name, weight, left, mask, pruner.channels, soft))
    own = sum(p.numel() for p in gm.parameters())
    return Report(tuple(rows), own)


def gone_classes(gm: fx.GraphModule, pruner: Pruner) -> np.ndarray:
    """The channel classes that the hard masks drop now."""
    masks = [mask for _, mask in pruner.mask_items() if isinstance(mask, ChannelMask)]
    gone = [
        group.classes[mask.pruned(*parameters_of(gm, mask)).cpu().numpy()]
        for (group, _), mask in zip(pruner.groups, masks, strict=True)
    ]
    return np.concatenate(gone) if gone else np.array([], dtype=np.int64)


def _without(weight: Tensor, name: str, gone: np.ndarray, channels: ChannelMap | None) -> Tensor:
    """The weight without the rows and columns of dropped channels."""
    if channels is None or not len(gone):
        return weight
    for axis in range(weight.ndim):
        classes = channels.slots.get(Slot(name, axis))
        if classes is not None:
            stays = torch.from_numpy(np.flatnonzero(~np.isin(classes, gone))).to(weight.device)
            weight = weight.index_select(axis, stays)
    return weight


def _soft_share(mask: Mask, weights: list[Tensor]) -> float:
    values = mask.values(*weights)
    return float(((values > 0.01) & (values < 0.99)).float().mean())


def _row(
    name: str, weight: Tensor, left: Tensor, mask: Mask | None, channels: ChannelMap | None, soft: float | None = None
) -> Row:
    nonzero = int(torch.count_nonzero(left))
    positions = _positions(name, channels)
    return Row(
        layer=name.removesuffix(".weight"),
        rule=_rule(mask),
        shape=tuple(weight.shape),
        weights=weight.numel(),
        left=nonzero,
        target=_target(mask, weight),
        soft=soft,
        macs=None if positions is None else round(weight.numel() * positions),
        macs_left=None if positions is None else round(nonzero * positions),
    )


def _positions(name: str, channels: ChannelMap | None) -> float | None:
    """How often each weight is used for one example."""
    if channels is None:
        return None
    return sum(c.positions for c in channels.contractions if c.weight == name) / channels.batch


def _rule(mask: Mask | None) -> str:
    if mask is None:
        return ""
    if isinstance(mask, ChannelMask):
        return "channels"
    return f"{mask.keep}:{mask.of}" if isinstance(mask, NMMask) else "unstructured"


def _target(mask: Mask | None, weight: Tensor) -> float | None:
    if mask is None or not mask.allocated:
        return None
    if isinstance(mask, NMMask):
        return 1 - mask.keep / mask.of
    return int(mask.target) / (mask.width if isinstance(mask, ChannelMask) else weight.numel())
