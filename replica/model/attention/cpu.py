"""Paged attention on a CPU: gather the rows' slots, then PyTorch's fused attention.

What depends on the step alone (slots, masks, which rows go together) is computed once in `bind`
and used by every layer. Only slots that hold a token of the row itself are ever read: where a
row is shorter than its group, the gather repeats the row's first token, and the mask hides it.
So neither the guard block nor a stale slot can reach a result, whatever it holds: a mask alone
would not keep a NaN out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replica.model.attention.metadata import Attend, AttentionMetadata
from replica.model.kv_cache import KVCache
from replica.model.rotary import QKNorm, Rotation, rotate_

MAX_PADDING = 256
"""Padded tokens per group of decode rows. About what one more group costs, in time."""


class Span(Protocol):
    """Tokens of a step that are attended to together."""

    @property
    def tokens(self) -> slice | Tensor:
        """Which of the step's tokens these are."""

    def attend(self, q: Tensor, pool: Tensor) -> Tensor:
        """q: [T, num_heads, head_dim], of all tokens. Returns [N, num_heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """N rows with one query each, padded to the longest context, L."""

    tokens: slice | Tensor
    """Which of the step's tokens these are."""
    slots: Tensor
    """int64 [N * L]"""
    mask: Tensor | None
    """[N, 1, 1, L] to be added to the scores; None if all contexts are equally long."""
    count: int

    def attend(self, q: Tensor, pool: Tensor) -> Tensor:
        context = pool.index_select(0, self.slots).view(self.count, -1, *pool.shape[1:])
        keys, values = context.permute(2, 0, 3, 1, 4)
        # The query heads that share a KV head become queries of that head: nothing is repeated.
        queries = _by_kv_head(q[self.tokens], pool)
        heads = scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask)
        return heads.flatten(1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """N consecutive tokens of one row, at the end of a context of L."""

    tokens: slice
    slots: Tensor
    """int64 [L]"""
    mask: Tensor | None
    """[N, L] to be added to the scores; None if the chunk is the whole context."""

    def attend(self, q: Tensor, pool: Tensor) -> Tensor:
        keys, values = pool.index_select(0, self.slots).permute(1, 2, 0, 3).unsqueeze(2)
        queries = _by_kv_head(q[self.tokens], pool).permute(1, 2, 0, 3)
        sharing = (-1, queries.shape[1], -1, -1)
        heads = scaled_dot_product_attention(
            queries,
            keys.expand(sharing),
            values.expand(sharing),
            attn_mask=self.mask,
            is_causal=self.mask is None,
        )
        return heads.permute(2, 0, 1, 3).flatten(1)


def _by_kv_head(q: Tensor, pool: Tensor) -> Tensor:
    """[n, num_heads, head_dim] -> [n, num_kv_heads, heads that share one, head_dim]"""
    return q.view(len(q), pool.shape[2], -1, q.shape[2])


def similar_lengths(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split rows into groups of similar length: one long context must not pad all others."""
    group: list[int] = []
    padding = 0
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if group:
            padding += lengths[group[0]] - lengths[row]
        if padding > MAX_PADDING:
            yield sorted(group)
            group, padding = [], 0
        group.append(row)
    if group:
        yield sorted(group)


def selection(indices: Sequence[int]) -> slice | Tensor:
    """The indices as a slice where they are consecutive: that needs no copy."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices)


class PagedAttention:
    """Binds the steps of an engine to its KV pool."""

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        self._num_heads = num_heads
        self._kv_heads, self._head_dim = cache.layers.shape[3:]
        self._pools = cache.layers.unbind(0)
        self._block_size = cache.block_size
        self._dtype = cache.layers.dtype

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """Prepare a step: the result serves each of its layers."""
        pools, slot_mapping = self._pools, metadata.slot_mapping
        decoding = [row for row, count in enumerate(metadata.query_lens) if count == 1]
        spans = list(self._chunks(metadata))
        if decoding:
            spans.extend(self._decode_rows(metadata, decoding))

        def attend(layer: int, product: Tensor, rotation: Rotation, norm: QKNorm | None) -> Tensor:
            pool = pools[layer]
            heads = product.view(len(product), -1, self._head_dim)
            self._store(heads, rotation, norm, pool, slot_mapping)
            q = heads[:, : self._num_heads]
            if len(spans) == 1:
                return spans[0].attend(q, pool)
            out = q.new_empty(len(q), q.shape[1] * q.shape[2])
            for span in spans:
                out[span.tokens] = span.attend(q, pool)
            return out

        return attend

    def _store(
        self,
        heads: Tensor,
        rotation: Rotation,
        norm: QKNorm | None,
        pool: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """heads: [T, num_heads + 2 num_kv_heads, head_dim]. Rotate queries and keys, and write
        keys and values to the pool."""
        rotate_(heads[:, : -self._kv_heads], rotation, norm)
        kv = heads[:, self._num_heads :]
        pool.index_copy_(0, slot_mapping, kv.view(len(kv), *pool.shape[1:]))

    def _decode_rows(self, metadata: AttentionMetadata, decoding: list[int]) -> Iterator[Span]:
        """The rows with one query."""
        lengths = metadata.context_lens
        for rows in similar_lengths(decoding, lengths):
            contexts = torch.tensor([lengths[row] for row in rows]).unsqueeze(1)
            positions = torch.arange(int(contexts.max())).expand(len(rows), -1)
            beyond = positions >= contexts
            tables = metadata.block_tables[selection(rows)]
            yield _DecodeRows(
                tokens=selection(metadata.first_tokens(rows)),
                slots=self._slots(tables, positions.masked_fill(beyond, 0)),
                mask=self._mask(beyond[:, None, None]) if bool(beyond.any()) else None,
                count=len(rows),
            )

    def _chunks(self, metadata: AttentionMetadata) -> Iterator[Span]:
        first = 0
        for row, count in enumerate(metadata.query_lens):
            tokens = slice(first, first := first + count)
            if count > 1:
                yield self._chunk(metadata, row, tokens)

    def _chunk(self, metadata: AttentionMetadata, row: int, tokens: slice) -> Span:
        count, length = metadata.query_lens[row], metadata.context_lens[row]
        positions = torch.arange(length)
        beyond = positions > positions[-count:, None]
        return _Chunk(
            tokens=tokens,
            slots=self._slots(metadata.block_tables[row, None], positions[None]),
            mask=self._mask(beyond) if count < length else None,
        )

    def _slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of the positions [N, L] of rows with the block tables [N, W], flattened."""
        size = self._block_size
        blocks = tables.long().gather(1, positions // size)
        return blocks.mul_(size).add_(positions % size).flatten()

    def _mask(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
