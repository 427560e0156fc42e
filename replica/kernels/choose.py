"""From logits to a token, one program per row: greedy, or a seeded draw from the most likely.

The arithmetic is that of `replica.sampler`, which is the reference: top-k, then top-p of what is
left, then min-p, then inverse transform sampling with float64 sums. A row takes only the passes
that its parameters ask for, so a greedy row costs one, whatever its neighbours want.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.io_slot import CHOICE, MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P
from replica.kernels.borders import LOWEST, STAGES, key_of, largest_border, weights_of

BLOCK, WARPS = 2048, 16
GROUPS = 128
"""Groups of tokens whose best are looked at first: the k-th best of them is no better than the
k-th best of all, and nearly as good, for k up to a quarter of them."""


@triton.jit
def _mix(state):
    """The finaliser of SplitMix64, as in `replica.rng`, on uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """float64 in [0, 1), as `replica.rng.uniform`. Arguments: int64."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64) + golden)
    state = _mix(state ^ ((choice + 1).to(tl.uint64) * golden))
    state = _mix(state ^ ((position + 1).to(tl.uint64) * golden))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def best_of(row, vocab_size, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """(logit and id of the best token, the first of equals; best logits of GROUPS groups)"""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = i
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + i, start + i < vocab_size, float("-inf"))
        better = x > best
        where = tl.where(better, start + i, where)
        best = tl.where(better, x, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, where, vocab_size), 0)
    return top, token, tl.max(tl.reshape(best, [GROUPS, BLOCK // GROUPS]), 1)


@triton.jit
def floor_of_top(groups, k, GROUPS: tl.constexpr):
    """A border that at least k tokens reach; no better one than any if k is large."""
    ordered = tl.sort(groups, descending=True)
    kth = tl.sum(tl.where(tl.arange(0, GROUPS) == k - 1, ordered, 0.0), 0)
    return tl.where(k <= GROUPS // 4, key_of(kth), LOWEST).to(tl.int64)


@triton.jit
def _mass_above(row, vocab_size, border, top, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + i, start + i < vocab_size, float("-inf"))
        total += tl.where(key_of(x) >= border, weights_of(x, top, scale), 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _kept(row, start, vocab_size, border, least, top, scale, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    x = tl.load(row + i, i < vocab_size, float("-inf"))
    weight = weights_of(x, top, scale)
    return tl.where((key_of(x) >= border) & (weight >= least), weight, 0.0).to(tl.float64)


@triton.jit
def _drawn(
    row, vocab_size, border, least, top, scale, number,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Where the cumulative probability of what is kept passes `number` of its total."""
    b = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        kept = _kept(row, start, vocab_size, border, least, top, scale, BLOCK)
        sums = tl.where(b == start // BLOCK, tl.sum(kept, 0), sums)
    cumulative = tl.cumsum(sums, 0)
    target = number * tl.sum(tl.where(b == BLOCKS - 1, cumulative, 0.0), 0)
    # Rounding may leave the target above all sums: then the last possible token is meant.
    last = tl.max(tl.where(sums > 0, b, 0), 0)
    block = tl.minimum(tl.min(tl.where(cumulative > target, b, BLOCKS), 0), last)
    before = tl.sum(tl.where(b == block, cumulative - sums, 0.0), 0)
    kept = _kept(row, block * BLOCK, vocab_size, border, least, top, scale, BLOCK)
    i = tl.arange(0, BLOCK)
    passed = (before + tl.cumsum(kept, 0) > target) & (kept > 0)
    found = tl.min(tl.where(passed, i, BLOCK), 0)
    return block * BLOCK + tl.minimum(found, tl.max(tl.where(kept > 0, i, 0), 0))


@triton.jit
def _choose(
    logits, row_stride, rows, positions, ints, ints_stride, floats, floats_stride,
    sampled, last_token, vocab_size,
    SEED: tl.constexpr, CHOICE: tl.constexpr, TOP_K: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * row_stride
    owner = tl.load(rows + index)
    numbers, reals = ints + owner * ints_stride, floats + owner * floats_stride
    temperature = tl.load(reals + TEMPERATURE)
    top, token, groups = best_of(row, vocab_size, BLOCK, GROUPS)
    if temperature > 0:
        scale = tl.minimum(1.4426950408889634 / temperature, 1e30)
        low = tl.full([], LOWEST, tl.int64)
        high = key_of(top).to(tl.int64) + 1
        k = tl.load(numbers + TOP_K)
        if (k > 0) & (k < vocab_size):
            low = floor_of_top(groups, k, GROUPS)
            low = largest_border(row, vocab_size, low, high, k, top, scale, False, BLOCK)
        p = tl.load(reals + TOP_P)
        if p < 1:
            wanted = p.to(tl.float64) * _mass_above(row, vocab_size, low, top, scale, BLOCK)
            wanted = tl.maximum(wanted, 1e-300)
            low = largest_border(row, vocab_size, low, high, wanted, top, scale, True, BLOCK)
        number = _uniform(
            tl.load(numbers + SEED), tl.load(numbers + CHOICE), tl.load(positions + index)
        )
        least = tl.load(reals + MIN_P)
        token = _drawn(row, vocab_size, low, least, top, scale, number, BLOCK, BLOCKS)
    tl.store(sampled + index, token.to(tl.int64))
    tl.store(last_token + owner, token.to(tl.int64))


def choose(
    logits: Tensor, rows: Tensor, positions: Tensor, ints: Tensor, floats: Tensor,
    last_token: Tensor,
) -> Tensor:  # fmt: skip
    """int64 [S]: the token of each row, which goes to its place in `last_token` [R], too.

    logits: float32 [S, V]. rows, positions: int64 [S]. ints: int64 [R, ...], floats: float32
    [R, ...], parameters with the columns of `replica.io_slot`.
    """
    count, vocab_size = logits.shape
    sampled = torch.empty_like(rows)
    _choose[(count,)](
        logits, logits.stride(0), rows, positions, ints, ints.stride(0), floats, floats.stride(0),
        sampled, last_token, vocab_size,
        SEED=SEED, CHOICE=CHOICE, TOP_K=TOP_K, TEMPERATURE=TEMPERATURE, TOP_P=TOP_P, MIN_P=MIN_P,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK)),
        GROUPS=GROUPS, num_warps=WARPS,
    )  # fmt: skip
    return sampled
