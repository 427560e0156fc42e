"""The buffers between host and device. There are two sets, used in turn by even and odd steps.

A slot holds one packed host buffer and its device twin for inputs, and static device and host
buffers for outputs. It knows layout and copies. When they may run is the pipeline's business:
the slot of step N is filled again for step N+2, after step N was collected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from replica.device.stream import Device
from replica.messages import MAX_BIASES, MAX_LOGPROBS
from replica.scheduling.batch import (
    CARRIED,
    MAX_SCORES,
    Batch,
    Int32s,
    Int64s,
    StepLogprobs,
    StepOutput,
)
from replica.scheduling.sequence import MAX_STOP_IDS, NO_TOKEN, Bits

Layout: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

TOP_K, SEED, CHOICE, HOLD_UNTIL, NUM_BIASES, FIRST_STOP_ID = range(6)
"""Columns of `row_ints`. Stop ids fill the columns from FIRST_STOP_ID on."""
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
"""Columns of `row_floats`."""
NEUTRAL = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""`row_floats` of a greedy row without penalties or filters."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the buffers must hold at most."""

    max_rows: int
    max_step_tokens: int
    table_width: int
    vocab_size: int
    guard: int = 0
    """Block that no sequence owns."""
    block_size: int = 1

    @property
    def guard_row(self) -> int:
        """Row of the sampler's state that no sequence owns."""
        return self.max_rows


def input_layout(sizes: Sizes) -> Layout:
    """T = max_step_tokens, R = max_rows. Valid prefixes are as long as the batch says."""
    tokens, rows = (sizes.max_step_tokens,), (sizes.max_rows,)
    return {
        "token_ids": (torch.int64, tokens),
        "carried_from": (torch.int64, tokens),  # row whose last token this is, or -1
        "positions": (torch.int64, tokens),
        "slot_mapping": (torch.int64, tokens),  # where each token's K and V go in the pool
        # which tokens' logits are sampled from, and then which ones tell scores
        "sample_index": (torch.int64, (sizes.max_rows + MAX_SCORES,)),
        "score_targets": (torch.int64, (MAX_SCORES,)),
        "sample_rows": (torch.int64, rows),
        "sample_positions": (torch.int64, rows),  # of the tokens to be sampled
        "new_rows": (torch.int64, rows),
        "row_ints": (torch.int64, (sizes.max_rows, FIRST_STOP_ID + MAX_STOP_IDS)),
        "row_floats": (torch.float32, (sizes.max_rows, len(NEUTRAL))),
        "query_starts": (torch.int32, (sizes.max_rows + 1,)),  # first token of each row
        "context_lens": (torch.int32, rows),  # tokens of each row in the pool after the step
        "block_tables": (torch.int32, (sizes.max_rows, sizes.table_width)),
    }


def shape_layout(sizes: Sizes) -> Layout:
    """What rows with penalties or biases bring along, in a buffer that travels only for them."""
    biases = (sizes.max_rows, MAX_BIASES)
    return {
        "shaped_rows": (torch.int64, (sizes.max_rows,)),
        "bias_ids": (torch.int64, biases),
        "biases": (torch.float32, biases),
        # row * V + id of each token so far: those of all prompts, then those of all outputs
        "past": (torch.int64, (sizes.table_width * sizes.block_size,)),
    }


def output_layout(sizes: Sizes) -> Layout:
    """What a step brings: ids, and behind them what is fetched where it was asked for."""
    rows, top = sizes.max_rows, min(MAX_LOGPROBS, sizes.vocab_size)
    return {
        "sampled": (torch.int64, (rows,)),
        "chosen": (torch.float32, (rows,)),
        "top_ids": (torch.int32, (rows, top)),
        "top": (torch.float32, (rows, top)),
        "score": (torch.float32, (MAX_SCORES,)),
        "score_top_ids": (torch.int32, (MAX_SCORES, top)),
        "score_top": (torch.float32, (MAX_SCORES, top)),
    }


LOGPROBS = ("chosen", "top_ids", "top")
SCORES = ("score", "score_top_ids", "score_top")
"""The arrays of `output_layout` that hold the fields of `StepLogprobs`: of sampled tokens, and of
prompt tokens."""


