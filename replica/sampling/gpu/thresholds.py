"""Order statistics of a row of logits without sorting it, for the kernels of sampling.

A threshold is a logit: what lies below it is left out. Each pass over the row counts at seven
thresholds between one that leaves enough, tokens or probability, and one that does not. Once few
tokens lie between the two, they are collected and sorted in registers.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import triton
import triton.language as tl

STAGES = tl.constexpr(4)
"""Blocks of a row that are being loaded while one is processed."""
PASSES = tl.constexpr(12)
"""After this many passes lower and upper threshold are neighbours, so all values between them are
equal."""


@triton.jit
def load_block(row, start, vocab_size, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(row + i, i < vocab_size, float("-inf"))


@triton.jit
def weights_of(x, top, scale):
    """Probabilities relative to the most likely token's, whose logit is `top`. scale: log2(e) over
    the temperature."""
    return tl.exp2((x - top) * scale)


@triton.jit
def best_of(row, vocab_size, BLOCK: tl.constexpr):
    """(logit and id of the best token, the first of equals; the best of BLOCK groups of tokens)"""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = i
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = load_block(row, start, vocab_size, BLOCK)
        better = x > best
        where = tl.where(better, start + i, where)
        best = tl.where(better, x, best)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, where, vocab_size), 0), best


@triton.jit
def kth_of(groups, k, SIZE: tl.constexpr):
    """The k-th best of SIZE groups: at least k tokens are as good, and not many more."""
    ordered = tl.sort(groups, descending=True)
    return tl.min(tl.where(tl.arange(0, SIZE) < k, ordered, float("inf")), 0)


@triton.jit
def least_of(row, vocab_size, BLOCK: tl.constexpr):
    """The lowest logit that is not minus infinity."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = load_block(row, start, vocab_size, BLOCK)
        least = tl.minimum(least, tl.where(x == float("-inf"), float("inf"), x))
    return tl.min(least, 0)


@triton.jit
def just_above(x):
    return x + tl.abs(x) * 2.4e-7 + 1e-30


@triton.jit
def _tally(x, weight, threshold, count, mass):
    above = x >= threshold
    return count + above.to(tl.int32), mass + tl.where(above, weight, 0.0)


@triton.jit
def _judge(
    count,
    mass,
    threshold,
    wanted,
    low,
    count_low,
    high,
    count_high,
    mass_high,
    BY_MASS: tl.constexpr,
):
    reached = tl.sum(count, 0)
    reached_mass = tl.sum(mass.to(tl.float64), 0)
    enough = reached_mass >= wanted if BY_MASS else reached >= wanted
    if enough & (threshold > low):
        low = threshold
        count_low = reached
    if (enough == 0) & (threshold < high):
        high = threshold
        count_high = reached
        mass_high = reached_mass
    return low, count_low, high, count_high, mass_high


@triton.jit
def narrow(
    row, vocab_size, low, high, wanted, top, scale, left, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """(low, high, tokens and probability from high on), with at most `left` tokens in between, or
    equal ones. low: leaves enough. high: does not. wanted: tokens, or relative probability.
    """
    count_low = vocab_size
    count_high = 0
    mass_high = tl.full([], 0.0, tl.float64)
    passes = 0
    while (count_low - count_high > left) & (passes < PASSES):
        step = (high - low) / 8
        n1 = tl.zeros([BLOCK], tl.int32)
        n2, n3, n4, n5, n6, n7 = n1, n1, n1, n1, n1, n1
        m1 = tl.zeros([BLOCK], tl.float32)
        m2, m3, m4, m5, m6, m7 = m1, m1, m1, m1, m1, m1
        for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
            x = load_block(row, start, vocab_size, BLOCK)
            weight = weights_of(x, top, scale) if BY_MASS else x
            n1, m1 = _tally(x, weight, low + step, n1, m1)
            n2, m2 = _tally(x, weight, low + 2 * step, n2, m2)
            n3, m3 = _tally(x, weight, low + 3 * step, n3, m3)
            n4, m4 = _tally(x, weight, low + 4 * step, n4, m4)
            n5, m5 = _tally(x, weight, low + 5 * step, n5, m5)
            n6, m6 = _tally(x, weight, low + 6 * step, n6, m6)
            n7, m7 = _tally(x, weight, low + 7 * step, n7, m7)
        a, b, c, d, e = low, count_low, high, count_high, mass_high
        a, b, c, d, e = _judge(n1, m1, low + step, wanted, a, b, c, d, e, BY_MASS)
        a, b, c, d, e = _judge(n2, m2, low + 2 * step, wanted, a, b, c, d, e, BY_MASS)
        a, b, c, d, e = _judge(n3, m3, low + 3 * step, wanted, a, b, c, d, e, BY_MASS)
        a, b, c, d, e = _judge(n4, m4, low + 4 * step, wanted, a, b, c, d, e, BY_MASS)
        a, b, c, d, e = _judge(n5, m5, low + 5 * step, wanted, a, b, c, d, e, BY_MASS)
        a, b, c, d, e = _judge(n6, m6, low + 6 * step, wanted, a, b, c, d, e, BY_MASS)
        a, b, c, d, e = _judge(n7, m7, low + 7 * step, wanted, a, b, c, d, e, BY_MASS)
        low, count_low, high, count_high, mass_high = a, b, c, d, e
        passes += 1
    return low, high, count_high, mass_high


@triton.jit
def collect_sorted(
    row, vocab_size, low, high, scratch, counter, BLOCK: tl.constexpr, CAPACITY: tl.constexpr
):
    """(how many logits lie in [low, high); the best of them first, minus infinity behind them)

    scratch: CAPACITY float32. counter: an int32 that is zero, and is zero again afterwards. The
    order in which programs' threads collect is any, but not that of the result. If there are more
    than CAPACITY, the result is of no use.
    """
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = load_block(row, start, vocab_size, BLOCK)
        inside = (x >= low) & (x < high)
        place = tl.atomic_add(counter + tl.zeros([BLOCK], tl.int32), 1, inside, sem="relaxed")
        tl.store(scratch + place, x, inside & (place < CAPACITY))
    tl.debug_barrier()
    count = tl.load(counter, volatile=True)
    i = tl.arange(0, CAPACITY)
    found = tl.load(scratch + i, i < count, float("-inf"), volatile=True)
    tl.debug_barrier()
    tl.store(counter, 0)
    return count, tl.sort(found, descending=True)
