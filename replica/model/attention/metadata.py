"""What a step tells an attention back end, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

from torch import Tensor

from replica.model.rotary import QKNorm, Rotation

Attend: TypeAlias = Callable[[int, Tensor, Rotation, QKNorm | None], Tensor]
"""(layer, the merged projection's product, angles, norm of queries and keys) -> the heads'
outputs, [T, num_heads * head_dim]. Rotates, writes keys and values to the pool, then attends.
The product, of (num_heads + 2 num_kv_heads) * head_dim columns, is the attention's to change."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The rows of one step. Their T tokens lie one row after the other."""

    query_lens: Sequence[int]
    """[R] tokens of each row in this step, at least 1: one while decoding, more in a chunk."""
    context_lens: Sequence[int]
    """[R] tokens of each row in the pool after this step."""
    block_tables: Tensor
    """int32 [R, W], W * block_size >= max(context_lens). What lies beyond a row's context is
    never looked at."""
    slot_mapping: Tensor
    """int64 [T] slot of the pool where each token's keys and values go."""
    query_starts: Tensor | None = None
    """int32 [R + 1] on the device: the first of the step's tokens of each row, then T. A GPU
    needs it, and the next; a CPU reads the lists."""
    device_context_lens: Tensor | None = None
    """int32 [R] `context_lens`, on the device."""

    def first_tokens(self, rows: Sequence[int]) -> list[int]:
        """Of the step's tokens, the first of each of these rows."""
        firsts = list(accumulate(self.query_lens, initial=0))
        return [firsts[row] for row in rows]


class AttentionBackEnd(Protocol):
    """Binds the steps of an engine to its KV pool."""

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """Prepare a step: the result serves each of its layers."""
