"""Calling `MaskPolicy.update`, which may write to the weights that it is given and to its own parameters.

A weight that is sharded is given to it gathered, and one that is computed as it is computed now. What is
written to a gathered weight is written to its shards, too; to a computed one nothing can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pdp_fx.errors import StateError
from pdp_fx.planning import parameter_of, parameters_of
from pdp_fx.policy import MaskPolicy, NMPolicy, Progress, from_inputs
from pdp_fx.sharding import gathered, is_shard, write_whole


@torch.no_grad()
def update(gm: nn.Module, masks: Sequence[MaskPolicy], computed: Mapping[str, str], now: Progress) -> None:
    """Call the `update` of masks of one class.

    Args:
        gm: the prepared model.
        masks: as in `MaskPolicy.update`.
        computed: as in `Pruner`.
        now: as in `MaskPolicy.update`.

    Raises:
        StateError: it writes to a computed weight.
    """
    weights = [tuple(parameters_of(gm, mask)) for mask in masks]
    before = [[_version(weight) for weight in given] for given in weights]
    with gathered(*masks, write=True):
        type(masks[0]).update(masks, weights, now)
    for mask, given, versions in zip(masks, weights, before, strict=True):
        for name, weight, version in zip(mask.parameters_read, given, versions, strict=True):
            if name not in computed:
                _keep(gm, mask, name, weight)
            elif _version(weight) != version:
                raise StateError(
                    f"{type(mask).__name__}.update writes to the weight of {name}, which the model computes "
                    "from its parameters in every forward pass, so what is written is lost; leave that "
                    "weight out, or change what soft and hard make of it"
                )


def _keep(gm: nn.Module, mask: MaskPolicy, name: str, weight: Tensor) -> None:
    """Write a gathered weight to its shards."""
    parameter = parameter_of(gm, name)
    if is_shard(parameter):
        write_whole(parameter, from_inputs(weight, mask.axis) if isinstance(mask, NMPolicy) else weight)


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
