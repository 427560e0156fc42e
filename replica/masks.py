"""Which tokens a constrained row may sample next, as packed bits.

A mask depends on every token sampled so far, so it is built after the previous step was
settled, while the forward pass of its own step runs (`Pipeline.finish`).
"""

from __future__ import annotations

import numpy as np

from replica.batch import Batch
from replica.rows import Rows
from replica.sequence import Bits, TokenIds

ALL_ALLOWED = 0xFF


class AllowedTokens:
    """A fixed set of tokens."""

    def __init__(self, allowed: tuple[int, ...], vocab_size: int) -> None:
        flags = np.zeros(vocab_size, bool)
        flags[list(allowed)] = True
        self._bits = np.packbits(flags, bitorder="little")

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        bits[:] = self._bits


class MaskBuilder:
    """Builds the masks of a step from the rows' settled tokens."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def fill(self, batch: Batch, bits: Bits) -> None:
        """uint8 [S, V/8]: one mask per sampling row; free rows may sample anything, and so may
        rows whose sequence ended meanwhile, since their token is surplus."""
        rows = self._rows
        for index, row in enumerate(batch.rows[batch.samples].tolist()):
            sequence = rows.sequence(row)
            constraint = sequence.constraint
            if constraint is None or rows.ended[row]:
                bits[index] = ALL_ALLOWED
            else:
                constraint.fill(
                    rows.tokens[row, sequence.num_prompt : rows.known[row]], bits[index]
                )
