# pyright: basic, reportArgumentType=false, reportOperatorIssue=false
"""Triton kernels behind `pdp_fx.ops.gpu`.

Selection is by radix: as integers, the bits of magnitudes are in the order of the magnitudes, NaN behind
infinity. Four rounds fix eight bits each of the wanted one, for all layers at once: `count_digits` counts,
over the weights that begin with the bits found so far, which eight bits come next; `choose_digit` finds where
the wanted rank falls.
"""

import torch
import triton
import triton.language as tl

from pdp_fx.ops import soft_mask

STORED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

BINS = tl.constexpr(256)
LARGEST = tl.constexpr(0x7FFFFFFF)
FAINT = tl.constexpr(soft_mask.FAINT)


@triton.jit
def count_digits(
    addresses, sizes, layers, starts, prefixes, counts, above,
    SHIFT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the histogram of one digit over one piece of a layer to that of the layer.

    In the last round, also find the least magnitude that begins with more than the bits found so far.
    """
    piece = tl.program_id(0)
    layer = tl.load(layers + piece)
    start = tl.load(starts + piece)
    size = tl.load(sizes + layer)
    weights = tl.load(addresses + layer).to(tl.pointer_type(DTYPE))
    prefix = 0 if SHIFT == 24 else tl.load(prefixes + layer)
    bins = tl.zeros((BINS,), tl.int32)
    least = tl.full((BLOCK,), LARGEST, tl.int32)
    for block in range(BLOCKS):
        places = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = places < size
        values = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32)
        keys = values.to(tl.int32, bitcast=True) & LARGEST
        wanted = inside if SHIFT == 24 else inside & ((keys >> (SHIFT + 8)) == prefix)
        bins += tl.histogram((keys >> SHIFT) & (BINS - 1), BINS, mask=wanted)
        if SHIFT == 0:
            least = tl.minimum(least, tl.where(inside & ((keys >> 8) > prefix), keys, LARGEST))
    digits = tl.arange(0, BINS)
    tl.atomic_add(counts + layer * BINS + digits, bins, mask=bins > 0, sem="relaxed")
    if SHIFT == 0:
        tl.atomic_min(above + layer, tl.min(least, 0), sem="relaxed")


@triton.jit
def choose_digit(sizes, wanted, prefixes, ranks, counts, above, thresholds, SHIFT: tl.constexpr):
    """Fix one more digit of a layer's wanted magnitude; in the last round, give the threshold.

    Ranks count from 1, among the weights that begin with the bits found so far.
    """
    layer = tl.program_id(0)
    pruned = tl.minimum(tl.load(wanted + layer), tl.load(sizes + layer) - 1)
    if SHIFT == 24:
        prefix = 0
        rank = tl.maximum(pruned, 1).to(tl.int32)
        tl.store(above + layer, LARGEST)
    else:
        prefix = tl.load(prefixes + layer)
        rank = tl.load(ranks + layer)
    digits = tl.arange(0, BINS)
    bins = tl.load(counts + layer * BINS + digits)
    digit = tl.sum((tl.cumsum(bins, 0) < rank).to(tl.int32), 0)
    rank -= tl.sum(tl.where(digits < digit, bins, 0), 0)
    prefix = (prefix << 8) | digit
    if SHIFT > 0:
        tl.store(counts + layer * BINS + digits, tl.zeros((BINS,), tl.int32))
        tl.store(prefixes + layer, prefix)
        tl.store(ranks + layer, rank)
    else:
        same = tl.sum(tl.where(digits == digit, bins, 0), 0)
        later = tl.min(tl.where((digits > digit) & (bins > 0), digits, BINS), 0)
        following = tl.where(later < BINS, prefix - digit + later, tl.load(above + layer))
        following = tl.where(rank < same, prefix, following)
        halfway = 0.5 * prefix.to(tl.float32, bitcast=True) + 0.5 * following.to(tl.float32, bitcast=True)
        tl.store(thresholds + layer, tl.where(pruned > 0, halfway, float("-inf")))


@triton.jit
def _soft_mask(wide, threshold, tau, TAU_STORED: tl.constexpr):
    t = tl.load(threshold).to(tl.float32)
    scale = 1.0 / (tl.load(tau).to(tl.float32) if TAU_STORED else tau)
    x = wide * wide * scale - t * tl.abs(t) * scale
    return tl.where(x <= FAINT, 0.0, tl.sigmoid(x)), scale


@triton.jit
def mask_weights(weights, threshold, tau, masked, size, TAU_STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Equation 1: w_hat = m w."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    wide = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32)
    mask, _ = _soft_mask(wide, threshold, tau, TAU_STORED)
    tl.store(masked + places, mask * wide, mask=inside)


@triton.jit
def mask_gradients(
    weights, threshold, tau, upstream, gradients, size, TAU_STORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Equation 2: dw = (m + 2 w^2 / tau  m (1 - m)) dw_hat."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    wide = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(upstream + places, mask=inside, other=0.0).to(tl.float32)
    mask, scale = _soft_mask(wide, threshold, tau, TAU_STORED)
    # One factor w at a time, so that w^2 * 0 is 0 for every finite w.
    softness = wide * ((1.0 - mask) * mask) * (2.0 * scale) * wide
    tl.store(gradients + places, (mask + softness) * grad, mask=inside)
