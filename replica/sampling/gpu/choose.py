"""From logits to a token, one program per row: greedy, or a seeded draw from the most likely.

The arithmetic is that of `replica.sampling.sampler`, which is the reference: top-k, then top-p of
what is left, then min-p, then inverse transform sampling with float64 sums. A row takes only the
passes that its parameters ask for, so a greedy row costs one, whatever its neighbours want.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.io_slot import CHOICE, MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P
from replica.sampling.gpu.thresholds import (
    STAGES,
    best_of,
    collect_sorted,
    just_above,
    kth_of,
    least_of,
    load_block,
    narrow,
    weights_of,
)

BLOCK, WARPS = 2048, 16
CAPACITY = 2048
"""Most tokens that are sorted in registers."""


@triton.jit
def _mix(state):
    """The finaliser of SplitMix64, as in `replica.sampling.rng`, on uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """float64 in [0, 1), as `replica.sampling.rng.uniform`. Arguments: int64."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64) + golden)
    state = _mix(state ^ ((choice + 1).to(tl.uint64) * golden))
    state = _mix(state ^ ((position + 1).to(tl.uint64) * golden))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _top_k(
    row, vocab_size, k, top, groups, scratch, counter, BLOCK: tl.constexpr, CAPACITY: tl.constexpr
):
    """(threshold of the k best; whether `ordered` holds them all; the best logits from some on)"""
    low = kth_of(groups, k, BLOCK) if k <= CAPACITY // 2 else float("-inf")
    if low == float("-inf"):
        low = least_of(row, vocab_size, BLOCK)
    high = just_above(top)
    count_high = 0
    count = CAPACITY + 1
    ordered = tl.full([CAPACITY], float("-inf"), tl.float32)
    attempts = 0  # at most two; as a loop, because a sort in the code takes long to compile
    while (count > CAPACITY) & (attempts < 2):
        if attempts > 0:
            low, high, count_high, _mass_high = narrow(
                row, vocab_size, low, high, k, top, 1.0, CAPACITY, False, BLOCK
            )
        count, ordered = collect_sorted(
            row, vocab_size, low, high, scratch, counter, BLOCK, CAPACITY
        )
        attempts += 1
    i = tl.arange(0, CAPACITY)
    kth = tl.max(tl.where(i >= k - count_high - 1, ordered, float("-inf")), 0)
    threshold = tl.where(count <= CAPACITY, tl.maximum(kth, low), low)
    return threshold, (count_high == 0) & (count <= CAPACITY), ordered


@triton.jit
def _cut(ordered, weights, before, wanted, otherwise):
    """The first of the ordered logits with which the probability is enough."""
    enough = before + tl.cumsum(weights, 0) >= wanted
    best = tl.max(tl.where(enough, ordered, float("-inf")), 0)
    return tl.where(best == float("-inf"), otherwise, best)


@triton.jit
def _top_p_of_ordered(ordered, threshold, p, top, scale):
    """Border of the best with p of the probability from `threshold` on, which is all ordered."""
    weights = tl.where(ordered >= threshold, weights_of(ordered, top, scale), 0.0).to(tl.float64)
    wanted = tl.maximum(p.to(tl.float64) * tl.sum(weights, 0), 1e-300)
    return tl.maximum(_cut(ordered, weights, 0.0, wanted, threshold), threshold)


@triton.jit
def _masses(row, vocab_size, threshold, near, top, scale, BLOCK: tl.constexpr):
    """float64 (probability from the threshold on; that from `near` on)"""
    total = tl.zeros([BLOCK], tl.float64)
    close = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = load_block(row, start, vocab_size, BLOCK)
        weight = weights_of(x, top, scale).to(tl.float64)
        total += tl.where(x >= threshold, weight, 0.0)
        close += tl.where(x >= near, weight, 0.0)
    return tl.sum(total, 0), tl.sum(close, 0)


@triton.jit
def _top_p(
    row, vocab_size, threshold, p, top, scale, scratch, counter,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Border of the best with p of the probability from `threshold` on."""
    near = tl.maximum(top - 23.0 / scale, threshold)  # a token below weighs less than 2^-23
    total, close = _masses(row, vocab_size, threshold, near, top, scale, BLOCK)
    wanted = tl.maximum(p.to(tl.float64) * total, 1e-300)
    result = top
    if wanted > 1.0:  # else the most likely token is enough
        low = near
        if close < wanted:
            low = tl.maximum(least_of(row, vocab_size, BLOCK), threshold)
        low, high, _, before = narrow(
            row, vocab_size, low, just_above(top), wanted, top, scale, CAPACITY, True, BLOCK
        )
        count, ordered = collect_sorted(
            row, vocab_size, low, high, scratch, counter, BLOCK, CAPACITY
        )
        weights = weights_of(ordered, top, scale).to(tl.float64)
        cut = _cut(ordered, weights, before, wanted, low)
        result = tl.where(count <= CAPACITY, tl.maximum(cut, low), low)
    return result


