"""What one step computes, and its results. Values only.

Positions and KV places depend on counts alone, so a batch is complete although the tokens of
the step before it are not known yet: those inputs are taken from `last_token` on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from replica.messages import TokenLogprobs
from replica.scheduling.sequence import Sequence

Int32s: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Int64s: TypeAlias = npt.NDArray[np.int64]
Float32s: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.intp]
"""numpy indexes with this type; any other is converted each time."""


MAX_SCORES = 128
"""Most prompt positions whose log probabilities one step computes."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """P prompt positions whose log probabilities a step returns."""

    tokens: Indices
    """[P] indices into the step's tokens."""
    targets: Int32s
    """[P] the prompt token behind each."""
    owners: tuple[tuple[int, int], ...]
    """(index into the B rows, positions), in the order of `tokens`."""

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING_SCORED = Scores(np.zeros(0, np.intp), np.zeros(0, np.int32), ())


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The S sequences whose next tokens a step samples, column by column, as reports need them.

    Gathered when somebody comes or goes, not in each step.
    """

    sequences: tuple[Sequence, ...]
    request_ids: tuple[str, ...]
    attempts: tuple[int, ...]
    num_cached: tuple[int, ...]
    num_prompt: Int32s
    """[S]"""

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> Sampled:
        found = tuple(sequences)
        return cls(
            sequences=found,
            request_ids=tuple(sequence.request_id for sequence in found),
            attempts=tuple(sequence.attempt for sequence in found),
            num_cached=tuple(sequence.num_cached for sequence in found),
            num_prompt=np.array([sequence.num_prompt for sequence in found], np.int32),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of one step: rows with one token, then prompt chunks.

    What several modules derive from it is derived once, when it is first asked for.
    """

    step: int
    """Counts launches from 0; its slot is `step % 2`."""
    rows: Indices
    starts: Int32s
    """[B] position of the first token computed."""
    lengths: Int32s
    """[B] tokens computed, at least 1."""
    sequences: tuple[Sequence, ...]
    samples: Indices
    """[S] indices into the B rows whose last token yields a new one."""
    sampled: Sampled
    """Who they belong to."""
    new_rows: Indices
    """Rows assigned since the last batch: their sampling parameters travel with this one."""
    greedy: bool
    """Every sampling row is greedy."""
    filtered: bool
    """Some sampling row keeps only its most likely tokens (top-k, top-p, min-p)."""
    shaped: bool
    """Some sampling row's logits are changed by penalties or biases."""
    logprobs: bool
    """Some sampling row is to tell the log probabilities of its token."""
    held: bool
    """Some sampling row may not stop yet (`min_tokens`)."""
    constrained: bool
    """Some sampling row has a mask that depends on tokens still in flight."""
    shaped_rows: Indices
    """The new rows whose biases and past tokens travel with this step, too."""
    past: tuple[int, int]
    """Tokens of their prompts and outputs so far, all together."""
    scores: Scores = NOTHING_SCORED

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def ends(self) -> Int32s:
        """[B] tokens of each row in the pool after the step."""
        ends: Int32s = self.starts + self.lengths
        return ends

    @cached_property
    def sampling_rows(self) -> Indices:
        """[S]"""
        return self.rows[self.samples]

    @property
    def num_logits(self) -> int:
        """Tokens whose logits are wanted: those of `samples`, then those of `scores`."""
        return len(self.samples) + len(self.scores)

    @cached_property
    def decodes_only(self) -> bool:
        """Every row computes one token and samples the next."""
        return len(self.samples) == self.num_tokens

    def followed_by(self, step: int, starts: Int32s, lengths: Int32s, *, held: bool) -> Batch:
        """A step of the same rows, none of which has changed hands."""
        return replace(
            self,
            step=step,
            starts=starts,
            lengths=lengths,
            held=held,
            new_rows=self.new_rows[:0],
            shaped_rows=self.shaped_rows[:0],
            past=(0, 0),
            scores=NOTHING_SCORED,
        )

    @classmethod
    def padding(cls, size: int, *, shaped: bool = False) -> Batch:
        """A step of `size` decode rows that belong to nobody: what a graph is captured with.

        What it samples may be anything; with `shaped`, stop tokens may be held back, too.
        """
        rows = np.arange(size)
        return cls(
            step=0,
            rows=rows,
            starts=np.zeros(size, np.int32),
            lengths=np.ones(size, np.int32),
            sequences=(),
            samples=rows,
            sampled=Sampled.of(()),
            new_rows=rows[:0],
            greedy=False,
            filtered=True,
            shaped=shaped,
            logprobs=False,
            held=shaped,
            constrained=False,
            shaped_rows=rows[:0],
            past=(0, 0),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log probabilities of S sampling rows, by the model's own logits. K alternatives, most
    likely first."""

    chosen: Float32s
    """[S]"""
    top_ids: Int32s
    """[S, K]"""
    top: Float32s
    """[S, K]"""

    def of(self, index: int, alternatives: int) -> TokenLogprobs:
        """The log probabilities of one row's token, with so many alternatives."""
        return TokenLogprobs(
            float(self.chosen[index]),
            tuple(self.top_ids[index, :alternatives].tolist()),
            tuple(self.top[index, :alternatives].tolist()),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """A collected step: `ids[i]` was sampled for row `batch.rows[batch.samples[i]]`."""

    batch: Batch
    ids: Int64s
    logprobs: StepLogprobs | None = None
    """Where the batch asked for them."""
    scores: StepLogprobs | None = None
    """Where the batch asked for them: of [P] prompt tokens."""
