"""Which parameters behind a computed weight can be masked in the weight's place.

There is no table of what operations do to zeros. Instead, the part of the graph that computes the weight is
run with one half of a parameter set to zero, and then with the other half: if zeros of the parameter become
zeros of the weight, a mask on the parameter acts as a mask on the weight. It does not where zeros are divided
by their own norm, or have no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.weights.sources import NOTHING, run_through, sources_of

Values = dict[str, Tensor]

TRIES = 4
"""How many single zeros are tried; some may hit a part of the parameter that the weight does not use."""


@dataclass(frozen=True)
class Effect:
    """What a parameter does to a weight that is computed from it.

    Attributes:
        keeps_zeros: whether every element of the weight that depends on the parameter is 0 if a part of the
            parameter is 0.
        keeps_finite: whether the weight and its gradient are finite, too, then, and if a whole row is 0.
        input_axis: the axis of the parameter whose indices are those of the weight's input channels, or None.
    """

    keeps_zeros: bool
    keeps_finite: bool
    input_axis: int | None

    @property
    def fits(self) -> bool:
        """Whether single weights can be masked in the parameter."""
        return self.keeps_zeros and self.keeps_finite


NONE = Effect(keeps_zeros=False, keeps_finite=False, input_axis=None)


def effects(
    gm: fx.GraphModule,
    weight: fx.Node,
    names: Iterable[str],
    axis: int | None,
    sizes: Mapping[fx.Node, Any] = NOTHING,
) -> dict[str, Effect]:
    """What each of the parameters ``names`` does to the value of ``weight``.

    Args:
        gm: the graph module, inside a `trial` of it.
        weight: a node that depends on parameters, buffers and constants only.
        names: parameters of at least two axes that it depends on.
        axis: the axis of the weight's input channels, or None.
        sizes: what nodes that read sizes of data give.
    """
    found = dict.fromkeys(names, NONE)
    with contextlib.suppress(RuntimeError):  # an inverse, for one, may not exist with zeros
        run = _Run(gm, weight, sizes)
        for name in found:
            found[name] = _effect(run, name, axis)
    return found


def _effect(run: _Run, name: str, axis: int | None) -> Effect:
    """The effect of one parameter, by setting one half of it to 0 and then the other."""
    dense = run.values[name]
    holes = run.random(dense.shape).to(dense.device) < 0.5
    halves = [run.result(name, dense * half) for half in (holes, ~holes)]
    # What a quantiser rounds to 0 may be no 0 any more when its scale has become smaller.
    changed = torch.stack([half != run.dense for half in halves]).any(dim=0) & (run.dense != 0)
    zero = torch.stack([run.zeros(half) for half in halves]).any(dim=0)
    if not changed.any() or not torch.equal(changed, zero) or _misses_single_zeros(run, name):
        return NONE
    finite = all(run.is_finite(name, value) for value in (dense * holes, *_without_slices(dense)))
    if axis is None:
        return Effect(True, finite, None)
    axes = sorted(range(dense.ndim), key=lambda own: own != 1)
    return Effect(True, finite, next((own for own in axes if _runs_along(run, name, own, axis)), None))


def _without_slices(dense: Tensor) -> Iterator[Tensor]:
    """The values with one slice of zeros, for an index of each axis."""
    for axis, size in enumerate(dense.shape):
        values = dense.clone()
        values.select(axis, size // 2).zero_()
        yield values


def _runs_along(run: _Run, name: str, own: int, axis: int) -> bool:
    """Whether the indices of axis ``own`` of the parameter are those of ``axis`` of the weight."""
    size = run.values[name].shape[own]
    return all(
        _is_column(run, name, own, place, axis) for place in {0, min(1, size - 1), size // 2, size - 1}
    )


def _misses_single_zeros(run: _Run, name: str) -> bool:
    """Whether a single zero in the place of a large number changes the weight and leaves no zero there."""
    values = run.values[name].reshape(-1)
    for place in values.abs().topk(min(TRIES, len(values))).indices:
        holed = values.clone()
        holed[place] = 0
        weight = run.result(name, holed.reshape(run.values[name].shape))
        if not torch.equal(weight, run.dense) and not bool(run.zeros(weight).any()):
            return True
    return False


def _is_column(run: _Run, name: str, own: int, place: int, axis: int) -> bool:
    """Whether zeros at index ``place`` of the parameter make only that index of the weight 0, or nothing."""
    values = run.values[name].clone()
    values.select(own, place).zero_()
    zeros = run.zeros(run.result(name, values))
    others = [other for other in range(zeros.ndim) if other != axis % zeros.ndim]
    return torch.nonzero(zeros.any(dim=others)).reshape(-1).tolist() in ([], [place])


def _as_it_is(kept: Tensor) -> Tensor:
    """Keep for a backward pass what a trial otherwise does not keep."""
    return kept


class _Run(Interpreter):
    """Computes a weight from numbers of its own in the place of parameters, with the same signs.

    Where masks are put must not follow from how large weights are: two models that are prepared alike take
    each other's checkpoints. Nor may a number be as small as those that quantisers round to 0.
    """

    def __init__(self, gm: fx.GraphModule, weight: fx.Node, sizes: Mapping[fx.Node, Any]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._generator = torch.Generator().manual_seed(0)
        self.values: Values = {}
        self._weight, self._nodes, self._sizes = weight, sources_of(weight, sizes), sizes
        self._chosen: Values = {}
        self.dense = self._computed({})

    def result(self, name: str, value: Tensor) -> Tensor:
        """The weight when the parameter ``name`` has this value."""
        return self._computed({name: value})

    def is_finite(self, name: str, value: Tensor) -> bool:
        """Whether the weight and its gradient are finite when the parameter ``name`` has this value."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            value = value.detach().requires_grad_()
            weight = self.result(name, value)
            if not weight.requires_grad:
                return bool(weight.isfinite().all())
            (gradient,) = torch.autograd.grad(weight, value, torch.ones_like(weight))
        return bool(weight.isfinite().all() and gradient.isfinite().all())

    def random(self, shape: Sequence[int]) -> Tensor:
        """Numbers in [0, 1), the same in every run and on every device; they are on the CPU."""
        return torch.rand(shape, generator=self._generator, device="cpu")

    def zeros(self, weight: Tensor) -> Tensor:
        """Where a weight is 0 that is not 0 otherwise."""
        return (weight == 0) & (self.dense != 0)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A parameter's values, or those chosen for it; a copy of anything else."""
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, nn.Parameter):
            return value.clone()
        if target not in self.values:
            self.values[target] = self._like(value)
        return self._chosen.get(target, self.values[target]).clone()

    def _like(self, value: Tensor) -> Tensor:
        """Numbers with the signs of those of a parameter, of 0 as of 1; whole numbers as they are."""
        if not (value.is_floating_point() or value.is_complex()):
            return value
        return torch.where(value == 0, 1, value.sgn()) * (0.5 + self.random(value.shape)).to(value)

    def _computed(self, chosen: Values) -> Tensor:
        self._chosen, self.env = chosen, {}
        run_through(self, self._nodes, self._sizes)
        return self.env[self._weight]
