"""Which prompt positions a step scores, and whose log probabilities its results are.

Logits of prompt positions are wanted for these alone, so a step scores at most MAX_SCORES of
them. Position p scores token p + 1. Pure CPU work on counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np

from replica.messages import TokenLogprobs
from replica.scheduling.batch import NOTHING_SCORED, Batch, Indices, Int32s, Scores, StepLogprobs
from replica.scheduling.rows import Rows


def plan_scores(table: Rows, rows: Indices, starts: Int32s, ends: Int32s) -> Scores:
    """What a step of these rows scores, which then counts as scored."""
    first = np.maximum(starts, table.scored[rows])
    counts = np.minimum(ends, table.score_end[rows]) - first
    if not (counts > 0).any():
        return NOTHING_SCORED
    offsets = np.cumsum(ends - starts) - (ends - starts)  # of each row's first token in the step
    tokens, targets, owners = [], [], []
    for index in np.flatnonzero(counts > 0).tolist():
        row, begin, count = rows[index], int(first[index]), int(counts[index])
        at = int(offsets[index]) + begin - int(starts[index])
        tokens.append(np.arange(at, at + count))
        targets.append(table.tokens[row, begin + 1 : begin + 1 + count])
        owners.append((index, count))
        table.scored[row] = begin + count
    return Scores(np.concatenate(tokens), np.concatenate(targets), tuple(owners))


def deliver_scores(table: Rows, batch: Batch, told: StepLogprobs) -> None:
    """Hand the log probabilities of a collected step to its sequences."""
    at = 0
    for index, count in batch.scores.owners:
        sequence = table.sequence(int(batch.rows[index]))
        alternatives = sequence.sampling.prompt_logprobs or 0
        sequence.prompt_logprobs += [told.of(at + i, alternatives) for i in range(count)]
        at += count


def logprobs_of_tokens(
    table: Rows, rows: Indices, places: Iterable[int], told: StepLogprobs | None
) -> Iterable[tuple[TokenLogprobs, ...]]:
    """What each of S rows is told of its token. places: [S] of the rows among the step's results.
    An endless run of empty tuples if nobody asked for any."""
    if told is None:
        return repeat(())
    wanted = zip(places, table.logprobs[rows].tolist(), strict=True)
    return [() if count < 0 else (told.of(place, count),) for place, count in wanted]


def logprobs_of_prompts(
    table: Rows, rows: Indices, offsets: Iterable[int]
) -> Iterable[tuple[TokenLogprobs, ...]]:
    """The prompts' log probabilities, which come with a sequence's first token. An endless run of
    empty tuples if nobody asked for any."""
    if not table.score_end[rows].any():
        return repeat(())
    return [
        () if offset else tuple(table.sequence(row).prompt_logprobs)
        for row, offset in zip(rows.tolist(), offsets, strict=True)
    ]