@triton.jit
def _kept(row, start, vocab_size, threshold, least, top, scale, BLOCK: tl.constexpr):
    x = load_block(row, start, vocab_size, BLOCK)
    weight = weights_of(x, top, scale)
    return tl.where((x >= threshold) & (weight >= least), weight, 0.0).to(tl.float64)


@triton.jit
def _drawn(
    row, vocab_size, threshold, least, top, scale, number,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Where the cumulative probability of what is kept passes `number` of its total."""
    b = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        kept = _kept(row, start, vocab_size, threshold, least, top, scale, BLOCK)
        sums = tl.where(b == start // BLOCK, tl.sum(kept, 0), sums)
    cumulative = tl.cumsum(sums, 0)
    target = number * tl.sum(tl.where(b == BLOCKS - 1, cumulative, 0.0), 0)
    # Rounding may leave the target above all sums: then the last possible token is meant.
    last = tl.max(tl.where(sums > 0, b, 0), 0)
    block = tl.minimum(tl.min(tl.where(cumulative > target, b, BLOCKS), 0), last)
    before = tl.sum(tl.where(b == block, cumulative - sums, 0.0), 0)
    kept = _kept(row, block * BLOCK, vocab_size, threshold, least, top, scale, BLOCK)
    i = tl.arange(0, BLOCK)
    passed = (before + tl.cumsum(kept, 0) > target) & (kept > 0)
    found = tl.min(tl.where(passed, i, BLOCK), 0)
    return block * BLOCK + tl.minimum(found, tl.max(tl.where(kept > 0, i, 0), 0))


@triton.jit
def _choose(
    logits, row_stride, rows, positions, ints, ints_stride, floats, floats_stride,
    sampled, last_token, scratch, counters, vocab_size,
    SEED: tl.constexpr, CHOICE: tl.constexpr, TOP_K: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    owner = tl.load(rows + index)
    numbers, reals = ints + owner * ints_stride, floats + owner * floats_stride
    temperature = tl.load(reals + TEMPERATURE)
    top, token, groups = best_of(row, vocab_size, BLOCK)
    if temperature > 0:
        counter, place = counters + index, scratch + index * CAPACITY
        tl.store(counter, 0)
        tl.debug_barrier()
        scale = tl.minimum(1.4426950408889634 / temperature, 1e30)
        k, p = tl.load(numbers + TOP_K), tl.load(reals + TOP_P)
        threshold = tl.full([], float("-inf"), tl.float32)
        open_p = (p < 1).to(tl.int32)
        if (k > 0) & (k < vocab_size):
            threshold, whole, ordered = _top_k(
                row, vocab_size, k, top, groups, place, counter, BLOCK, CAPACITY
            )
            if whole & (open_p > 0):
                threshold = _top_p_of_ordered(ordered, threshold, p, top, scale)
                open_p = 0
        if open_p > 0:
            threshold = _top_p(
                row, vocab_size, threshold, p, top, scale, place, counter, BLOCK, CAPACITY
            )
        number = _uniform(
            tl.load(numbers + SEED), tl.load(numbers + CHOICE), tl.load(positions + index)
        )
        least = tl.load(reals + MIN_P)
        token = _drawn(row, vocab_size, threshold, least, top, scale, number, BLOCK, BLOCKS)
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
    scratch = logits.new_empty(count, CAPACITY)
    counters = logits.new_empty(count, dtype=torch.int32)
    _choose[(count,)](
        logits, logits.stride(0), rows, positions, ints, ints.stride(0), floats, floats.stride(0),
        sampled, last_token, scratch, counters, vocab_size,
        SEED=SEED, CHOICE=CHOICE, TOP_K=TOP_K, TEMPERATURE=TEMPERATURE, TOP_P=TOP_P, MIN_P=MIN_P,
        BLOCK=BLOCK, BLOCKS=max(64, triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))),
        CAPACITY=CAPACITY, num_warps=WARPS,
    )  # fmt: skip
    return sampled
