"""Log probabilities on a GPU: those of given tokens and of the most likely ones, one program
per row. The reference is `replica.sampling.logprobs`.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.sampling.gpu.choose import BLOCK, WARPS
from replica.sampling.gpu.thresholds import (
    STAGES,
    best_of,
    just_above,
    kth_of,
    least_of,
    load_block,
    narrow,
)

GROUPS = 128
"""Number of groups of tokens; the best token of each gives a lower bound for the K best."""


@triton.jit
def _collect(
    row,
    vocab_size,
    threshold,
    above,
    equal,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ids of the tokens above the threshold, and of the first K on it. Returns how many are above;
    if there are more than WIDTH, some were left out."""
    i = tl.arange(0, BLOCK)
    num_above = 0
    num_equal = 0
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = load_block(row, start, vocab_size, BLOCK)
        is_above = (x > threshold).to(tl.int32)
        here = tl.sum(is_above, 0)
        if here > 0:
            place = num_above + tl.cumsum(is_above, 0) - 1
            tl.store(above + place, start + i, (is_above > 0) & (place < WIDTH))
            num_above += here
        is_equal = ((x == threshold) & (start + i < vocab_size)).to(tl.int32)
        here = tl.sum(is_equal, 0)
        if (num_equal < K) & (here > 0):
            place = num_equal + tl.cumsum(is_equal, 0) - 1
            tl.store(equal + place, start + i, (is_equal > 0) & (place < K))
            num_equal += here
    tl.debug_barrier()
    return num_above, tl.minimum(num_equal, K)


@triton.jit
def _logprobs(
    logits, row_stride, tokens, chosen, top_ids, top, scratch, vocab_size,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    best, _best_id, groups = best_of(row, vocab_size, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        total += tl.exp(load_block(row, start, vocab_size, BLOCK) - best)
    total = best + tl.log(tl.sum(total, 0))
    tl.store(chosen + index, tl.load(row + tl.load(tokens + index)) - total)

    low = kth_of(tl.max(tl.reshape(groups, [GROUPS, BLOCK // GROUPS]), 1), K, GROUPS)
    above = scratch + index * 2 * WIDTH
    equal = above + WIDTH
    num_above, num_equal = _collect(row, vocab_size, low, above, equal, K, WIDTH, BLOCK)
    if num_above > WIDTH:
        least = tl.maximum(low, least_of(row, vocab_size, BLOCK))
        low, _, _, _ = narrow(
            row, vocab_size, least, just_above(best), K, best, 1.0, WIDTH - K, False, BLOCK
        )
        num_above, num_equal = _collect(row, vocab_size, low, above, equal, K, WIDTH, BLOCK)
    j = tl.arange(0, 2 * WIDTH)
    is_candidate = (j < num_above) | ((j >= WIDTH) & (j < WIDTH + num_equal))
    ids = tl.load(above + j, is_candidate, 0)
    # By logit, then by id: the sort of integers that hold both, and order as they do.
    x = tl.load(row + ids, is_candidate, 0.0) + 0.0  # no negative zero
    bits = x.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = tl.where(is_candidate, (key << 32) | (0x7FFFFFFF - ids).to(tl.int64), -(2**63))
    packed = tl.sort(packed, descending=True)
    # Of a row that is no number anywhere there are none: its answer is worth nothing, but it must
    # not read what is not its own.
    ids = tl.where(packed == -(2**63), 0, 0x7FFFFFFF - (packed & 0x7FFFFFFF)).to(tl.int32)
    tl.store(top_ids + index * K + j, ids, j < K)
    tl.store(top + index * K + j, tl.load(row + ids, j < K, 0.0) - total, j < K)


def write_logprobs(
    logits: Tensor, tokens: Tensor, chosen: Tensor, top_ids: Tensor, top: Tensor
) -> None:
    """Write chosen, float32 [S]; top_ids, int32 [S, K], the most likely first; top, float32 [S, K].

    logits: float32 [S, V]. tokens: int64 [S].
    """
    if logits.data_ptr() % 16:  # behind other rows of an odd vocabulary: a variant of its own
        logits = logits.clone()
    (count, vocab_size), k = logits.shape, top.shape[1]
    width = 2 * triton.next_power_of_2(k)
    scratch = torch.empty((count, 2, width), dtype=torch.int32, device=logits.device)
    _logprobs[(count,)](
        logits, logits.stride(0), tokens, chosen, top_ids, top, scratch, vocab_size,
        K=k, WIDTH=width, BLOCK=BLOCK, GROUPS=GROUPS, num_warps=WARPS,
    )  # fmt: skip
