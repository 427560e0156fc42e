"""Log probabilities on a GPU: of given tokens, and the most likely ones with theirs, one program
per row. The reference is `replica.logprobs`.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.kernels.borders import STAGES, key_of, largest_border
from replica.kernels.choose import BLOCK, GROUPS, WARPS, best_of, floor_of_top


@triton.jit
def _collect(row, vocab_size, border, above, equal, K: tl.constexpr, BLOCK: tl.constexpr):
    """Ids of the tokens above the border, and as many of those on it as may be needed. Returns
    how many are above, which are fewer than K or all there are."""
    i = tl.arange(0, BLOCK)
    num_above = 0
    num_equal = 0
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        key = key_of(tl.load(row + start + i, start + i < vocab_size, float("-inf")))
        is_above = (key > border).to(tl.int32)
        if tl.sum(is_above, 0) > 0:
            tl.store(above + num_above + tl.cumsum(is_above, 0) - 1, start + i, is_above > 0)
            num_above += tl.sum(is_above, 0)
        is_equal = ((key == border) & (start + i < vocab_size)).to(tl.int32)
        if (num_equal < K) & (tl.sum(is_equal, 0) > 0):
            place = num_equal + tl.cumsum(is_equal, 0) - 1
            tl.store(equal + place, start + i, (is_equal > 0) & (place < K))
            num_equal += tl.sum(is_equal, 0)
    tl.debug_barrier()
    return num_above


@triton.jit
def _tell(
    logits, row_stride, tokens, chosen, top_ids, top, scratch, vocab_size,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    best, _, groups = best_of(row, vocab_size, BLOCK, GROUPS)
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + i, start + i < vocab_size, float("-inf"))
        total += tl.exp(x - best)
    total = best + tl.log(tl.sum(total, 0))
    tl.store(chosen + index, tl.load(row + tl.load(tokens + index)) - total)

    low = floor_of_top(groups, K, GROUPS)
    high = key_of(best).to(tl.int64) + 1
    border = largest_border(row, vocab_size, low, high, K, best, 1.0, False, BLOCK).to(tl.int32)
    above = scratch + index * 2 * WIDTH
    num_above = _collect(row, vocab_size, border, above, above + WIDTH, K, BLOCK)
    j = tl.arange(0, WIDTH)
    place = tl.where(j < num_above, j, WIDTH + j - num_above)
    ids = tl.load(above + place, j < K, 0)
    # By logit, then by id: the sort of integers that hold both.
    key = key_of(tl.load(row + ids, j < K, float("-inf"))).to(tl.int64)
    packed = tl.where(j < K, (key << 32) | (0x7FFFFFFF - ids).to(tl.int64), -(2**63))
    ordered = tl.sort(packed, descending=True)
    ids = 0x7FFFFFFF - (ordered & 0x7FFFFFFF).to(tl.int32)
    tl.store(top_ids + index * K + j, ids, j < K)
    tl.store(top + index * K + j, tl.load(row + ids, j < K, 0.0) - total, j < K)


def tell(logits: Tensor, tokens: Tensor, chosen: Tensor, top_ids: Tensor, top: Tensor) -> None:
    """Write chosen, float32 [S]; top_ids, int32 [S, K], the most likely first; top, float32 [S, K].

    logits: float32 [S, V]. tokens: int64 [S].
    """
    (count, vocab_size), k = logits.shape, top.shape[1]
    width = triton.next_power_of_2(k)
    scratch = torch.empty((count, 2, width), dtype=torch.int32, device=logits.device)
    _tell[(count,)](
        logits, logits.stride(0), tokens, chosen, top_ids, top, scratch, vocab_size,
        K=k, WIDTH=width, BLOCK=BLOCK, GROUPS=GROUPS, num_warps=WARPS,
    )  # fmt: skip
