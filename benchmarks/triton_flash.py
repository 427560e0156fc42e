"""What transformers' continuous batching calls of the flash-attn package, without the package.

Prompts go through torch's built-in kernel of the same algorithm. A decode step goes through a
paged kernel in Triton: each context is split over several programs, whose parts a second kernel
merges (flash decoding, Dao et al.). Knows tensors, and nothing of transformers.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64
"""Keys that a program reads at a time."""
MAX_SPLITS = 16
MIN_SPLIT = 512
"""Keys below which a split is not worth merging."""
PROGRAMS = 1056
"""Programs that fill an H200: eight on each of its 132 multiprocessors."""


@triton.jit
def _append(
    k, v, k_cache, v_cache, block_stride, slot_stride, head_stride, tables, table_stride, lengths,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head). Rows that pad a step have length -1."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(lengths + row)
    if position >= 0:
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
        d = tl.arange(0, HEAD_DIM)
        source = (row * tl.num_programs(1) + head) * HEAD_DIM + d
        target = block * block_stride + position % BLOCK_SIZE * slot_stride + head * head_stride + d
        tl.store(k_cache + target, tl.load(k + source))
        tl.store(v_cache + target, tl.load(v + source))


@triton.jit
def _attend(
    q, k_cache, v_cache, block_stride, slot_stride, head_stride, tables, table_stride, lengths,
    scale, split_keys, part_out, part_lse,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head, split): the query heads that share a KV head, over a part of its
    keys. Parts are [rows, heads, splits, dim], and the logarithm of their sums of weights."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = split * split_keys
    last = tl.minimum(tl.load(lengths + row) + 1, first + split_keys)
    i, d = tl.arange(0, QUERIES), tl.arange(0, HEAD_DIM)
    is_query = i < GROUP
    head = (row * tl.num_programs(1) + kv_head) * GROUP + i
    queries = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], is_query[:, None], 0.0)
    best = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    for start in range(first, last, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < last
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, inside, 0)
        slot = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride
        slot += kv_head * head_stride
        keys = tl.load(k_cache + slot[:, None] + d[None, :], inside[:, None], 0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(inside[None, :], scores, -1.0e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(inside[None, :], tl.exp(scores - new_best[:, None]), 0.0)
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v_cache + slot[:, None] + d[None, :], inside[:, None], 0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        best = new_best
    some = tl.where(total > 0, total, 1.0)
    part = head * tl.num_programs(2) + split
    target = part_out + part[:, None] * HEAD_DIM + d[None, :]
    tl.store(target, out / some[:, None], is_query[:, None])
    tl.store(part_lse + part, tl.where(total > 0, best + tl.log(some), -1.0e30), is_query)


@triton.jit
def _merge(part_out, part_lse, out, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Program (row and head). Without any key, zeros."""
    first = tl.program_id(0) * SPLITS
    d = tl.arange(0, HEAD_DIM)
    best = -1.0e30
    for split in range(SPLITS):
        best = tl.maximum(best, tl.load(part_lse + first + split))
    merged = tl.zeros([HEAD_DIM], tl.float32)
    total = 0.0
    for split in range(SPLITS):
        lse = tl.load(part_lse + first + split)
        weight = tl.where(lse > -1.0e29, tl.exp(lse - best), 0.0)
        merged += weight * tl.load(part_out + (first + split) * HEAD_DIM + d)
        total += weight
    merged = merged / tl.maximum(total, 1.0e-30)
    tl.store(out + tl.program_id(0) * HEAD_DIM + d, merged.to(out.dtype.element_ty))


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *,
    cache_seqlens: Tensor, block_table: Tensor, softmax_scale: float, causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """One token per row: [rows, 1, heads, dim], after k and v [rows, 1, kv_heads, dim] were
    appended to the caches [blocks, block_size, kv_heads, dim]. `cache_seqlens` [rows] counts the
    keys before them; it and `block_table` [rows, blocks per row] are -1 where a step is padded.

    Launches depend on shapes alone, so a captured step holds for any context."""
    assert causal
    assert window_size == (-1, -1)
    rows, _, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    cache = (k_cache, v_cache, *k_cache.stride()[:3], block_table, block_table.stride(0))
    _append[(rows, kv_heads)](
        k.contiguous(), v.contiguous(), *cache, cache_seqlens,
        BLOCK_SIZE=block_size, HEAD_DIM=dim, num_warps=1,
    )  # fmt: skip
    longest = block_table.shape[1] * block_size
    splits = min(
        MAX_SPLITS, triton.cdiv(longest, MIN_SPLIT), triton.cdiv(PROGRAMS, rows * kv_heads)
    )
    part_out = q.new_empty(rows, heads, splits, dim, dtype=torch.float32)
    part_lse = q.new_empty(rows, heads, splits, dtype=torch.float32)
    _attend[(rows, kv_heads, splits)](
        q.contiguous(), *cache, cache_seqlens, softmax_scale,
        triton.cdiv(longest, splits * KEYS) * KEYS, part_out, part_lse,
        GROUP=heads // kv_heads, QUERIES=max(16, heads // kv_heads), KEYS=KEYS,
        BLOCK_SIZE=block_size, HEAD_DIM=dim, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = q.new_empty(rows, 1, heads, dim)
    _merge[(rows * heads,)](part_out, part_lse, out, SPLITS=splits, HEAD_DIM=dim, num_warps=1)
    return out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float, causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Packed rows [T, heads, dim] over their keys [S, kv_heads, dim]: a row's last query sees all
    of the row's keys."""
    assert window_size == (-1, -1)
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
        scale=softmax_scale,
    )[0]  # fmt: skip
    return result
