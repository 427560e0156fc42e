"""From chosen rows to a `Batch`: what the device must know about them. Pure CPU work.

Which rows a step has, and how much of each, is decided in `replica.scheduling.scheduler`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from replica.scheduling.batch import Batch, Indices, Int32s, Sampled
from replica.scheduling.rows import Rows
from replica.scheduling.scores import plan_scores


def describe(
    table: Rows,
    newest: Batch | None,
    step: int,
    rows: Indices,
    starts: Int32s,
    lengths: Int32s,
    samples: Indices,
    new_rows: Collection[int],
) -> Batch:
    """The step that follows `newest`. new_rows: those that changed hands since then."""
    ends = starts + lengths
    held = bool((ends[samples] < table.hold_until[rows[samples]]).any())
    # While nobody comes or goes, all that depends on who is in the batch stays as it was.
    if (
        newest is not None
        and not new_rows
        and rows.tobytes() == newest.rows.tobytes()
        and samples.tobytes() == newest.samples.tobytes()
    ):
        batch = newest.followed_by(step, starts, lengths, held=held)
    else:
        batch = _anew(table, step, rows, starts, lengths, samples, new_rows, held)
    if table.score_end[rows].any():
        return replace(batch, scores=plan_scores(table, rows, starts, ends))
    return batch


def _anew(
    table: Rows,
    step: int,
    rows: Indices,
    starts: Int32s,
    lengths: Int32s,
    samples: Indices,
    new_rows: Collection[int],
    held: bool,
) -> Batch:
    sampling = rows[samples]
    new = np.array([row for row in new_rows if table.sequences[row]], np.intp)
    shaped = new[table.shaped[new]]
    sequences = tuple(table.sequence(row) for row in rows.tolist())
    return Batch(
        step=step,
        rows=rows,
        starts=starts,
        lengths=lengths,
        sequences=sequences,
        samples=samples,
        sampled=Sampled.of(sequences[index] for index in samples.tolist()),
        new_rows=new,
        greedy=bool(table.greedy[sampling].all()),
        filtered=bool(table.filtered[sampling].any()),
        shaped=bool(table.shaped[sampling].any()),
        logprobs=bool((table.logprobs[sampling] >= 0).any()),
        held=held,
        constrained=bool(table.constrained[sampling].any()),
        shaped_rows=shaped,
        past=(int(table.prompt[shaped].sum()), int(table.output_lens(shaped).sum())),
    )
