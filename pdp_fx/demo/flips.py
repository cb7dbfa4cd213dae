"""What the masks of a prepared model decide, and how often they change their mind.

The paper counts flipped decisions to show that soft masks stay undecided until late (section 3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.errors import StateError
from pdp_fx.planning import parameters_of
from pdp_fx.policy import MaskPolicy
from pdp_fx.pruner import find


@dataclass(frozen=True)
class Units:
    """All units of a model: weights, or channels; both tensors have one entry a unit.

    Attributes:
        magnitudes: what a unit is ranked by: a weight with its sign, or a channel's root mean square.
        pruned: whether the hard mask prunes the unit now.
    """

    magnitudes: Tensor
    pruned: Tensor


def mask_units(prepared: nn.Module) -> Units:
    """Return the units of all masks, in graph order.

    Raises:
        StateError: the model was never prepared.
    """
    found = find(prepared)
    if found is None:
        raise StateError("only a model that came from pdp_fx.prepare has masks; this one did not")
    gm, pruner = found
    masks = [
        (mask, [weight.detach() for weight in parameters_of(gm, mask)]) for _, mask in pruner.mask_items()
    ]
    magnitudes = torch.cat([_magnitudes(mask, weights).flatten() for mask, weights in masks])
    pruned = torch.cat([mask.pruned(*weights).flatten() for mask, weights in masks])
    return Units(magnitudes, pruned)


class FlipCounter:
    """Compares the hard mask decisions of a model with those at the last call of `record`.

    Attributes:
        newly_pruned: for each call the share of all units that was kept before and is pruned now.
        restored: for each call the share of all units that was pruned before and is kept now.
    """

    def __init__(self, prepared: nn.Module) -> None:
        self.newly_pruned: list[float] = []
        self.restored: list[float] = []
        self._prepared = prepared
        self._last = mask_units(prepared).pruned

    def record(self) -> None:
        """Count what has flipped since the last call."""
        now = mask_units(self._prepared).pruned
        self.newly_pruned.append((now & ~self._last).float().mean().item())
        self.restored.append((~now & self._last).float().mean().item())
        self._last = now


def _magnitudes(mask: MaskPolicy, weights: list[Tensor]) -> Tensor:
    return mask.scores(*weights) if isinstance(mask, ChannelPolicy) else weights[0]