def packed(
    layout: Layout, device: torch.device | None = None, *, pinned: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """One uint8 buffer and a view of it per field."""
    offsets: dict[str, tuple[int, int]] = {}
    size = 0
    for name, (dtype, shape) in layout.items():
        length = dtype.itemsize * math.prod(shape)
        offsets[name] = (size, length)
        size += -(-length // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    views = {
        name: buffer[start : start + length].view(layout[name][0]).view(layout[name][1])
        for name, (start, length) in offsets.items()
    }
    return buffer, views


class IOSlot:
    """One of the two buffer sets. `device` views are what the forward pass may read."""

    def __init__(self, sizes: Sizes, device: Device) -> None:
        layout, memory, pinned = input_layout(sizes), device.memory, device.pinned
        self._sizes = sizes
        self._copy = device.copy
        self._host_buffer, host = packed(layout, pinned=pinned)
        self._device_buffer, self.device = packed(layout, memory)
        self._host_shapes, host_shapes = packed(shape_layout(sizes), pinned=pinned)
        self._device_shapes, shapes = packed(shape_layout(sizes), memory)
        self.device |= shapes
        self._host = {name: view.numpy() for name, view in (host | host_shapes).items()}
        self._numbers = np.arange(sizes.max_rows + 1, dtype=np.int32)
        rows = sizes.max_rows
        self._device_outputs, self.outputs = packed(output_layout(sizes), memory)
        """Results of the step, on the device: static, since D2H still reads them while the other
        slot's step computes."""
        self._host_outputs, results = packed(output_layout(sizes), pinned=pinned)
        self._results = {name: view.numpy() for name, view in results.items()}
        self._ids_only = rows * 8
        mask = (rows, -(-sizes.vocab_size // 8))
        self._host_mask = torch.zeros(mask, dtype=torch.uint8, pin_memory=pinned)
        self.mask = torch.zeros(mask, dtype=torch.uint8, device=memory)
        """[R, V/8] allowed tokens of each sampling row, bits in little order."""
        self.pad_rows(0, rows)
        self.pad_samples(0, rows)

    def fill(self, batch: Batch, padded: int) -> None:
        """CPU: lay the step out in the host buffer, with `padded` sampling rows, at least S.

        A step of decode rows alone is padded as a whole.
        """
        count = len(batch.samples)
        self._fill_tokens(batch)
        if batch.decodes_only:
            last = self._numbers[:count]
            if count < padded:
                self.pad_rows(count, padded)
        else:
            last = np.cumsum(batch.lengths, dtype=np.int32) - 1
        self._fill_rows(batch, last)
        self._fill_samples(batch, last)
        if batch.new_rows:
            self._fill_new_rows(batch)
        if batch.shaped_rows:
            self._fill_shaped_rows(batch)
        if count < padded:
            self.pad_samples(count, padded)
        if len(batch.scores):
            scores = slice(count, count + len(batch.scores))
            self._host["sample_index"][scores] = batch.scores.tokens
            self._host["score_targets"][: len(batch.scores)] = batch.scores.targets

    def pad_rows(self, first: int, last: int) -> None:
        """CPU: make rows `first` to `last` decode rows, each a sequence of one token that lives
        in the guard block: finite whatever the pool holds, and read by nobody."""
        host, guard = self._host, self._sizes.guard
        rows = slice(first, last)
        host["token_ids"][rows] = 0
        host["carried_from"][rows] = -1
        host["positions"][rows] = 0
        host["slot_mapping"][rows] = guard * self._sizes.block_size
        host["query_starts"][first + 1 : last + 1] = self._numbers[first + 1 : last + 1]
        host["context_lens"][rows] = 1
        host["block_tables"][rows, 0] = guard

    def pad_samples(self, first: int, last: int) -> None:
        """CPU: sampling rows whose results nobody reads, and whose state is the guard row's."""
        samples, host = slice(first, last), self._host
        host["sample_index"][samples] = self._numbers[samples]
        host["sample_rows"][samples] = self._sizes.guard_row
        host["sample_positions"][samples] = 0

    def upload(self) -> None:
        """H2D stream: the only writer of the device inputs."""
        self._copy(self._device_buffer, self._host_buffer)

    def upload_shapes(self) -> None:
        """H2D stream."""
        self._copy(self._device_shapes, self._host_shapes)

    def download(self, batch: Batch) -> None:
        """D2H stream: ids, and with them whatever this batch has asked for."""
        size = None if batch.logprobs or len(batch.scores) else self._ids_only
        self._copy(self._host_outputs[:size], self._device_outputs[:size])

    def upload_mask(self) -> None:
        """H2D stream."""
        self._copy(self.mask, self._host_mask)

    def host_mask(self) -> Bits:
        """CPU: where the masks of a constrained step are built."""
        mask: Bits = self._host_mask.numpy()
        return mask

    def results(self, batch: Batch) -> StepOutput:
        """CPU: a copy of what the step brought."""
        count, host = len(batch.samples), self._results
        ids: Int64s = host["sampled"][:count].copy()

        def told(names: tuple[str, ...], count: int) -> StepLogprobs:
            return StepLogprobs(*(host[name][:count].copy() for name in names))

        return StepOutput(
            batch,
            ids,
            told(LOGPROBS, count) if batch.logprobs else None,
            told(SCORES, len(batch.scores)) if len(batch.scores) else None,
        )

    def poison(self) -> None:
        """Race tests: make any later read of this idle slot show."""
        inputs = (self._host_buffer, self._device_buffer, self._host_shapes, self._device_shapes)
        for buffer in (*inputs, self._host_mask, self.mask):
            buffer.fill_(0x81)
        for buffer in (self._host_outputs, self._device_outputs):
            buffer.fill_(0xFE)

    def _fill_tokens(self, batch: Batch) -> None:
        host, count, size = self._host, len(batch.token_ids), self._sizes.block_size
        owner, position = batch.owners, batch.positions
        host["token_ids"][:count] = batch.token_ids
        host["carried_from"][:count] = np.where(
            batch.token_ids == CARRIED, batch.rows[owner], NO_TOKEN
        )
        host["positions"][:count] = position
        number = position // size
        place = (batch.block_tables[owner, number] - number).astype(np.int64)
        host["slot_mapping"][:count] = place * size + position

    def _fill_rows(self, batch: Batch, last: Int32s) -> None:
        """last: [B] index of each row's last token."""
        host, (count, width) = self._host, batch.block_tables.shape
        host["block_tables"][:count, :width] = batch.block_tables
        host["query_starts"][0] = 0
        np.add(last, 1, out=host["query_starts"][1 : count + 1])
        host["context_lens"][:count] = batch.ends

    def _fill_samples(self, batch: Batch, last: Int32s) -> None:
        host, count, samples = self._host, len(batch.samples), batch.samples
        host["sample_index"][:count] = last[samples]
        host["sample_rows"][:count] = batch.sampling_rows
        host["sample_positions"][:count] = batch.ends[samples]

    def _fill_new_rows(self, batch: Batch) -> None:
        """Parameters change when a row changes hands, and travel with the next step only."""
        ints, floats = self._host["row_ints"], self._host["row_floats"]
        ints[: len(batch.new_rows), FIRST_STOP_ID:] = NO_TOKEN
        for index, new in enumerate(batch.new_rows):
            sampling = new.sampling
            self._host["new_rows"][index] = new.row
            ints[index, TOP_K] = sampling.top_k
            ints[index, SEED] = np.uint64(sampling.seed).astype(np.int64)
            ints[index, CHOICE] = sampling.choice
            ints[index, HOLD_UNTIL] = new.hold_until
            ints[index, NUM_BIASES] = len(sampling.logit_bias)
            ints[index, FIRST_STOP_ID : FIRST_STOP_ID + len(new.stop_ids)] = new.stop_ids
            floats[index] = (
                0.0 if sampling.greedy else sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty,
            )

    def _fill_shaped_rows(self, batch: Batch) -> None:
        host, shaped = self._host, batch.shaped_rows
        for index, new in enumerate(shaped):
            biases = new.sampling.logit_bias
            host["shaped_rows"][index] = new.row
            host["bias_ids"][index, : len(biases)] = [token for token, _ in biases]
            host["biases"][index, : len(biases)] = [bias for _, bias in biases]
        pasts = [(new.row, new.prompt_ids) for new in shaped]
        pasts += [(new.row, new.output_ids) for new in shaped]
        at = 0
        for row, ids in pasts:
            host["past"][at : at + len(ids)] = ids + np.int64(row * self._sizes.vocab_size)
            at += len(ids)
