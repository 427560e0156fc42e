"""From chosen rows to a `Batch`: what the device must know about them. Pure CPU work.

Which rows a step has, and how much of each, is decided in `replica.scheduling.scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replica.scheduling.batch import CARRIED, NOTHING_SCORED, Batch, Indices, Int32s, NewRow
from replica.scheduling.rows import CONSTRAINED, DRAWN, FILTERED, HOLDS, SHAPED, TOLD, Rows
from replica.scheduling.scores import plan_scores


def describe(
    table: Rows,
    step: int,
    rows: Indices,
    starts: Int32s,
    lengths: Int32s,
    samples: Indices,
    new_rows: Iterable[int],
) -> Batch:
    """A step of these rows. new_rows: those that changed hands since the one before."""
    ends, sampling = starts + lengths, rows[samples]
    owners, positions = _spread(starts, lengths)
    kinds = int(np.bitwise_or.reduce(table.kinds[sampling]))
    width = -(-int(ends.max()) // table.block_size)
    scored = len(samples) < len(owners) and table.score_end[rows].any()
    return Batch(
        step=step,
        rows=rows,
        starts=starts,
        lengths=lengths,
        owners=owners,
        positions=positions,
        token_ids=_token_ids(table, rows[owners], positions),
        block_tables=table.block_table[rows, :width],
        samples=samples,
        new_rows=tuple(_new_row(table, row) for row in new_rows if table.sequences[row]),
        greedy=not kinds & DRAWN,
        filtered=bool(kinds & FILTERED),
        shaped=bool(kinds & SHAPED),
        logprobs=bool(kinds & TOLD),
        held=bool(kinds & HOLDS and (ends[samples] < table.hold_until[sampling]).any()),
        constrained=bool(kinds & CONSTRAINED),
        scores=plan_scores(table, rows, starts, ends) if scored else NOTHING_SCORED,
    )


def _spread(starts: Int32s, lengths: Int32s) -> tuple[Indices, Int32s]:
    """[T] index into the B rows, and position, of each token of a step."""
    owners = np.arange(len(lengths))
    count = int(lengths.sum())
    if count == len(lengths):
        return owners, starts
    before = starts - (np.cumsum(lengths, dtype=np.int32) - lengths)  # from index to position
    return (
        np.repeat(owners, lengths),
        np.arange(count, dtype=np.int32) + np.repeat(before, lengths),
    )


def _token_ids(table: Rows, rows: Indices, positions: Int32s) -> Int32s:
    """[T]. rows: [T] of each token."""
    carried = positions >= table.known[rows]
    if carried.all():  # while all decode: spare the memory a look at what is not there yet
        return np.full(len(rows), CARRIED, np.int32)
    return np.where(carried, np.int32(CARRIED), table.tokens[rows, positions])


def _new_row(table: Rows, row: int) -> NewRow:
    sequence = table.sequence(row)
    prompt, known = sequence.num_prompt, int(table.known[row])
    told = table.tokens[row, : known if sequence.sampling.shaped else 0].copy()
    return NewRow(
        row=row,
        sampling=sequence.sampling,
        stop_ids=sequence.stop_ids,
        hold_until=int(table.hold_until[row]),
        prompt_ids=told[:prompt],
        output_ids=told[prompt:],
    )
