"""The model seam: what a pipeline needs of a model, and nothing else.

Tests put scripted logits behind it; everything around it is real.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from replica.model.attention.backends import paged_attention
from replica.model.attention.metadata import AttentionMetadata
from replica.model.cpu.native import NativeOps
from replica.model.decoder import Decoder
from replica.scheduling.batch import Batch


class ModelRunner(Protocol):
    vocab_size: int

    def forward(
        self, batch: Batch, input_ids: Tensor, inputs: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        """Write float32 [S + P, V]: logits of the sampling rows, then of the tokens to be scored.

        input_ids: int64 [T]. inputs: the device views of `replica.io_slot.input_layout`, of
        which the first T, S + P, S or B entries are valid. Runs on the compute stream.
        """


class DecoderRunner:
    """A decoder over a paged KV pool."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        spec = decoder.spec
        self.vocab_size = spec.vocab_size
        self._decoder = decoder
        self._chunk_ops = decoder.ops.for_chunks()
        weight = decoder.embedding
        library = decoder.ops.library if isinstance(decoder.ops, NativeOps) else None
        self.cache, self._attention = paged_attention(
            spec, num_blocks, block_size, weight.dtype, weight.device, library
        )

    def forward(
        self, batch: Batch, input_ids: Tensor, inputs: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        count = batch.num_tokens
        contexts = batch.ends
        attend = self._attention.bind(
            AttentionMetadata(
                query_lens=batch.lengths.tolist(),
                context_lens=contexts.tolist(),
                query_starts=inputs["query_starts"][: len(contexts) + 1],
                device_context_lens=inputs["context_lens"][: len(contexts)],
                block_tables=inputs["block_tables"][: len(contexts)],
                slot_mapping=inputs["slot_mapping"][:count],
            )
        )
        wanted = inputs["sample_index"][: batch.num_logits]
        ops = None if batch.decodes_only else self._chunk_ops
        self._decoder(input_ids, inputs["positions"][:count], attend, wanted, logits, ops)
