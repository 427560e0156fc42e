"""The random part of sampling on a GPU: filter and draw, one program per row, no sort.

The same arithmetic as `replica.sampler` on a CPU: borders found by bisection over bit patterns,
two bits at a time here, then inverse transform sampling in float64.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _border_of_top_k(row, vocab_size, k, BLOCK: tl.constexpr):
    """The largest bit pattern that at least k probabilities reach."""
    i = tl.arange(0, BLOCK)
    border = 0
    unit = 1 << 28
    for _ in range(15):  # probabilities are at most 1.0 = 0x3F800000: 30 bits
        one = tl.zeros([BLOCK], tl.int32)
        two = tl.zeros([BLOCK], tl.int32)
        three = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            x = tl.load(row + start + i, start + i < vocab_size, 0.0)
            bits = x.to(tl.int32, bitcast=True)
            one += (bits >= border + unit).to(tl.int32)
            two += (bits >= border + 2 * unit).to(tl.int32)
            three += (bits >= border + 3 * unit).to(tl.int32)
        steps = (tl.sum(one) >= k).to(tl.int32)
        steps += (tl.sum(two) >= k).to(tl.int32)
        steps += (tl.sum(three) >= k).to(tl.int32)
        border += steps * unit
        unit = unit >> 2
    return border


@triton.jit
def _mass(row, vocab_size, border, BLOCK: tl.constexpr):
    """float64 sum of the probabilities whose bit patterns reach the border."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(row + start + i, start + i < vocab_size, 0.0)
        total += tl.where(x.to(tl.int32, bitcast=True) >= border, x, 0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _border_of_top_p(row, vocab_size, mass, least, BLOCK: tl.constexpr):
    """The largest bit pattern above which, and above `least`, lies at least `mass`."""
    i = tl.arange(0, BLOCK)
    border = 0
    unit = 1 << 28
    for _ in range(15):
        one = tl.zeros([BLOCK], tl.float64)
        two = tl.zeros([BLOCK], tl.float64)
        three = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            x = tl.load(row + start + i, start + i < vocab_size, 0.0)
            bits = x.to(tl.int32, bitcast=True)
            kept = tl.where(bits >= least, x, 0.0).to(tl.float64)
            one += tl.where(bits >= border + unit, kept, 0.0)
            two += tl.where(bits >= border + 2 * unit, kept, 0.0)
            three += tl.where(bits >= border + 3 * unit, kept, 0.0)
        steps = (tl.sum(one) >= mass).to(tl.int32)
        steps += (tl.sum(two) >= mass).to(tl.int32)
        steps += (tl.sum(three) >= mass).to(tl.int32)
        border += steps * unit
        unit = unit >> 2
    return border


@triton.jit
def _draw(
    probabilities, row_stride, top_ks, k_stride, top_ps, p_stride, leasts, numbers, out, vocab_size,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = probabilities + index.to(tl.int64) * row_stride
    border = 0
    if FILTERED:
        k = tl.load(top_ks + index * k_stride)
        if (k > 0) & (k < vocab_size):
            border = _border_of_top_k(row, vocab_size, k, BLOCK)
        p = tl.load(top_ps + index * p_stride)
        if p < 1:
            mass = p.to(tl.float64) * _mass(row, vocab_size, border, BLOCK)
            mass = tl.maximum(mass, 1e-300)
            border = tl.maximum(border, _border_of_top_p(row, vocab_size, mass, border, BLOCK))
        border = tl.maximum(border, tl.load(leasts + index).to(tl.int32, bitcast=True))
    target = tl.load(numbers + index) * _mass(row, vocab_size, border, BLOCK)

    i = tl.arange(0, BLOCK)
    below = target * 0.0
    found = vocab_size
    last = 0
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(row + start + i, start + i < vocab_size, 0.0)
        kept = tl.where(x.to(tl.int32, bitcast=True) >= border, x, 0.0).to(tl.float64)
        inside = tl.sum(kept)
        if (found == vocab_size) & (below + inside > target):
            reached = (below + tl.cumsum(kept, 0) > target) & (kept > 0)
            found = tl.min(tl.where(reached, start + i, vocab_size))
        last = tl.maximum(last, tl.max(tl.where(kept > 0, start + i, 0)))
        below += inside
    # Rounding may leave the number above all sums: then the last possible token is meant.
    tl.store(out + index, tl.minimum(found, last).to(tl.int64))


def draw(
    probabilities: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    least: Tensor,
    numbers: Tensor,
    *,
    filtered: bool,
) -> Tensor:
    """int64 [S] tokens.

    probabilities: float32 [S, V]. top_k: int64 [S], 0 keeps all. top_p: float32 [S]. least:
    float32 [S], contiguous: what is less likely is not drawn. numbers: float64 [S] in [0, 1).
    Without `filtered`, top_k, top_p and least are not looked at.
    """
    count, vocab_size = probabilities.shape
    out = torch.empty(count, dtype=torch.int64, device=probabilities.device)
    _draw[(count,)](
        probabilities, probabilities.stride(0), top_k, top_k.stride(0), top_p, top_p.stride(0),
        least, numbers, out, vocab_size, FILTERED=filtered, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out
