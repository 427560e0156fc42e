"""Which tokens a constrained row may sample next, as packed bits.

A mask depends on every token sampled so far, so it is built after the previous step was
settled, while the forward pass of its own step runs (`Pipeline.finish`).
"""

from __future__ import annotations

from functools import reduce
from typing import Protocol

import numpy as np

from replica.messages import TOO_COMPLEX, Sampling
from replica.scheduling.batch import Batch
from replica.scheduling.rows import Rows
from replica.scheduling.sequence import Bits, Constraint, ConstraintFailure, Key, TokenIds

ALL_ALLOWED = 0xFF


def _packed(ids: tuple[int, ...], vocab_size: int, *, inside: bool) -> Bits:
    """Uint8 [V/8]: the tokens of these ids, or all others."""
    flags = np.full(vocab_size, not inside)
    flags[list(ids)] = inside
    return np.packbits(flags, bitorder="little")


class AllowedTokens(Constraint):
    """A fixed set of tokens."""

    def __init__(self, allowed: tuple[int, ...], vocab_size: int) -> None:
        self._bits = _packed(allowed, vocab_size, inside=True)

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        bits[:] = self._bits


class StopsHeldBack(Constraint):
    """Stop tokens are not allowed before there are `min_tokens`.

    The sampler holds them back by itself. Here they count so that what another constraint leaves
    is never a token that is held back: then no token at all could be sampled.
    """

    def __init__(self, stop_ids: tuple[int, ...], min_tokens: int, vocab_size: int) -> None:
        self._others = _packed(stop_ids, vocab_size, inside=False)
        self._min_tokens = min_tokens

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        bits[:] = self._others if len(output_ids) < self._min_tokens else ALL_ALLOWED


class BadTokens(Constraint):
    """Sequences of tokens that must not come up: the last token of one is not allowed where the
    others have just been sampled."""

    def __init__(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        self._sequences = sequences

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        bits[:] = ALL_ALLOWED
        longest = max(map(len, self._sequences)) - 1
        recent = tuple(output_ids[len(output_ids) - min(longest, len(output_ids)) :].tolist())
        for *before, last in self._sequences:
            if not before or recent[-len(before) :] == tuple(before):
                bits[last >> 3] &= ~(1 << (last & 7)) & 0xFF


class Both(Constraint):
    """What two constraints both allow; where that is nothing, what the first one allows."""

    def __init__(self, first: Constraint, second: Constraint) -> None:
        self._first, self._second = first, second

    def ready(self, timeout_s: float = 0.0) -> bool:
        return self._first.ready(timeout_s) and self._second.ready(timeout_s)

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        self._first.fill(output_ids, bits)
        further = np.empty_like(bits)
        self._second.fill(output_ids, further)
        further &= bits
        if further.any():
            bits[:] = further


class MakesConstraints(Protocol):
    """Where the constraints of grammars come from (`replica.sampling.grammars`)."""

    def constraint(self, grammar: str) -> Constraint: ...


def constraint_of(
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    vocab_size: int,
    grammars: MakesConstraints | None,
) -> Constraint | None:
    """What limits the tokens of a sequence beyond its penalties. stop_ids: all that end it.

    Raises ValueError for a grammar where there is nothing to follow one with.
    """
    constraints: list[Constraint] = []
    if sampling.grammar:
        if grammars is None:
            raise ValueError("grammars are not supported with the tokenizer of this model")
        constraints.append(grammars.constraint(sampling.grammar))
    if sampling.allowed_token_ids is not None:
        constraints.append(AllowedTokens(sampling.allowed_token_ids, vocab_size))
    if sampling.min_tokens and (constraints or sampling.bad_token_ids):
        constraints.append(StopsHeldBack(stop_ids, sampling.min_tokens, vocab_size))
    if sampling.bad_token_ids:
        constraints.append(BadTokens(sampling.bad_token_ids))
    return reduce(Both, constraints) if constraints else None


class MaskBuilder:
    """Builds the masks of a step from the rows' settled tokens."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.failures: list[tuple[Key, str]] = []
        """Sequences whose constraint failed, and the error; the engine ends them."""

    def fill(self, batch: Batch, bits: Bits) -> None:
        """uint8 [S, V/8]: one mask per sampling row; free rows may sample anything, and so may
        rows whose sequence ended meanwhile, since their token is surplus."""
        rows = self._rows
        for index, row in enumerate(batch.sampling_rows.tolist()):
            sequence = rows.sequence(row)
            constraint = sequence.constraint
            if constraint is None or rows.ended[row]:
                bits[index] = ALL_ALLOWED
                continue
            try:
                constraint.fill(
                    rows.tokens[row, sequence.num_prompt : rows.known[row]], bits[index]
                )
            except ConstraintFailure:  # whose text holds what the client asked for
                bits[index] = ALL_ALLOWED
                self.failures.append((sequence.key, TOO_COMPLEX))
