"""Operations that random nets are made of, each with the shapes that it takes and gives.

A `Shape` is without the batch: ("image", channels, height and width), ("tokens", channels, number)
or ("vector", channels, 1). An operation that does not fit a shape gives None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[str, int, int]
Fit = Callable[[Shape, int], Shape | None]
Pure = tuple[Fit, Callable[[Tensor, int], Tensor]]
Layer = tuple[Fit, Callable[[Shape, int], nn.Module]]
Join = tuple[Callable[[Shape, Shape], Shape | None], Callable[[Tensor, Tensor], Tensor]]

WIDTHS = (4, 6, 7, 12)
"""Channels that a layer makes, by its knob, a number from 0 to 3."""


def same(shape: Shape, knob: int) -> Shape | None:
    return shape


def only(*kinds: str) -> Fit:
    return lambda shape, knob: shape if shape[0] in kinds else None


def image(change: Callable[[int, int, int], tuple[int, int] | None]) -> Fit:
    """A fit for images that changes (channels, size) by the knob, if neither gets too large or too small."""

    def fit(shape: Shape, knob: int) -> Shape | None:
        found = change(shape[1], shape[2], knob) if shape[0] == "image" else None
        return ("image", *found) if found and 1 <= found[0] <= 32 and 1 <= found[1] <= 8 else None

    return fit


def _divided(by: int) -> Callable[[int, int, int], tuple[int, int] | None]:
    return lambda c, s, k: (c, s) if c % by == 0 and c > by else None


def _shuffle(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).reshape(b, c, h, w)


def _halves(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return left * torch.sigmoid(right)


def _swapped(x: Tensor, at: int) -> Tensor:
    left, right = torch.split(x, [at, x.shape[1] - at], dim=1)
    return torch.cat([right, left], 1)


def _scaled_part(x: Tensor, first: int, whole: bool) -> Tensor:
    """Some channels are written to in place; they or all are read."""
    x = x * 1.0
    part = x[:, first:]
    part *= 1.5
    return x if whole else part


def _into_part(a: Tensor, b: Tensor, whole: bool) -> Tensor:
    """A tensor is added in place to all channels of another but the first, which then are read, or all."""
    a = a * 1.0
    part = a[:, 1:]
    part += b[:, 1:]
    return a if whole else part


def _copied_into(a: Tensor, b: Tensor) -> Tensor:
    """All channels but the first are replaced by those of another tensor, one place further."""
    a = a * 1.0
    a[:, 1:] = b[:, :-1]
    return a


def _dots(rows: Tensor) -> Tensor:
    return (rows @ rows.transpose(1, 2)).flatten(1) * 0.3


def _through_made(a: Tensor, b: Tensor) -> Tensor:
    """The last axis of a, contracted with a matrix that b is for each example."""
    matrix = b.view(b.shape[0], a.shape[-1], -1)
    return a @ matrix if a.ndim == 3 else (a[:, None] @ matrix)[:, 0]


def _rows_copied(x: Tensor) -> Tensor:
    """What is made of no channels is copied for all of them, along an axis of one index."""
    places = torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin()
    return x * places.repeat(1, x.shape[2]) + places.tile((x.shape[2],))


def _solved(x: Tensor) -> Tensor:
    """A triangular system of tokens."""
    system = torch.eye(x.shape[1], dtype=x.dtype) + 0.1 * torch.ones(
        x.shape[1], x.shape[1], dtype=x.dtype
    ).tril(-1)
    return torch.linalg.solve_triangular(system, x, upper=False)


def _folded(shape: Shape, knob: int) -> Shape | None:
    """Tokens that form a square."""
    size = round(shape[2] ** 0.5)
    return ("image", shape[1], size) if shape[0] == "tokens" and size * size == shape[2] else None


def _unfold(x: Tensor) -> Tensor:
    size = round(x.shape[1] ** 0.5)
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], size, size)


def _flat(shape: Shape, knob: int) -> Shape | None:
    size = shape[1] * shape[2] ** 2
    return ("vector", size, 1) if shape[0] == "image" and size <= 128 else None


POINTWISE: dict[str, Pure] = {
    "relu": (same, lambda x, k: F.relu(x)),
    "gelu": (same, lambda x, k: F.gelu(x)),
    "sigmoid": (same, lambda x, k: torch.sigmoid(x)),
    "softplus": (same, lambda x, k: F.softplus(x)),
    "hardswish": (same, lambda x, k: F.hardswish(x)),
    "tanh_inplace": (same, lambda x, k: (x * 1.0).tanh_()),
    "clamp": (same, lambda x, k: x.clamp(-1 + 0.5 * k, 2)),
    "shift": (same, lambda x, k: x + 0.5),
    "scale": (same, lambda x, k: 1.5 * x),
    "reversed": (same, lambda x, k: 1 - x),
    "dropout": (same, lambda x, k: F.dropout(x, 0.2, training=False)),
}

PURE: dict[str, Pure] = {
    **POINTWISE,
    "softmax_channels": (only("image"), lambda x, k: x.softmax(1)),
    "softmax_tokens": (only("tokens"), lambda x, k: x.softmax(1)),
    "cumsum_channels": (only("image"), lambda x, k: x.cumsum(1)),
    "mean_channels": (only("image"), lambda x, k: x * x.mean(1, keepdim=True)),
    "var_channels": (only("image"), lambda x, k: x / (1 + x.var(1, unbiased=k == 0, keepdim=True))),
    "std_all": (only("image", "tokens"), lambda x, k: x / (1 + torch.std(x))),
    "sum_channels": (only("image"), lambda x, k: x * x.sum(1, keepdim=True).tanh()),
    "sum_all": (only("image"), lambda x, k: x * x.sum((1, 2, 3), keepdim=True).tanh()),
    "normalize": (only("vector"), lambda x, k: F.normalize(x, dim=1)),
    "max_pool": (image(lambda c, s, k: (c, s // 2)), lambda x, k: F.max_pool2d(x, 2)),
    "avg_pool_same": (only("image"), lambda x, k: F.avg_pool2d(x, 3, 1, 1)),
    "upsample": (
        image(lambda c, s, k: (c, 2 * s)),
        lambda x, k: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    ),
    "pad_pixels": (image(lambda c, s, k: (c, s + 2)), lambda x, k: F.pad(x, (1, 1, 1, 1), value=0.3 * k)),
    "range_of_channels": (
        only("image"),
        lambda x, k: x * torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype)[:, None, None],
    ),
    "flip_pixels": (only("image"), lambda x, k: x.flip(3)),
    "triangle": (only("image", "tokens"), lambda x, k: x.tril(k)),
    "renorm": (only("image"), lambda x, k: x.renorm(2, 1, 1.0)),
    "counted": (only("image"), lambda x, k: x * (x > 0.1 * k).count_nonzero((2, 3))[:, :, None, None]),
    "flip": (only("image"), lambda x, k: x.flip(1)),
    "roll": (only("image"), lambda x, k: torch.roll(x, k + 1, 1)),
    "halves": (image(lambda c, s, k: (c // 2, s) if c % 2 == 0 else None), lambda x, k: _halves(x)),
    "glu": (image(lambda c, s, k: (c // 2, s) if c % 2 == 0 else None), lambda x, k: F.glu(x, 1)),
    "swapped": (image(lambda c, s, k: (c, s) if c > k + 1 else None), lambda x, k: _swapped(x, k + 1)),
    "slice": (
        image(lambda c, s, k: (c - k - 1, s)),
        lambda x, k: x[:, k // 2 : x.shape[1] - (k - k // 2) - 1],
    ),
    "slice_half": (image(lambda c, s, k: (c // 2, s)), lambda x, k: x[:, : x.shape[1] // 2]),
    "every_other": (image(lambda c, s, k: ((c + 1) // 2, s)), lambda x, k: x[:, ::2]),
    "picked": (image(lambda c, s, k: (4, s) if c > 4 else None), lambda x, k: x[:, [k, 4, 1, 1]]),
    "shuffle_2": (image(_divided(2)), lambda x, k: _shuffle(x, 2)),
    "shuffle_3": (image(_divided(3)), lambda x, k: _shuffle(x, 3)),
    "pixel_shuffle": (
        image(lambda c, s, k: (c // 4, 2 * s) if c % 4 == 0 else None),
        lambda x, k: F.pixel_shuffle(x, 2),
    ),
    "pixel_unshuffle": (
        image(lambda c, s, k: (4 * c, s // 2) if s % 2 == 0 else None),
        lambda x, k: F.pixel_unshuffle(x, 2),
    ),
    "repeat": (image(lambda c, s, k: (2 * c, s)), lambda x, k: x.repeat(1, 2, 1, 1)),
    "interleave": (image(lambda c, s, k: (2 * c, s)), lambda x, k: x.repeat_interleave(2, 1)),
    "pad_channels": (
        image(lambda c, s, k: (c + k, s)),
        lambda x, k: F.pad(x, (0, 0, 0, 0, k // 2, k - k // 2)),
    ),
    "channels_last": (only("image"), lambda x, k: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
    "part_scaled": (image(lambda c, s, k: (c - k, s)), lambda x, k: _scaled_part(x, k, whole=False)),
    "scaled_by_part": (image(lambda c, s, k: (c, s)), lambda x, k: _scaled_part(x, k, whole=True)),
    "constant_view": (
        only("image"),
        lambda x, k: x.view(-1, int(x.shape[1]), x.shape[2] * x.shape[3]).view(x.shape),
    ),
    "to_tokens": (
        lambda shape, k: ("tokens", shape[1], shape[2] ** 2) if shape[0] == "image" else None,
        lambda x, k: x.flatten(2).transpose(1, 2),
    ),
    "to_image": (_folded, lambda x, k: _unfold(x)),
    "to_vector": (
        lambda shape, k: ("vector", shape[1], 1) if shape[0] != "vector" else None,
        lambda x, k: x.mean(1) if x.ndim == 3 else x.mean((2, 3)),
    ),
    "flatten": (_flat, lambda x, k: x.flatten(1)),
    "flatten_last": (_flat, lambda x, k: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1)),
    "mean_repeated": (
        only("image"),
        lambda x, k: x - x.mean((2, 3), keepdim=True).repeat(1, 1, x.shape[2], x.shape[3]),
    ),
    "mean_interleaved": (
        only("tokens"),
        lambda x, k: x + x.mean(1, keepdim=True).repeat_interleave(x.shape[1], dim=1),
    ),
    "rows_copied": (only("tokens"), lambda x, k: _rows_copied(x)),
    "solved": (only("tokens"), lambda x, k: _solved(x)),
    "dots": (
        lambda shape, k: ("vector", 4, 1) if shape[0] == "vector" and shape[1] % 2 == 0 else None,
        lambda x, k: _dots(x.view(x.shape[0], 2, -1)),
    ),
    "to_pixels": (
        lambda shape, k: ("image", shape[1] // 4, 2) if shape[0] == "vector" and shape[1] % 4 == 0 else None,
        lambda x, k: x.view(x.shape[0], -1, 2, 2),
    ),
}


def _equal(a: Shape, b: Shape) -> Shape | None:
    return a if a == b else None


def _equal_images(a: Shape, b: Shape) -> Shape | None:
    return a if a == b and a[0] == "image" and a[1] > 1 else None


def _one_less(a: Shape, b: Shape) -> Shape | None:
    return ("image", a[1] - 1, a[2]) if _equal_images(a, b) else None


def _beside(a: Shape, b: Shape) -> Shape | None:
    fits = a[0] == b[0] and a[2] == b[2] and a[1] + b[1] <= 32
    return (a[0], a[1] + b[1], a[2]) if fits else None


def _gated(a: Shape, b: Shape) -> Shape | None:
    return a if a[0] == "image" and b == ("vector", a[1], 1) else None


def _matched(a: Shape, b: Shape) -> Shape | None:
    return ("tokens", b[2], a[2]) if a[0] == b[0] == "tokens" and a[1] == b[1] and b[2] <= 16 else None


def _mixed(a: Shape, b: Shape) -> Shape | None:
    return ("tokens", b[1], a[2]) if a[0] == b[0] == "tokens" and a[1] == b[2] else None


def _made(a: Shape, b: Shape) -> Shape | None:
    fits = a[0] in ("tokens", "vector") and b[0] == "vector" and b[1] % a[1] == 0
    return (a[0], b[1] // a[1], a[2]) if fits else None


def _cat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1 if a.ndim == 3 else 1)


def _every_other_token(a: Tensor, b: Tensor) -> Tensor:
    mask = torch.arange(a.shape[1]).view(1, -1, 1) % 2 == 0
    return a.masked_scatter(mask.expand_as(a), b)


def _equal_tokens(a: Shape, b: Shape) -> Shape | None:
    return a if a == b and a[0] == "tokens" else None


JOINS: dict[str, Join] = {
    "add": (_equal, lambda a, b: a + b),
    "subtract": (_equal, lambda a, b: a - b),
    "multiply": (_equal, lambda a, b: a * b),
    "into_part": (_one_less, lambda a, b: _into_part(a, b, whole=False)),
    "into_whole": (_equal_images, lambda a, b: _into_part(a, b, whole=True)),
    "copied_into": (_equal_images, _copied_into),
    "first_row_of": (_equal_images, lambda a, b: torch.slice_scatter(a, b[:, :, :1], 2, 0, 1)),
    "every_other_token": (_equal_tokens, _every_other_token),
    "maximum": (_equal, torch.maximum),
    "blend": (_equal, lambda a, b: torch.sigmoid(a) * b + (1 - torch.sigmoid(a)) * a),
    "where": (_equal, lambda a, b: torch.where(a > 0, a, b)),
    "cat": (_beside, _cat),
    "cat_reversed": (_beside, lambda a, b: _cat(b, a)),
    "stack": (
        lambda a, b: ("image", 2 * a[1], a[2]) if a == b and a[0] == "image" and a[1] <= 16 else None,
        lambda a, b: torch.stack([a, b], 2).flatten(1, 2),
    ),
    "gate": (_gated, lambda a, b: a * torch.sigmoid(b)[:, :, None, None]),
    "scores": (_matched, lambda a, b: (a @ b.transpose(1, 2) * 0.3).softmax(-1)),
    "weighted": (_mixed, lambda a, b: a @ b),
    "through_made": (_made, _through_made),
}


def fits(name: str, shapes: list[Shape], knob: int) -> Shape | None:
    """The shape that an operation of one or two tensors gives, or None."""
    if name in JOINS:
        return JOINS[name][0](shapes[0], shapes[1])
    return PURE[name][0](shapes[0], knob)


def compute(name: str, tensors: list[Any], knob: int) -> Tensor:
    """Run an operation of one or two tensors."""
    if name in JOINS:
        return JOINS[name][1](tensors[0], tensors[1])
    return PURE[name][1](tensors[0], knob)
