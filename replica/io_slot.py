"""The buffers through which one step in two exchanges data with the device.

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
import numpy.typing as npt
import torch
from torch import Tensor

from replica.batch import Batch
from replica.rows import Rows
from replica.sequence import MAX_STOP_IDS, Bits

Layout: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

TOP_K, SEED, CHOICE, HOLD_UNTIL, FIRST_STOP_ID = range(5)
"""Columns of `row_ints`; stop ids follow to the end."""
TEMPERATURE, TOP_P = range(2)
"""Columns of `row_floats`."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the buffers must hold at most."""

    max_rows: int
    max_step_tokens: int
    table_width: int
    vocab_size: int


def input_layout(sizes: Sizes) -> Layout:
    """T = max_step_tokens, R = max_rows. Valid prefixes are as long as the batch says."""
    tokens, rows = (sizes.max_step_tokens,), (sizes.max_rows,)
    return {
        "token_ids": (torch.int64, tokens),
        "carried_from": (torch.int64, tokens),  # row whose last token this is, or -1
        "positions": (torch.int64, tokens),
        "slot_mapping": (torch.int64, tokens),  # where each token's K and V go in the pool
        "sample_index": (torch.int64, rows),  # which tokens' logits are sampled from
        "sample_rows": (torch.int64, rows),
        "sample_positions": (torch.int64, rows),  # of the tokens to be sampled
        "new_rows": (torch.int64, rows),
        "row_ints": (torch.int64, (sizes.max_rows, FIRST_STOP_ID + MAX_STOP_IDS)),
        "row_floats": (torch.float32, (sizes.max_rows, 2)),
        "block_tables": (torch.int32, (sizes.max_rows, sizes.table_width)),
    }


def packed(layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    """One uint8 buffer and a view of it per field."""
    offsets: dict[str, tuple[int, int]] = {}
    size = 0
    for name, (dtype, shape) in layout.items():
        length = dtype.itemsize * math.prod(shape)
        offsets[name] = (size, length)
        size += -(-length // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.zeros(size, dtype=torch.uint8)
    views = {
        name: buffer[start : start + length].view(layout[name][0]).view(layout[name][1])
        for name, (start, length) in offsets.items()
    }
    return buffer, views


class IOSlot:
    """One of the two buffer sets. `device` views are what the forward pass may read."""

    def __init__(self, sizes: Sizes) -> None:
        layout = input_layout(sizes)
        self._host_buffer, host = packed(layout)
        self._device_buffer, self.device = packed(layout)
        self._host = {name: view.numpy() for name, view in host.items()}
        self.sampled = torch.zeros(sizes.max_rows, dtype=torch.int64)
        """[R] ids sampled by the step, on the device: static, since D2H still reads it while
        the other slot's step computes."""
        self._host_sampled = torch.zeros(sizes.max_rows, dtype=torch.int64)
        mask_shape = (sizes.max_rows, -(-sizes.vocab_size // 8))
        self._host_mask = torch.zeros(mask_shape, dtype=torch.uint8)
        self.mask = torch.zeros(mask_shape, dtype=torch.uint8)
        """[R, V/8] allowed tokens of each sampling row, bits in little order."""
        self.logits: Tensor | None = None
        """Handed from forward to sampling, both on the compute stream."""

    def fill(self, batch: Batch, rows: Rows) -> None:
        """CPU: lay the step out in the host buffer."""
        self._fill_tokens(batch, rows)
        self._fill_samples(batch)
        self._fill_new_rows(batch, rows)

    def upload(self) -> None:
        """H2D stream: the only writer of the device inputs."""
        self._device_buffer.copy_(self._host_buffer, non_blocking=True)

    def download(self) -> None:
        """D2H stream."""
        self._host_sampled.copy_(self.sampled, non_blocking=True)

    def upload_mask(self) -> None:
        """H2D stream."""
        self.mask.copy_(self._host_mask, non_blocking=True)

    def host_mask(self) -> Bits:
        """CPU: where the masks of a constrained step are built."""
        mask: Bits = self._host_mask.numpy()
        return mask

    def results(self, count: int) -> npt.NDArray[np.int64]:
        """CPU: a copy of the first `count` sampled ids."""
        ids: npt.NDArray[np.int64] = self._host_sampled.numpy()[:count].copy()
        return ids

    def poison(self) -> None:
        """Race tests: make any later read of this idle slot show."""
        for buffer in (self._host_buffer, self._device_buffer, self._host_mask, self.mask):
            buffer.fill_(0x81)
        self.sampled.fill_(-(2**40))
        self._host_sampled.fill_(-(2**40))

    def _fill_tokens(self, batch: Batch, rows: Rows) -> None:
        lengths = batch.lengths
        count = int(lengths.sum())
        row = np.repeat(batch.rows, lengths)
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        position = np.arange(count, dtype=np.int32) - first + np.repeat(batch.starts, lengths)
        size = rows.block_size
        host = self._host
        host["token_ids"][:count] = rows.tokens[row, position]
        host["carried_from"][:count] = np.where(position >= rows.known[row], row, -1)
        host["positions"][:count] = position
        blocks = rows.block_table[row, position // size].astype(np.int64)
        host["slot_mapping"][:count] = blocks * size + position % size
        width = -(-int((batch.starts + lengths).max()) // size)
        host["block_tables"][: len(lengths), :width] = rows.block_table[batch.rows, :width]

    def _fill_samples(self, batch: Batch) -> None:
        count = len(batch.samples)
        ends = batch.starts + batch.lengths
        self._host["sample_index"][:count] = (np.cumsum(batch.lengths) - 1)[batch.samples]
        self._host["sample_rows"][:count] = batch.rows[batch.samples]
        self._host["sample_positions"][:count] = ends[batch.samples]

    def _fill_new_rows(self, batch: Batch, rows: Rows) -> None:
        """Parameters change when a row changes hands, and travel with the next step only."""
        count = len(batch.new_rows)
        self._host["new_rows"][:count] = batch.new_rows
        ints, floats = self._host["row_ints"], self._host["row_floats"]
        ints[:count, FIRST_STOP_ID:] = rows.stop_ids[batch.new_rows]
        for index, row in enumerate(batch.new_rows.tolist()):
            sampling = rows.sequence(row).sampling
            ints[index, TOP_K] = sampling.top_k
            ints[index, SEED] = np.uint64(sampling.seed).astype(np.int64)
            ints[index, CHOICE] = sampling.choice
            ints[index, HOLD_UNTIL] = rows.hold_until[row]
            floats[index] = (0.0 if rows.greedy[row] else sampling.temperature, sampling.top_p)
