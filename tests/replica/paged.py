"""Drives a decoder over a paged KV pool by hand, without scheduler or pipeline.

Blocks are dealt out in random order, and every slot that no token was written to holds NaN: the
guard block, free blocks, and the tails of blocks in use.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from replica.model.attention.backends import paged_attention
from replica.model.attention.metadata import AttentionMetadata
from replica.model.cpu.native import NativeOps
from replica.model.decoder import Decoder
from replica.model.spec import LayerSpec, ModelSpec


def attention_spec(heads: int, kv_heads: int, dim: int, layers: int, **attention: Any) -> ModelSpec:
    """The shape of a model of which only the attention is looked at. attention: of `LayerSpec`."""
    return ModelSpec(
        model_type="llama",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_position=4096,
        norm_eps=1e-5,
        layers=(LayerSpec(frequencies=(1.0,) * (dim // 2), scale=dim**-0.5, **attention),) * layers,
    )


class PagedModel:
    """Sequences by name; `run` takes each a few tokens further, in one step."""

    def __init__(
        self, decoder: Decoder, *, block_size: int = 4, num_blocks: int = 256, seed: int = 0
    ) -> None:
        self._decoder = decoder
        embedding = decoder.embedding
        library = decoder.ops.library if isinstance(decoder.ops, NativeOps) else None
        cache, self._attention = paged_attention(
            decoder.spec, num_blocks, block_size, embedding.dtype, embedding.device, library
        )
        cache.layers.fill_(torch.nan)
        self._guard = num_blocks
        self._size = block_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def run(self, work: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """One step over these tokens. Returns float32 [n, vocab] logits of each name's tokens."""
        starts = [self._lengths.get(name, 0) for name in work]
        counts = [len(tokens) for tokens in work.values()]
        for (name, tokens), start in zip(work.items(), starts, strict=True):
            self._extend(name, start + len(tokens))
        attend = self._attention.bind(
            AttentionMetadata(
                query_lens=counts,
                context_lens=[self._lengths[name] for name in work],
                block_tables=self._tables(list(work)),
                slot_mapping=torch.tensor(
                    [
                        self._blocks[name][position // self._size] * self._size
                        + position % self._size
                        for name, start in zip(work, starts, strict=True)
                        for position in range(start, self._lengths[name])
                    ]
                ),
            )
        )
        logits = torch.empty(sum(counts), self._decoder.spec.vocab_size)
        self._decoder(
            torch.tensor([token for tokens in work.values() for token in tokens]),
            torch.cat(
                [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
            ),
            attend,
            torch.arange(sum(counts)),
            logits,
        )
        return dict(zip(work, logits.split(counts), strict=True))

    def _extend(self, name: str, length: int) -> None:
        blocks = self._blocks.setdefault(name, [])
        while len(blocks) * self._size < length:
            blocks.append(self._free.pop())
        self._lengths[name] = length

    def _tables(self, names: list[str]) -> Tensor:
        width = max(len(self._blocks[name]) for name in names) + 1
        rows = [self._blocks[name] for name in names]
        return torch.tensor(
            [row + [self._guard] * (width - len(row)) for row in rows], dtype=torch.int32
        )
