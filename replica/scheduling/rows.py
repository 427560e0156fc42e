"""The persistent batch: one row per running sequence, as a structure of arrays.

Rows are preallocated and changed in place, so that preparing a step costs the same few array
operations for one row as for hundreds, and nothing per token of context. The table knows
counts, ids and block numbers. It decides nothing (`replica.scheduling.scheduler` does).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from replica.scheduling.batch import Indices, Int32s
from replica.scheduling.sequence import MAX_STOP_IDS, NO_TOKEN, Sequence

DRAWN, FILTERED, SHAPED, TOLD, CONSTRAINED, HOLDS = (1 << bit for bit in range(6))
"""Kinds of sampling: not greedy; from the most likely tokens only; with penalties or biases; with
log probabilities; limited by a mask; with stop tokens held back at first (`min_tokens`)."""
NEVER = -1
NONE_ASKED = -1

Names: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[float, ...]]


class Rows:
    """The state of all rows. Arrays are indexed by row, int32 unless noted."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, guard: int) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.guard = guard
        """Block that no sequence owns; unused entries of block tables point at it."""
        width = -(-max_model_len // block_size)
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.tokens = np.zeros((max_rows, max_model_len), np.int32)
        """Known ids, prompt first."""
        self.known = np.zeros(max_rows, np.int32)
        """How many of `tokens` are valid."""
        self.in_flight = np.zeros(max_rows, np.int32)
        """Tokens sampled by steps not yet collected; their values are on the device only."""
        self.scheduled = np.zeros(max_rows, np.int32)
        """Tokens whose KV is computed or being computed."""
        self.limit = np.zeros(max_rows, np.int32)
        self.block_table = np.full((max_rows, width), guard, np.int32)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.prompt = np.zeros(max_rows, np.int32)
        """Length of the prompt."""
        self.hold_until = np.zeros(max_rows, np.int32)
        """No stop token is sampled for a position below this one (`min_tokens`)."""
        self.kinds = np.zeros(max_rows, np.uint8)
        """How it samples: the bits DRAWN to HOLDS."""
        self.logprobs = np.full(max_rows, NONE_ASKED, np.int32)
        """How many alternatives are returned with each of its tokens; NONE_ASKED for no log
        probabilities."""
        self.scored = np.zeros(max_rows, np.int32)
        """Prompt positions whose log probabilities are computed or being computed."""
        self.score_end = np.zeros(max_rows, np.int32)
        """Number of prompt positions whose log probabilities were asked for."""
        self.unready = np.zeros(max_rows, np.int32)
        """1 while its grammar is being compiled: its last token, from which the next is sampled, is
        not computed before."""
        self.stop_ids = np.full((max_rows, MAX_STOP_IDS), NO_TOKEN, np.int32)
        self.num_stops = np.zeros(max_rows, np.intp)
        self.last_step = np.full(max_rows, NEVER, np.int64)
        """The newest step that names the row."""
        self.gpu_ns = np.zeros(max_rows, np.float64)
        """Its sequence's share of the device's time (`replica.attribution`)."""
        self.live = np.zeros(max_rows, bool)
        """It may be scheduled: occupied, not ended, not preempted."""
        self.ended = np.zeros(max_rows, bool)
        """Its sequence has ended; results of steps in flight are dropped."""
        self.preempted = np.zeros(max_rows, bool)
        self.untouched: set[int] = set()
        """Rows of sequences that no step has computed for yet."""
        self._free = list(range(max_rows - 1, -1, -1))
        self._named: bytes | None = None
        self._names: Names = (), (), (), ()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.max_rows - len(self._free)

    @property
    def pending(self) -> Int32s:
        """[R] tokens that are known or in flight, not scheduled, and wait for nothing."""
        pending: Int32s = self.known + self.in_flight - self.scheduled - self.unready
        return pending

    def look_for_ready(self, timeout_s: float = 0.0) -> None:
        """Note whose grammar is compiled by now; waits at most so long for each."""
        for row in np.flatnonzero(self.unready).tolist():
            constraint = self.sequence(row).constraint
            assert constraint is not None
            self.unready[row] = not constraint.ready(timeout_s)

    def sequence(self, row: int) -> Sequence:
        """The sequence that owns the row."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def names(self, rows: Indices) -> Names:
        """What reports say of these rows' sequences, column by column: request ids, attempts,
        cached prompt tokens, seconds in the queue. Gathered when somebody comes or goes, not in
        each step."""
        if (named := rows.tobytes()) != self._named:
            owners = [self.sequence(row) for row in rows.tolist()]
            self._names = (
                tuple(owner.request_id for owner in owners),
                tuple(owner.attempt for owner in owners),
                tuple(owner.num_cached for owner in owners),
                tuple(owner.queued_s or 0.0 for owner in owners),
            )
            self._named = named
        return self._names

    def assign(self, sequence: Sequence, blocks: list[int], num_computed: int) -> int:
        """Give a free row to `sequence`; its first `num_computed` tokens have KV already."""
        row = self._free.pop()
        count = len(sequence.token_ids)
        self.sequences[row] = sequence
        self._named = None
        self.tokens[row, :count] = sequence.token_ids
        self.known[row] = count
        self.scheduled[row] = num_computed
        self.limit[row] = sequence.limit
        self.prompt[row] = sequence.num_prompt
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self.num_stops[row] = len(sequence.stop_ids)
        sampling, constraint = sequence.sampling, sequence.constraint
        self.hold_until[row] = sequence.num_prompt + sampling.min_tokens
        self.kinds[row] = (
            DRAWN * (not sampling.greedy)
            | FILTERED * sampling.filtered
            | SHAPED * sampling.shaped
            | TOLD * (sampling.logprobs is not None)
            | CONSTRAINED * (constraint is not None)
            | HOLDS * (sampling.min_tokens > 0)
        )
        self.logprobs[row] = NONE_ASKED if sampling.logprobs is None else sampling.logprobs
        self.scored[row] = len(sequence.prompt_logprobs)
        self.score_end[row] = sequence.score_end
        self.unready[row] = constraint is not None and not constraint.ready()
        self.gpu_ns[row] = sequence.gpu_ns
        self.live[row] = True
        if sequence.queued_s is None:
            self.untouched.add(row)
        sequence.row = row
        self.add_blocks(row, blocks)
        return row

    def add_blocks(self, row: int, blocks: list[int]) -> None:
        first = int(self.num_blocks[row])
        self.block_table[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] = first + len(blocks)

    def blocks(self, row: int) -> list[int]:
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        return blocks

    def vacate(self, row: int) -> Sequence:
        """Free the row. The sequence takes its known ids and its bill along."""
        sequence = self.sequence(row)
        sequence.token_ids = self.tokens[row, : self.known[row]].copy()
        sequence.gpu_ns = float(self.gpu_ns[row])
        sequence.row = None
        self.sequences[row] = None
        self.last_step[row] = NEVER
        self.untouched.discard(row)
        self.block_table[row, : self.num_blocks[row]] = self.guard
        self.stop_ids[row] = NO_TOKEN
        self.unready[row] = 0
        for array in (self.known, self.in_flight, self.scheduled, self.limit, self.num_blocks):
            array[row] = 0
        for flags in (self.live, self.ended, self.preempted):
            flags[row] = False
        self._free.append(row)
        return sequence
