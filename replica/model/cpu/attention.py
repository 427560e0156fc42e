"""Paged attention by the kernels of `attention.cpp`: decode rows read the pool where it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from replica.model.attention.cpu import PagedAttention, Span, selection
from replica.model.attention.metadata import AttentionMetadata
from replica.model.cpu.library import Kernel, kernel
from replica.model.kv_cache import KVCache
from replica.model.rotary import QKNorm, Rotation
from replica.model.spec import LayerSpec, ModelSpec

SMALL_CHUNK = 1 << 16
"""Most queries times keys for our kernel. Torch is faster for larger chunks, and rounds
differently."""


def supports(library: ctypes.CDLL, head_dim: int) -> bool:
    return bool(library.attends_over(head_dim))


@dataclass(frozen=True, slots=True)
class _Queries:
    """N queries, each over the end of a context of its own."""

    tokens: slice | Tensor
    tables: Tensor
    """int32 [N, W]"""
    contexts: Tensor
    """int64 [N]"""
    block_size: int
    kernel: Kernel

    def attend(self, q: Tensor, pool: Tensor, layer: LayerSpec) -> Tensor:
        q = q[self.tokens]
        rows, heads, dim = q.shape
        out = q.new_empty(rows, heads * dim)
        self.kernel(
            q.data_ptr(),
            q.stride(0),
            pool.data_ptr(),
            self.tables.data_ptr(),
            self.tables.stride(0),
            len(pool) // self.block_size,
            self.block_size,
            self.contexts.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            pool.shape[2],
            dim,
            layer.window or 0,
            layer.scale,
            layer.soft_cap or 0.0,
        )
        return out


class NativeAttention(PagedAttention):
    """Large prompt chunks are left to torch. The others take the way of decode rows, so that a
    token has the same bits however it got into the pool. Raises IndexError, as torch does, for a
    slot or block that the pool does not have."""

    def __init__(self, cache: KVCache, spec: ModelSpec, library: ctypes.CDLL) -> None:
        super().__init__(cache, spec)
        self._attend = kernel(library, "attend", cache.layers.dtype)
        self._rotate_and_store = kernel(library, "rotate_and_store", cache.layers.dtype)

    def _store(
        self,
        heads: Tensor,
        rotation: Rotation,
        norm: QKNorm | None,
        pool: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        self._rotate_and_store(
            heads.data_ptr(),
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            None if norm is None else norm.scale.data_ptr(),
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            pool.data_ptr(),
            slot_mapping.data_ptr(),
            len(pool),
            len(heads),
            self._num_heads,
            *pool.shape[2:],
        )

    def _decode_rows(
        self, metadata: AttentionMetadata, decoding: list[int], window: int | None
    ) -> Iterator[Span]:
        lengths = metadata.context_lens
        tokens = selection(metadata.first_tokens(decoding))
        tables = metadata.block_tables[selection(decoding)]
        contexts = torch.tensor([lengths[row] for row in decoding])
        yield _Queries(tokens, tables, contexts, self._block_size, self._attend)

    def _chunk(
        self, metadata: AttentionMetadata, row: int, tokens: slice, window: int | None
    ) -> Span:
        count, length = metadata.query_lens[row], metadata.context_lens[row]
        if count * min(length, window or length) > SMALL_CHUNK:
            return super()._chunk(metadata, row, tokens, window)
        tables = metadata.block_tables[row].expand(count, -1)
        contexts = torch.arange(length - count + 1, length + 1)
        return _Queries(tokens, tables, contexts, self._block_size, self._attend)
