"""Attention over the paged KV pool: one path for decode rows, prompt chunks and mixed steps.

A back end knows token slots and the lengths of rows, nothing of models or scheduling. There is
one for CPUs.
"""

from replica.attention.cpu import PagedAttention
from replica.attention.metadata import Attend, AttentionMetadata

__all__ = ["Attend", "AttentionMetadata", "PagedAttention"]
