"""Checks of policies that are not this package's: what they give, and what they call pruned."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from pdp_fx.channel_policy import ChannelPolicy
from pdp_fx.errors import SpecError, StateError
from pdp_fx.field_checks import described
from pdp_fx.planning import parameters_of
from pdp_fx.policy import MaskPolicy, WeightPolicy
from pdp_fx.tracing.preserve import preserved


def is_own(mask: MaskPolicy) -> bool:
    """Whether a mask is one of this package's, which need no check."""
    return type(mask).__module__.startswith("pdp_fx.")


def check_results(gm: fx.GraphModule, masks: Iterable[tuple[str, MaskPolicy]]) -> None:
    """Raise SpecError if a policy of the user's returns something that layers cannot use."""
    for _, mask in masks:
        if not is_own(mask):
            _check_modes(mask, parameters_of(gm, mask))


def check_hard(gm: fx.GraphModule, masks: Iterable[tuple[str, MaskPolicy]]) -> None:
    """Raise StateError if a policy of the user's keeps what it calls pruned, or prunes whole groups."""
    for name, mask in masks:
        if not isinstance(mask, WeightPolicy | ChannelPolicy) or is_own(mask):
            continue
        weights = parameters_of(gm, mask)
        with preserved(mask), torch.no_grad():
            mask.eval()
            gone = mask.pruned(*weights)
            left = mask.hard(*weights)[gone]
        if left.count_nonzero() > 0:
            units = "weights" if isinstance(mask, WeightPolicy) else "channels"
            raise StateError(
                f"{type(mask).__name__}.hard keeps {int(left.count_nonzero())} {units} of {name} that "
                "its pruned calls gone: it must give 0 for them"
            )
        if isinstance(mask, ChannelPolicy) and not mask.leaves_enough(gone):
            parts = ", one of each of mask.parts among them" if mask.parts else ""
            raise StateError(
                f"{type(mask).__name__}.pruned leaves {mask.width - int(gone.sum())} of the {mask.width} "
                f"channels of {name}: at least {mask.fewest(1)} must stay{parts}"
            )


def _check_modes(mask: MaskPolicy, weights: list[Tensor]) -> None:
    """Call a mask once in each mode and check the shape and dtype of its results."""
    like = weights[0]
    shape = (mask.width,) if isinstance(mask, ChannelPolicy) else tuple(like.shape)
    for training, name in ((True, "soft"), (False, "hard")):
        method = f"{type(mask).__name__}.{name}"
        result = _called(mask, weights, training, method)
        if not isinstance(result, Tensor):
            raise SpecError(f"{method} must give a tensor, got {described(result)}")
        same = result.dtype == like.dtype or (isinstance(mask, ChannelPolicy) and result.is_floating_point())
        if tuple(result.shape) != shape or not same:
            raise SpecError(
                f"{method} gives {result.dtype} of shape {tuple(result.shape)} for "
                f"{mask.parameters_read[0]}; it must give {like.dtype} of shape {shape}"
            )


def _called(mask: MaskPolicy, weights: list[Tensor], training: bool, method: str) -> object:
    """The result of ``mask`` in one mode; an error in it names ``method``."""
    try:
        with preserved(mask), torch.no_grad():
            return mask.train(training)(*weights)
    except Exception as err:
        raise SpecError(f"{method} fails for {mask.parameters_read[0]}: {type(err).__name__}: {err}") from err
