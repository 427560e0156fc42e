"""The paged KV pool of one device. It knows neither sequences nor who owns a block."""

from __future__ import annotations

import torch

from replica.model.spec import ModelSpec


class KVCache:
    """Keys and values of every layer, by token slot: `block * block_size + offset`. A layer with a
    sliding window keeps all of them, too: blocks are the same for all layers.

    `layers` is [num_layers, slots, 2, num_kv_heads, head_dim]. A CPU likes it this way: the keys
    and values of a token, for all heads, are one stretch of memory, so that a step writes a token
    with one copy and gathers it with one read, at any offset in a block.

    The block with index `num_blocks` is the guard block, which no sequence owns. Nothing is
    initialised: a slot means something once its token was written, and may hold NaN before.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = torch.empty(self._shape(spec), dtype=dtype, device=device)

    def _shape(self, spec: ModelSpec) -> tuple[int, ...]:
        slots = (self.num_blocks + 1) * self.block_size
        return spec.num_layers, slots, 2, spec.num_kv_heads, spec.head_dim


class BlockedKVCache(KVCache):
    """Keys and values of every layer, by block and head, as GPUs like it: the keys of one head in
    one block are one stretch of memory, which a thread block streams through.

    `layers` is [num_layers, 2, num_blocks + 1, num_kv_heads, block_size, head_dim], keys before
    values. The last block is the guard block. Nothing is initialised, as in `KVCache`.
    """

    def _shape(self, spec: ModelSpec) -> tuple[int, ...]:
        block = (spec.num_kv_heads, self.block_size, spec.head_dim)
        return spec.num_layers, 2, self.num_blocks + 1, *block


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, in either layout."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_size * dtype.itemsize
