"""What one step computes, and its results. Values only: rows by index, nothing that lives on.

Positions and KV places depend on counts alone, so a batch is complete although the tokens of
the step before it are not known yet: those inputs are taken from `last_token` on the device.
A process that is sent every batch of another one, and nothing else, computes the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from replica.messages import Sampling, TokenLogprobs

Int32s: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Int64s: TypeAlias = npt.NDArray[np.int64]
Float32s: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.intp]
"""The type that numpy indexes with; it converts any other on each use."""

CARRIED = -1
"""Stands for a token that only the device knows: the last one that the row has sampled."""
MAX_SCORES = 128
"""Most prompt positions whose log probabilities one step computes."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """P prompt positions whose log probabilities a step returns."""

    tokens: Indices
    """[P] indices into the step's tokens."""
    targets: Int32s
    """[P] the prompt token that follows each."""
    owners: tuple[tuple[int, int], ...]
    """(index into the B rows, positions), in the order of `tokens`."""

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING_SCORED = Scores(np.zeros(0, np.intp), np.zeros(0, np.int32), ())


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """A row that changed hands since the last step: what holds for it from now on."""

    row: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    hold_until: int
    """No stop token is sampled for a position below this one."""
    prompt_ids: Int32s
    """Its known tokens, if they change its logits; else these two are empty."""
    output_ids: Int32s


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
    owners: Indices
    """[T] of each token, row behind row: index into the B rows."""
    positions: Int32s
    """[T]"""
    token_ids: Int32s
    """[T]; CARRIED where only the device knows it."""
    block_tables: Int32s
    """[B, W] blocks of the KV pool, W as many as the longest row has."""
    samples: Indices
    """[S] indices into the B rows whose last token yields a new one."""
    new_rows: tuple[NewRow, ...]
    greedy: bool
    """No sampling row draws: each takes its most likely token."""
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

    @cached_property
    def shaped_rows(self) -> tuple[NewRow, ...]:
        """The new rows whose biases and past tokens travel with this step."""
        return tuple(new for new in self.new_rows if new.sampling.shaped)

    @property
    def num_logits(self) -> int:
        """Tokens whose logits are wanted: those of `samples`, then those of `scores`."""
        return len(self.samples) + len(self.scores)

    @cached_property
    def decodes_only(self) -> bool:
        """Every row computes one token and samples the next."""
        return len(self.samples) == self.num_tokens

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
            owners=rows,
            positions=np.zeros(size, np.int32),
            token_ids=np.zeros(size, np.int32),
            block_tables=np.zeros((size, 1), np.int32),
            samples=rows,
            new_rows=(),
            greedy=False,
            filtered=True,
            shaped=shaped,
            logprobs=False,
            held=shaped,
            constrained=False,
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
