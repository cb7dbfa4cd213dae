"""CS: continuous sparsification (Savarese, Silva and Maire, 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from pdp_fx import MaskSite, Progress, WeightPolicy

FINAL_BETA = 200.0


class CS(WeightPolicy):
    """w' = w sigmoid(beta s) / sigmoid(s0) with a trained score s per weight, and the masks' sum in the loss.

    Within a round beta grows from 1 to 200, epoch by epoch; between rounds scores above s0 go back to it.
    After the last round the ticket is drawn: w' = w [s > 0] / sigmoid(s0), for good. Taking weights back to
    those of an early epoch at that point is up to the training loop (`drawn` says when). The schedule must
    count epochs; how much goes follows from s0 and the weight of the penalty.

    Args:
        site: where it stands.
        start: s0.
        strength: the factor of the masks' sum in the loss.
        epochs: of a round.
        rounds: with soft masks; the rounds after them train the ticket.

    Attributes:
        beta: a buffer, 0-dim.
        ticket: whether the mask is hard, a buffer; `hardened` says the same without waiting for a device.
    """

    planned = False

    beta: Tensor
    ticket: Tensor

    def __init__(
        self, site: MaskSite, start: float = 0.0, strength: float = 1e-8, epochs: int = 85, rounds: int = 3
    ) -> None:
        super().__init__(site)
        self.start = start
        self.strength = strength
        self.epochs = epochs
        self.rounds = rounds
        self.score = nn.Parameter(torch.full_like(site.weight, start))
        self.register_buffer("beta", torch.tensor(1.0, dtype=torch.float64))
        self.register_buffer("ticket", torch.tensor(False))
        self.hardened = False
        self.register_load_state_dict_post_hook(_read_ticket)

    @property
    def scale(self) -> float:
        """What makes the first mask 1."""
        return 1 + math.exp(-self.start)

    def soft(self, weight: Tensor) -> Tensor:
        return weight * self._mask()

    def hard(self, weight: Tensor) -> Tensor:
        return weight * (~self.pruned(weight)).to(weight.dtype) * self.scale

    def pruned(self, *weights: Tensor) -> Tensor:
        return self.score.detach() <= 0

    def penalty(self, *weights: Tensor) -> Tensor | None:
        return None if self.hardened else self.strength * self._mask().sum()

    def _mask(self) -> Tensor:
        if self.hardened:
            return (self.score.detach() > 0).to(self.score.dtype) * self.scale
        return torch.sigmoid(self.beta.to(self.score.dtype) * self.score) * self.scale

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        for mask in masks:
            place, epoch = divmod(now.counter, mask.epochs)
            mask.hardened = place >= mask.rounds
            mask.ticket.fill_(mask.hardened)
            mask.beta.fill_(FINAL_BETA ** (epoch / max(mask.epochs - 1, 1)))
            if epoch == 0 and 0 < place < mask.rounds:
                mask.score.clamp_(max=mask.start)

    @staticmethod
    def drawn(counter: int, epochs: int, rounds: int) -> bool:
        """Whether the ticket is drawn at this epoch, so that weights must be taken back now."""
        return counter == epochs * rounds


def _read_ticket(module: nn.Module, incompatible: Any) -> None:
    mask = cast(CS, module)
    mask.hardened = bool(mask.ticket)
