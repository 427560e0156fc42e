"""Decides what the next step computes, and applies the results of a collected one.

Pure CPU work on counts: no torch, no clocks, no token values but those already collected. A
row, a block or a host buffer is released in `update` only, once the newest step that names it
has been collected, so nothing that a step in flight reads or writes ever has a second owner.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable
from itertools import repeat

import numpy as np

from replica.messages import FinishReason, Output
from replica.scheduling.batch import MAX_SCORES, Batch, Bools, Indices, Int32s, StepOutput
from replica.scheduling.block_manager import BlockManager
from replica.scheduling.describe import describe
from replica.scheduling.rows import NEVER, SHAPED, Rows
from replica.scheduling.scores import deliver_scores, logprobs_of_prompts, logprobs_of_tokens
from replica.scheduling.sequence import Key, Sequence
from replica.scheduling.step_budget import CostModel, StepBudget

MAX_OVERTAKEN = 32
"""How many later arrivals may be admitted before a sequence that does not fit yet."""
RESERVE = 0.25
"""Share of a step's prompt budget that the first prompt leaves for shorter ones."""
LEAST_FOR_PROMPTS = 0.25
"""Least share of a step's time for prompts, however long its decode rows take."""


class Scheduler:
    """Owner of the waiting list, and of all decisions about rows and blocks."""

    def __init__(
        self,
        rows: Rows,
        blocks: BlockManager,
        *,
        max_step_tokens: int,
        step_budget_ms: float | None = None,
    ) -> None:
        self.rows = rows
        self.blocks = blocks
        self.cost = CostModel()
        """Predicts what chunks cost. It may be replaced at any time."""
        self.waiting: list[Sequence] = []
        """Sequences without a row, by priority; preempted ones return to their place."""
        self.outputs: list[Output] = []
        """Outputs to be reported; the engine takes them after each step."""
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self._max_step_tokens = max_step_tokens
        self._step_budget_ms = math.inf if step_budget_ms is None else step_budget_ms
        self._alive: dict[Key, Sequence] = {}
        self._arrivals = 0
        self._new_rows: set[int] = set()
        self._next_step = 0
        self._collected = NEVER
        self._ones = np.ones(rows.max_rows, np.int32)

    @property
    def has_work(self) -> bool:
        """Some sequence has not ended, or some row is not released yet."""
        return bool(self._alive) or self.rows.num_used > 0

    @property
    def num_steps(self) -> int:
        """Steps launched so far."""
        return self._next_step

    def __contains__(self, key: Key) -> bool:
        """Whether that sequence is alive."""
        return key in self._alive

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. One that is complete already ends here."""
        self._arrivals += 1
        sequence.order = self._arrivals
        self._alive[sequence.key] = sequence
        if len(sequence.token_ids) >= sequence.limit:
            self._end(sequence, "length", len(sequence.token_ids))
        else:
            self._queue(sequence)

    def abort(self, key: Key) -> None:
        """End a sequence now. Marks only: its row and blocks go back in `update`."""
        sequence = self._alive.get(key)
        if sequence is None:
            return
        if sequence.row is None:
            self.waiting.remove(sequence)
            self._end(sequence, "abort", len(sequence.token_ids))
        else:
            self._end(sequence, "abort", int(self.rows.known[sequence.row]))

    def fail(self, key: Key, error: str) -> None:
        """End a running sequence, whose newest tokens are worth nothing."""
        sequence = self._alive.get(key)
        if sequence is not None and sequence.row is not None:
            self._end(sequence, "error", int(self.rows.known[sequence.row]), error)

    def abort_all(self) -> None:
        for key in list(self._alive):
            self.abort(key)

    def schedule(self) -> Batch | None:
        """The next step: running rows first, one token each, then prompt chunks."""
        self.rows.look_for_ready()
        pending = self.rows.pending
        decodes = self._decode_rows(pending)
        admitted = self._admit() if self.waiting else []
        chunks: dict[int, int] = {}
        if admitted or pending.max() > 1:
            chunks = self._prompt_chunks(admitted, self._budget(decodes))
        if not len(decodes) and not chunks:
            return None
        rows, lengths = decodes, self._ones[: len(decodes)]
        if chunks:
            rows = np.concatenate([rows, list(chunks.keys())])
            lengths = np.concatenate([lengths, np.array(list(chunks.values()), np.int32)])
        return self._launchable(rows, lengths)

    def update(self, output: StepOutput | None) -> None:
        """Append tokens, end sequences, release what no step in flight names any more."""
        if output is not None:
            self._collected = output.batch.step
            self._index_full_blocks(output.batch)
            if output.scores is not None:
                deliver_scores(self.rows, output.batch, output.scores)
            self._append(output)
        self._retire_rows()

    def take_outputs(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    # Scheduling

    def _decode_rows(self, pending: Int32s) -> Indices:
        """Rows that lack one token, with a place for it; others sit this step out."""
        rows = self.rows
        ready = rows.live & (pending == 1) & (rows.scheduled + 1 < rows.limit)
        short = ready & self._full()
        if short.any():
            self._grow(np.flatnonzero(short).tolist())
            ready &= rows.live & ~self._full()
        return np.flatnonzero(ready)

    def _full(self) -> Bools:
        """[R] whether the next token of each row needs a new block."""
        full: Bools = self.rows.scheduled >= self.rows.num_blocks * self.rows.block_size
        return full

    def _grow(self, short: list[int]) -> None:
        """One more block for each row, by priority. Where none is left, the newest sequence of
        the lowest class is preempted; its blocks come once its step in flight is collected."""
        rows = self.rows
        leaving = rows.ended | rows.preempted
        coming = int(rows.num_blocks[leaving].sum())
        for row in sorted(short, key=lambda row: rows.sequence(row).priority):
            if not rows.live[row]:
                continue
            if self.blocks.num_free:
                rows.add_blocks(row, self.blocks.allocate(1))
                continue
            if coming <= 0:
                coming += self._preempt()
            coming -= 1

    def _preempt(self) -> int:
        """Take the lowest row out of the batch; how many blocks will come back."""
        rows = self.rows
        live = np.flatnonzero(rows.live).tolist()
        victim = max(live, key=lambda row: rows.sequence(row).priority)
        rows.live[victim] = False
        rows.preempted[victim] = True
        self.counts["preemptions"] += 1
        return int(rows.num_blocks[victim])

    def _admit(self) -> list[int]:
        """Give rows to waiting sequences that fit. One that does not fit lets later ones pass,
        MAX_OVERTAKEN times."""
        admitted: list[int] = []
        passed: list[Sequence] = []
        for sequence in list(self.waiting):
            if not self.rows.num_free:
                break
            row = self._try_admit(sequence)
            if row is not None:
                admitted.append(row)
                for earlier in passed:
                    earlier.overtaken += 1
            elif sequence.overtaken >= MAX_OVERTAKEN:
                break
            else:
                passed.append(sequence)
        return admitted

    def _try_admit(self, sequence: Sequence) -> int | None:
        """A row with blocks for all known tokens, cached prefix included; None if it must wait.

        One block per running row stays free: admitting into the last ones would only preempt.
        """
        blocks = self.blocks
        free = blocks.num_free - int(self.rows.live.sum())
        if free < sequence.blocks_wanted:
            return None
        if sequence.sampling.shaped and len(sequence.token_ids) > self._room_for_pasts():
            return None
        cached, chain = self._cached(sequence)
        wanted = blocks.blocks_for(len(sequence.token_ids)) - len(cached)
        sequence.blocks_wanted = wanted + blocks.num_evictable(cached)
        if free < sequence.blocks_wanted:
            return None
        blocks.share(cached)
        self.waiting.remove(sequence)
        num_cached = len(cached) * blocks.block_size
        if not sequence.started:
            sequence.started = True
            sequence.num_cached = num_cached
            self.counts["cached_tokens"] += num_cached
        sequence.chain = chain
        row = self.rows.assign(sequence, cached + blocks.allocate(wanted), num_cached)
        self._new_rows.add(row)
        return row

    def _cached(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """Blocks of its prefix, and their digests. A prompt that is scored is computed in full."""
        if len(sequence.prompt_logprobs) < sequence.score_end:
            return [], []
        return self.blocks.match(sequence.cache_salt, sequence.token_ids)

    def _room_for_pasts(self) -> int:
        """Tokens: the next step carries the past of new shaped rows, as much as one context."""
        rows = self.rows
        travelling = [row for row in self._new_rows if rows.kinds[row] & SHAPED]
        return rows.max_model_len - int(rows.known[travelling].sum())

    def _budget(self, decodes: Indices) -> StepBudget:
        """What these decode rows leave of a step for prompt chunks."""
        keys = int(self.rows.scheduled[decodes].sum())
        ms = self._step_budget_ms - self.cost.base_ms(len(decodes), keys)
        least_ms = LEAST_FOR_PROMPTS * self._step_budget_ms
        return StepBudget(self._max_step_tokens - len(decodes), max(ms, least_ms), self.cost)

    def _prompt_chunks(self, admitted: list[int], budget: StepBudget) -> dict[int, int]:
        """Tokens per prompt row. The first prompt leaves a reserve to the shortest others, so
        that a long one delays nobody's first token by more than a few steps."""
        rows, pending = self.rows, self.rows.pending
        prompts = rows.live & (pending > 1)
        prompts[admitted] = True
        ordered = sorted(
            np.flatnonzero(prompts).tolist(), key=lambda row: rows.sequence(row).priority
        )
        sizes = dict.fromkeys(ordered, 0)

        scores = MAX_SCORES

        def give(budget: StepBudget, candidates: Iterable[int]) -> None:
            nonlocal scores
            for row in candidates:
                start = int(rows.scheduled[row]) + sizes[row]
                scored = start < rows.score_end[row]
                wanted = int(pending[row]) - sizes[row]
                most = min(wanted, scores) if scored else wanted
                size = budget.take(start, most, scored=scored)
                sizes[row] += size
                scores -= size if scored else 0

        if len(ordered) > 1:
            reserve = budget.split_off(RESERVE)
            give(reserve, sorted(ordered[1:], key=lambda row: int(pending[row])))
            budget.add(reserve)
        give(budget, ordered)
        return {row: size for row, size in sizes.items() if size}

    def _launchable(self, rows: Indices, lengths: Int32s) -> Batch:
        """Count the step in, as if it had run; what it samples is in flight from now on."""
        table = self.rows
        starts = table.scheduled[rows]
        ends = starts + lengths
        samples = np.flatnonzero(ends == table.known[rows] + table.in_flight[rows])
        sampling = rows[samples]
        table.scheduled[rows] = ends
        table.last_step[rows] = self._next_step
        table.in_flight[sampling] += 1
        self._count_prompt_tokens(rows, starts, ends)
        batch = describe(table, self._next_step, rows, starts, lengths, samples, self._new_rows)
        self._new_rows.clear()
        self._next_step += 1
        return batch

    def _count_prompt_tokens(self, rows: Indices, starts: Int32s, ends: Int32s) -> None:
        prompt_ends = self.rows.prompt[rows]
        if (starts < prompt_ends).any():
            computed = np.minimum(ends, prompt_ends) - np.minimum(starts, prompt_ends)
            self.counts["prompt_tokens"] += int(computed.sum())

    # Settling

    def _index_full_blocks(self, batch: Batch) -> None:
        """Blocks that this step filled can be found from now on: their content is there.

        A token may have been fed and never settled, if its sequence failed meanwhile: what a
        block holds from there on is known to nobody, and the block is not to be found.
        """
        size, ends = self.blocks.block_size, batch.ends
        for index in np.flatnonzero(ends % size < batch.lengths).tolist():
            row = int(batch.rows[index])
            sequence = self.rows.sequence(row)
            settled = min(int(ends[index]), int(self.rows.known[row]))
            for number in range(len(sequence.chain), settled // size):
                block = int(self.rows.block_table[row, number])
                self.blocks.register(
                    sequence.cache_salt, sequence.chain, self.rows.tokens[row], block
                )

    def _append(self, output: StepOutput) -> None:
        rows, ids, batch = self.rows, output.ids, output.batch
        sampled = batch.sampling_rows
        places: Iterable[int] = range(len(sampled))
        rows.in_flight[sampled] -= 1
        if rows.ended.any():
            kept = np.flatnonzero(~rows.ended[sampled])
            self.counts["surplus_rows"] += len(sampled) - len(kept)
            sampled, ids = sampled[kept], ids[kept]
            places = kept.tolist()
        self.counts["output_tokens"] += len(sampled)
        known = rows.known[sampled]
        rows.tokens[sampled, known] = ids
        rows.known[sampled] = known + 1
        width = rows.num_stops[sampled].max(initial=0)  # few have as many as there is room for
        stopped = (rows.stop_ids[sampled, :width] == ids[:, None]).any(axis=1)
        over = stopped | (known + 1 >= rows.limit[sampled])
        reasons = self._finish_all(sampled, stopped, over)
        offsets = (known - rows.prompt[sampled]).tolist()
        token_ids = zip(ids.tolist(), strict=True)
        request_ids, attempts, num_cached, queued_s = rows.names(sampled)
        self.outputs += map(
            Output, request_ids, attempts, offsets, token_ids, reasons, num_cached, repeat(""),
            logprobs_of_tokens(rows, sampled, places, output.logprobs),
            logprobs_of_prompts(rows, sampled, offsets),
            (rows.gpu_ns[sampled] / 1e9).tolist(),
            queued_s,
        )  # fmt: skip

    def _finish_all(self, rows: Indices, stopped: Bools, over: Bools) -> list[FinishReason | None]:
        """End the sequences that are over. Why, for each row."""
        reasons: list[FinishReason | None] = [None] * len(rows)
        for index in np.flatnonzero(over).tolist():
            reason: FinishReason = "stop" if stopped[index] else "length"
            reasons[index] = reason
            self._finish(self.rows.sequence(int(rows[index])), reason)
        return reasons

    def _end(self, sequence: Sequence, reason: FinishReason, known: int, error: str = "") -> None:
        """The single end of a sequence that brings no token."""
        offset, cached, row = known - sequence.num_prompt, sequence.num_cached, sequence.row
        gpu_ns = sequence.gpu_ns if row is None else float(self.rows.gpu_ns[row])
        self.outputs.append(
            Output(
                *sequence.key, offset, (), reason, cached_tokens=cached, error=error,
                gpu_s=gpu_ns / 1e9, queued_s=sequence.queued_s or 0.0,
            )
        )  # fmt: skip
        self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.finished[reason] += 1
        del self._alive[sequence.key]
        if sequence.row is not None:
            self.rows.live[sequence.row] = False
            self.rows.ended[sequence.row] = True

    def _retire_rows(self) -> None:
        rows = self.rows
        leaving = rows.ended | rows.preempted
        if not leaving.any():
            return
        leaving &= rows.last_step <= self._collected
        for row in np.flatnonzero(leaving).tolist():
            self.blocks.release(rows.blocks(row))
            sequence = rows.vacate(row)
            if sequence.finish_reason is None:
                sequence.blocks_wanted = 0
                self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda queued: queued.priority)
