"""What will be pruned, what will not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate
from torch import nn

from pdp_fx.errors import StateError
from pdp_fx.masks import ChannelMask
from pdp_fx.pruner import Pruner, find


@dataclass(frozen=True)
class Explanation:
    """Tables of what a prepared model prunes; ``str`` gives the text.

    Attributes:
        weights: (parameter, rule, number of weights) of every weight pruned one by one or N:M.
        groups: (group, rule, width, producers, where the masks sit) of every pruned channel group.
        kept: (group, number of channels, reason) of channels that stay although the spec asks.
        skipped: (layer, reason) of layers that the spec's rule does not fit.
    """

    weights: tuple[tuple[str, str, int], ...]
    groups: tuple[tuple[str, str, int, str, str], ...]
    kept: tuple[tuple[str, int, str], ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        sections = (
            ("Pruned weights", ("weight", "rule", "size"), self.weights),
            ("Channel groups", ("group", "rule", "channels", "made by", "masked at"), self.groups),
            ("Channels that stay", ("group", "channels", "why"), self.kept),
            ("Layers left out", ("layer", "why"), self.skipped),
        )
        texts = [
            f"{title}\n{tabulate(rows, headers=headers, tablefmt='simple', disable_numparse=True)}"
            for title, headers, rows in sections
            if rows
        ]
        return "\n\n".join(texts)


def explain(model: nn.Module) -> Explanation:
    """Say what the prepared ``model`` prunes and what it keeps, with the reason for each.

    Raises:
        StateError: the model was never prepared.
    """
    found = find(model)
    if found is None:
        raise StateError("explain(model) needs a model that came from pdp_fx.prepare; this one did not")
    gm, pruner = found
    weights = tuple(
        (mask.parameters_read[0], str(pruner.rules[name]), gm.get_parameter(mask.parameters_read[0]).numel())
        for name, mask in pruner.mask_items()
        if not isinstance(mask, ChannelMask)
    )
    kept = tuple((group.name, group.width, str(reason)) for group in pruner.kept for reason in group.reasons)
    return Explanation(weights, _groups(pruner), kept, pruner.skipped)


def _groups(pruner: Pruner) -> tuple[tuple[str, str, int, str, str], ...]:
    masked = pruner.channels.masked if pruner.channels is not None else frozenset()
    return tuple(
        (
            group.name,
            str(rule),
            group.width,
            ", ".join(slot.tensor.removesuffix(".weight") for slot in group.producers),
            ", ".join(slot.tensor for slot in group.members if slot in masked),
        )
        for group, rule in pruner.groups
    )


