"""Paged attention on a CPU: gather the rows' slots, then PyTorch's fused attention.

What depends on the step alone (slots, masks, which rows go together) is computed once in `bind`
and used by every layer. Only slots that hold a token of the row itself are ever read: where a
row sees less than its group, the gather repeats the first token that it sees, and the mask hides
it. So neither the guard block nor a stale slot can reach a result, whatever it holds: a mask alone
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
from replica.model.spec import LayerSpec, ModelSpec

MAX_PADDING = 256
"""Most padded tokens per group of decode rows: computing these takes about as long as one more
group."""


class Span(Protocol):
    """Tokens of a step that are attended to together, in layers of one window."""

    @property
    def tokens(self) -> slice | Tensor:
        """Which of the step's tokens these are."""

    def attend(self, q: Tensor, pool: Tensor, layer: LayerSpec) -> Tensor:
        """q: [T, num_heads, head_dim], of all tokens. Returns [N, num_heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """N rows with one query each, padded to the most keys that one of them sees, L."""

    tokens: slice | Tensor
    """Indices into the step's tokens."""
    slots: Tensor
    """int64 [N * L]"""
    mask: Tensor | None
    """[N, 1, 1, L] to be added to the scores; None if all see equally many."""
    count: int

    def attend(self, q: Tensor, pool: Tensor, layer: LayerSpec) -> Tensor:
        context = pool.index_select(0, self.slots).view(self.count, -1, *pool.shape[1:])
        keys, values = context.permute(2, 0, 3, 1, 4)
        # The query heads that share a KV head become queries of that head: nothing is repeated.
        queries = _by_kv_head(q[self.tokens], pool)
        return _attention(queries, keys, values, self.mask, layer).flatten(1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """N consecutive tokens of one row, at the end of the L keys that they see."""

    tokens: slice
    slots: Tensor
    """int64 [L]"""
    mask: Tensor | None
    """[N, L] to be added to the scores; None if L is N and only what comes later is hidden."""

    def attend(self, q: Tensor, pool: Tensor, layer: LayerSpec) -> Tensor:
        keys, values = pool.index_select(0, self.slots).permute(1, 2, 0, 3).unsqueeze(2)
        queries = _by_kv_head(q[self.tokens], pool).permute(1, 2, 0, 3)
        sharing = (-1, queries.shape[1], -1, -1)
        keys, values = keys.expand(sharing), values.expand(sharing)
        heads = _attention(queries, keys, values, self.mask, layer, causal=self.mask is None)
        return heads.permute(2, 0, 1, 3).flatten(1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: LayerSpec, *, causal: bool = False
) -> Tensor:
    """[..., N, head_dim] over [..., L, head_dim]. causal: a query sees no key of a higher index."""
    if layer.soft_cap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale
        )
    scores = q.float() @ k.float().transpose(-2, -1) * (layer.scale / layer.soft_cap)
    scores = scores.tanh_().mul_(layer.soft_cap)
    if causal:
        scores += scores.new_full(scores.shape[-2:], -torch.inf).triu_(1)
    elif mask is not None:
        scores += mask
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


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

    def __init__(self, cache: KVCache, spec: ModelSpec) -> None:
        self._layers = spec.layers
        self._windows = {layer.window for layer in spec.layers}
        self._num_heads = spec.num_heads
        self._kv_heads, self._head_dim = cache.layers.shape[3:]
        self._pools = cache.layers.unbind(0)
        self._block_size = cache.block_size
        self._dtype = cache.layers.dtype

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """Prepare a step: the result serves each of its layers."""
        pools, slot_mapping = self._pools, metadata.slot_mapping
        spans_of = {window: self._spans(metadata, window) for window in self._windows}

        def attend(index: int, product: Tensor, rotation: Rotation, norm: QKNorm | None) -> Tensor:
            pool, layer = pools[index], self._layers[index]
            spans = spans_of[layer.window]
            heads = product.view(len(product), -1, self._head_dim)
            self._store(heads, rotation, norm, pool, slot_mapping)
            q = heads[:, : self._num_heads]
            if len(spans) == 1:
                return spans[0].attend(q, pool, layer)
            out = q.new_empty(len(q), q.shape[1] * q.shape[2])
            for span in spans:
                out[span.tokens] = span.attend(q, pool, layer)
            return out

        return attend

    def _spans(self, metadata: AttentionMetadata, window: int | None) -> list[Span]:
        """All tokens of a step, for the layers with that window."""
        decoding = [row for row, count in enumerate(metadata.query_lens) if count == 1]
        spans = list(self._chunks(metadata, window))
        if decoding:
            spans.extend(self._decode_rows(metadata, decoding, window))
        return spans

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

    def _decode_rows(
        self, metadata: AttentionMetadata, decoding: list[int], window: int | None
    ) -> Iterator[Span]:
        """The rows with one query."""
        contexts = metadata.context_lens
        lengths = [min(length, window or length) for length in contexts]
        for rows in similar_lengths(decoding, lengths):
            seen = torch.tensor([lengths[row] for row in rows]).unsqueeze(1)
            firsts = torch.tensor([contexts[row] for row in rows]).unsqueeze(1) - seen
            keys = torch.arange(int(seen.max())).expand(len(rows), -1)
            beyond = keys >= seen
            tables = metadata.block_tables[selection(rows)]
            yield _DecodeRows(
                tokens=selection(metadata.first_tokens(rows)),
                slots=self._slots(tables, firsts + keys.masked_fill(beyond, 0)),
                mask=self._mask(beyond[:, None, None]) if bool(beyond.any()) else None,
                count=len(rows),
            )

    def _chunks(self, metadata: AttentionMetadata, window: int | None) -> Iterator[Span]:
        first = 0
        for row, count in enumerate(metadata.query_lens):
            tokens = slice(first, first := first + count)
            if count > 1:
                yield self._chunk(metadata, row, tokens, window)

    def _chunk(
        self, metadata: AttentionMetadata, row: int, tokens: slice, window: int | None
    ) -> Span:
        count, length = metadata.query_lens[row], metadata.context_lens[row]
        window = window or length
        keys = torch.arange(max(0, length - count + 1 - window), length)
        queries = keys[-count:, None]
        hidden = (keys > queries) | (keys <= queries - window)
        return _Chunk(
            tokens=tokens,
            slots=self._slots(metadata.block_tables[row, None], keys[None]),
            mask=self._mask(hidden) if count < length or window < length else None,
        )

    def _slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of the positions [N, L] of rows with the block tables [N, W], flattened."""
        size = self._block_size
        blocks = tables.long().gather(1, positions // size)
        return blocks.mul_(size).add_(positions % size).flatten()

    def _mask(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
