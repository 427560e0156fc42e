"""Attention over the paged KV pool: one path for decode rows, prompt chunks and mixed steps.

A back end knows token slots, the lengths of rows and what each layer attends to (its window, scale
and soft cap), nothing of scheduling. There is one for CPUs and one, in Triton, for GPUs; each lays
the pool out as its device likes it.
"""

from __future__ import annotations

from ctypes import CDLL

import torch

from replica.model.attention.cpu import PagedAttention
from replica.model.attention.metadata import AttentionBackEnd
from replica.model.cpu.attention import NativeAttention, supports
from replica.model.kv_cache import BlockedKVCache, KVCache
from replica.model.spec import ModelSpec


def paged_attention(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    library: CDLL | None = None,
) -> tuple[KVCache | BlockedKVCache, AttentionBackEnd]:
    """A KV pool on `device`, and what attends over it there. library: kernels for a CPU."""
    if device.type == "cpu":
        cache = KVCache(spec, num_blocks, block_size, dtype, device)
        if library is not None and supports(library, spec.head_dim):
            return cache, NativeAttention(cache, spec, library)
        return cache, PagedAttention(cache, spec)
    # Triton is installed where there is a GPU only.
    from replica.model.attention.triton_paged import TritonAttention

    blocked = BlockedKVCache(spec, num_blocks, block_size, dtype, device)
    return blocked, TritonAttention(blocked, spec)
