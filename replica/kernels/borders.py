"""Order statistics of a row of logits without a sort, for the kernels of sampling.

A border is a *key*: the bits of a float as an integer that orders like it. The largest border
that leaves enough above it, tokens or probability, is found by passes over the row that count at
seven borders at a time, until at most one token lies between what is enough and what is not.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import triton
import triton.language as tl

STAGES = tl.constexpr(4)
"""Blocks of a row that are on their way while one is looked at."""
LOWEST = tl.constexpr(-0x7F800001)
"""The key of minus infinity."""


@triton.jit
def key_of(x):
    """int32 that orders like the float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weights_of(x, top, scale):
    """Probabilities relative to the most likely token's, whose logit is `top`. scale: log2(e) over
    the temperature."""
    return tl.exp2((x - top) * scale)


@triton.jit
def _tally(key, weight, border, count, mass):
    above = key >= border
    return count + above.to(tl.int32), mass + tl.where(above, weight, 0.0)


@triton.jit
def _narrow(count, mass, border, wanted, low, count_low, high, count_high, BY_MASS: tl.constexpr):
    reached = tl.sum(count, 0)
    if BY_MASS:
        enough = tl.sum(mass.to(tl.float64), 0) >= wanted
    else:
        enough = reached >= wanted
    if enough & (border > low):
        low = border
        count_low = reached
    if (enough == 0) & (border < high):
        high = border
        count_high = reached
    return low, count_low, high, count_high


@triton.jit
def largest_border(
    row, vocab_size, low, high, wanted, top, scale, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """int64: the tokens with keys from it on are enough, and without the least of them would not
    be. low: enough for sure. high: not enough. wanted: tokens, or relative probability (float64).
    """
    i = tl.arange(0, BLOCK)
    count_low = vocab_size
    count_high = 0
    while (high - low > 1) & (count_low - count_high > 1):
        step = tl.maximum((high - low) // 8, 1)
        n1 = tl.zeros([BLOCK], tl.int32)
        n2, n3, n4, n5, n6, n7 = n1, n1, n1, n1, n1, n1
        m1 = tl.zeros([BLOCK], tl.float32)
        m2, m3, m4, m5, m6, m7 = m1, m1, m1, m1, m1, m1
        for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
            x = tl.load(row + start + i, start + i < vocab_size, float("-inf"))
            key = key_of(x)
            weight = weights_of(x, top, scale) if BY_MASS else x
            n1, m1 = _tally(key, weight, low + step, n1, m1)
            n2, m2 = _tally(key, weight, low + 2 * step, n2, m2)
            n3, m3 = _tally(key, weight, low + 3 * step, n3, m3)
            n4, m4 = _tally(key, weight, low + 4 * step, n4, m4)
            n5, m5 = _tally(key, weight, low + 5 * step, n5, m5)
            n6, m6 = _tally(key, weight, low + 6 * step, n6, m6)
            n7, m7 = _tally(key, weight, low + 7 * step, n7, m7)
        a, b, c, d = low, count_low, high, count_high
        a, b, c, d = _narrow(n1, m1, low + step, wanted, a, b, c, d, BY_MASS)
        a, b, c, d = _narrow(n2, m2, low + 2 * step, wanted, a, b, c, d, BY_MASS)
        a, b, c, d = _narrow(n3, m3, low + 3 * step, wanted, a, b, c, d, BY_MASS)
        a, b, c, d = _narrow(n4, m4, low + 4 * step, wanted, a, b, c, d, BY_MASS)
        a, b, c, d = _narrow(n5, m5, low + 5 * step, wanted, a, b, c, d, BY_MASS)
        a, b, c, d = _narrow(n6, m6, low + 6 * step, wanted, a, b, c, d, BY_MASS)
        a, b, c, d = _narrow(n7, m7, low + 7 * step, wanted, a, b, c, d, BY_MASS)
        low, count_low, high, count_high = a, b, c, d
        if not BY_MASS:
            if count_low == wanted:
                high = low
    return low
