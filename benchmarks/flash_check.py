"""The stand-ins for flash-attn against float32 attention written out: they must agree."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.triton_flash import flash_attn_varlen_func, flash_attn_with_kvcache
from replica.model.spec import ModelSpec

BLOCK_SIZE = 256
PROMPTS = [(1, 300), (5, 5), (7, 77), (0, 0)]
"""Queries and keys of each row."""
CONTEXTS = [300, 1, 256, 77, 1025]
"""Keys of each decode row, its own included."""


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One row, [T, heads, dim] over [S, kv_heads, dim], in float32; the last query sees all."""
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = mask.tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)


def check_prompts(spec: ModelSpec, like: Tensor) -> None:
    """On random tensors of the type and device of `like`. Raises AssertionError."""
    lengths = [torch.tensor(column, device=like.device) for column in zip(*PROMPTS, strict=True)]
    q_starts, k_starts = (F.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in lengths)
    q_len, k_len = map(sum, zip(*PROMPTS, strict=True))
    q = like.new_empty(q_len, spec.num_heads, spec.head_dim).normal_()
    k, v = (like.new_empty(k_len, spec.num_kv_heads, spec.head_dim).normal_() for _ in "kv")
    # The limits are rounded up in a captured step.
    found = flash_attn_varlen_func(
        q, k, v, q_starts, k_starts, 64, 1024, softmax_scale=spec.head_dim**-0.5, causal=True
    )
    q_end, k_end = 0, 0
    for queries, keys in PROMPTS:
        q_row, k_row = slice(q_end, q_end + queries), slice(k_end, k_end + keys)
        q_end, k_end = q_row.stop, k_row.stop
        _agree(found[q_row], reference(q[q_row], k[k_row], v[k_row]))


def check_decode(spec: ModelSpec, like: Tensor) -> None:
    """As above; the last row pads the step. Raises AssertionError."""
    needed = [-(-context // BLOCK_SIZE) for context in CONTEXTS]
    order = torch.randperm(sum(needed), device=like.device)
    tables = torch.full(
        (len(CONTEXTS) + 1, max(needed) + 1), -1, dtype=torch.int32, device=like.device
    )
    for row, end in enumerate(accumulate(needed)):
        tables[row, : needed[row]] = order[end - needed[row] : end]
    cache = (len(order), BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    k_cache, v_cache = (like.new_empty(cache).normal_() for _ in "kv")
    q = like.new_empty(len(tables), 1, spec.num_heads, spec.head_dim).normal_()
    k, v = (like.new_empty(len(tables), 1, *cache[2:]).normal_() for _ in "kv")
    lengths = torch.tensor([*CONTEXTS, 0], dtype=torch.int32, device=like.device) - 1
    rows = [tables[row, :count].long() for row, count in enumerate(needed)]
    before = [[pool[blocks].flatten(0, 1) for pool in (k_cache, v_cache)] for blocks in rows]
    found = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=tables,
        softmax_scale=spec.head_dim**-0.5, causal=True,
    )  # fmt: skip
    for row, context in enumerate(CONTEXTS):
        keys, values = (
            torch.cat([old[: context - 1], new[row]])
            for old, new in zip(before[row], (k, v), strict=True)
        )
        _agree(found[row], reference(q[row], keys, values))
        for pool, new in ((k_cache, k), (v_cache, v)):
            stored = pool[rows[row]].flatten(0, 1)[context - 1]
            torch.testing.assert_close(stored, new[row, 0], rtol=0, atol=0)


def _agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
