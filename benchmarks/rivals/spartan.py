"""Spartan: differentiable sparsity via regularized transportation (Tai, Tian and Lim, 2022), unit costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.rivals.common import OwnAllocation, global_threshold
from pdp_fx import MaskSite, Progress
from pdp_fx.ops.straight import straight_through

SHARPEST = 20.0
"""beta at the end of its ramp, which starts at 1."""

SPARSE_AT, FROZEN_AT = 0.2, 0.8
"""When the sparsity has reached the target, and when beta has and the masks are frozen."""

ITERATIONS = 60


class Spartan(OwnAllocation):
    """w' = w m [m among the k largest], m = sigmoid(beta |w| + mu), where all m of the rule sum to k.

    The gradient skips the second factor, and goes through the first two, mu included; mu ties all layers of
    the rule together. For the last fifth of the training the masks are constants. With unit costs this is the
    fixed point that the paper's Sinkhorn iterations approach. The schedule must count steps and have a
    length; its ramp is not used.

    Args:
        site: where it stands.
        sharpest: beta at the end of its ramp.

    Attributes:
        beta, shift, least: the numbers of the mask now, buffers; shift is mu, least the smallest magnitude
            that stays; everything stays while nothing is to be pruned.
        active, frozen: whether anything is pruned, and whether the mask is a constant now.
        fixed: the frozen mask.
    """

    beta: Tensor
    shift: Tensor
    least: Tensor
    active: Tensor
    frozen: Tensor
    fixed: Tensor

    def __init__(self, site: MaskSite, sharpest: float = SHARPEST) -> None:
        super().__init__(site)
        self.sharpest = sharpest
        for name in ("beta", "shift", "least"):
            self.register_buffer(name, torch.zeros((), dtype=site.weight.dtype))
        for name in ("active", "frozen"):
            self.register_buffer(name, torch.tensor(False))
        self.register_buffer("fixed", torch.ones_like(site.weight))
        self.pool = Pool()

    def soft(self, weight: Tensor) -> Tensor:
        if not bool(self.active):
            return weight
        if bool(self.frozen):
            return weight * self.fixed
        mask = torch.sigmoid(self.beta * weight.abs() + self.pool.shift(self))
        value = weight * mask
        return straight_through(value, value * ~self.pruned(weight))

    def hard(self, weight: Tensor) -> Tensor:
        if not bool(self.active):
            return weight
        return weight * self.fixed if bool(self.frozen) else weight * self._mask(weight)

    def _mask(self, weight: Tensor) -> Tensor:
        soft = torch.sigmoid(self.beta * weight.detach().abs() + self.shift)
        return torch.where(self.pruned(weight), torch.zeros_like(soft), soft)

    def pruned(self, *weights: Tensor) -> Tensor:
        if bool(self.frozen):
            return self.fixed == 0
        return self.active & (weights[0].detach().abs() < self.least)

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        length = now.schedule.length
        if length is None:
            raise ValueError("Spartan needs the length of the training: Schedule(..., length=steps)")
        plain = [weight for (weight,) in weights]
        pool = Pool(masks, plain)
        for mask in masks:
            mask.pool = pool
        if bool(masks[0].frozen):
            return
        progress = now.counter / length
        total = sum(weight.numel() for weight in plain)
        gone = round(masks[0].ratio * min(progress / SPARSE_AT, 1.0) * total)
        if gone > 0:
            beta = 1 + (masks[0].sharpest - 1) * min(progress / FROZEN_AT, 1.0)
            magnitudes = [weight.abs() for weight in plain]
            least = global_threshold(magnitudes, gone + 1)
            shift = balance(torch.cat([m.flatten() for m in magnitudes]), beta, total - gone, masks[0].shift)
            for mask in masks:
                mask.active.fill_(True)
                mask.beta.fill_(beta)
                mask.shift.copy_(shift)
                mask.least.copy_(least)
        if progress >= FROZEN_AT:
            for mask, weight in zip(masks, plain, strict=True):
                mask.fixed.copy_(mask._mask(weight))
                mask.frozen.fill_(True)


def balance(magnitudes: Tensor, beta: float, budget: int, start: Tensor) -> Tensor:
    """Mu with sum sigmoid(beta |w| + mu) = budget: Newton's method from ``start``, kept in a bracket."""
    slope = beta * magnitudes.double()
    low, high = -slope.max() - 50.0, slope.new_tensor(50.0)
    mu = start.double().clamp(low, high)
    for _ in range(ITERATIONS):
        mask = torch.sigmoid(slope + mu)
        excess = mask.sum() - budget
        if abs(float(excess)) <= 1e-7 * budget:
            break
        low, high = (low, mu) if float(excess) > 0 else (mu, high)
        step = mu - excess / (mask * (1 - mask)).sum().clamp(min=1e-30)
        mu = step if bool((step > low) & (step < high)) else 0.5 * (low + high)
    return mu


class Pool:
    """The layers that share one mu, and the node of mu that the layers of one forward pass read.

    Args:
        masks: in the order in which a forward pass meets them.
        weights: theirs.
    """

    def __init__(self, masks: Sequence[Spartan] = (), weights: Sequence[Tensor] = ()) -> None:
        self.masks = masks
        self.weights = weights
        self.node: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A node of a graph can be neither copied nor pickled.
        return vars(self) | {"node": None}

    def shift(self, mask: Spartan) -> Tensor:
        """Mu as a function of all weights; the first layer of a forward pass makes the node."""
        if self.node is None or mask is self.masks[0]:
            self.node = _balanced(mask.shift, mask.beta, self.weights)

        return self.node


def _balanced(shift: Tensor, beta: Tensor, weights: Sequence[Tensor]) -> Tensor:
    result: Any = _Balance.apply(shift, beta, *weights)
    return result


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shift: Tensor, beta: Tensor, *weights: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(shift, beta, *weights)
        return shift.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """From sum sigmoid(beta |w| + mu) = k: dmu = -beta sum m (1 - m) d|w| / sum m (1 - m)."""
        shift, beta, *weights = ctx.saved_tensors
        masks = [torch.sigmoid(beta * weight.abs() + shift) for weight in weights]
        slopes = [mask * (1 - mask) for mask in masks]
        whole = torch.stack([slope.sum() for slope in slopes]).sum()
        grads = [-grad * beta * s * w.sign() / whole for s, w in zip(slopes, weights, strict=True)]
        return None, None, *grads
