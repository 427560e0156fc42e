"""Changes to the model's logits on a GPU: penalties and masks in one pass, then the few tokens
that have a bias or are held back. The reference is `replica.sampling.shaping`.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.io_slot import (
    FIRST_STOP_ID,
    FREQUENCY,
    HOLD_UNTIL,
    NUM_BIASES,
    PRESENCE,
    REPETITION,
)
from replica.messages import MAX_BIASES
from replica.sampling.shaping import IN_PROMPT, Shaping
from replica.scheduling.sequence import MAX_STOP_IDS

BLOCK = 4096


@triton.jit
def _penalised(x, count, presence, frequency, repetition, IN_PROMPT: tl.constexpr):
    scaled = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where(count > 0, scaled, x)
    in_output = count & (IN_PROMPT - 1)
    return x - frequency * in_output.to(tl.float32) - tl.where(in_output > 0, presence, 0.0)


@triton.jit
def _shape(
    logits, row_stride, out, rows, floats, floats_stride, counts, mask, mask_stride, vocab_size,
    PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, REPETITION: tl.constexpr,
    IN_PROMPT: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block of tokens)."""
    index = tl.program_id(0).to(tl.int64)
    owner = tl.load(rows + index)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab_size
    x = tl.load(logits + index * row_stride + i, inside, float("-inf"))
    if COUNTED:
        presence = tl.load(floats + owner * floats_stride + PRESENCE)
        frequency = tl.load(floats + owner * floats_stride + FREQUENCY)
        repetition = tl.load(floats + owner * floats_stride + REPETITION)
        if (presence != 0) | (frequency != 0) | (repetition != 1):
            count = tl.load(counts + owner * vocab_size + i, inside, 0)
            x = _penalised(x, count, presence, frequency, repetition, IN_PROMPT)
    if MASKED:
        bits = tl.load(mask + index * mask_stride + i // 8, inside, 0).to(tl.int32)
        x = tl.where((bits >> (i % 8)) & 1 == 1, x, float("-inf"))
    tl.store(out + index * vocab_size + i, x, inside)


@triton.jit
def _touch(
    out, rows, positions, ints, ints_stride, bias_ids, biases, vocab_size,
    HOLD_UNTIL: tl.constexpr, NUM_BIASES: tl.constexpr, FIRST_STOP_ID: tl.constexpr,
    BIASES: tl.constexpr, STOPS: tl.constexpr, BIAS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row): add biases, then hold stop tokens back."""
    index = tl.program_id(0).to(tl.int64)
    owner = tl.load(rows + index)
    row, numbers = out + index * vocab_size, ints + owner * ints_stride
    b = tl.arange(0, BIAS_WIDTH)
    used = b < tl.load(numbers + NUM_BIASES)
    token = tl.load(bias_ids + owner * BIASES + b, used, 0)
    tl.atomic_add(row + token, tl.load(biases + owner * BIASES + b, used, 0.0), used)
    tl.debug_barrier()  # a stop token may have a bias: minus infinity is the last word
    stop = tl.load(numbers + FIRST_STOP_ID + tl.arange(0, STOPS))
    held = (stop >= 0) & (tl.load(positions + index) < tl.load(numbers + HOLD_UNTIL))
    tl.store(row + stop, tl.full([STOPS], float("-inf"), tl.float32), held)


def shape(
    logits: Tensor, rows: Tensor, positions: Tensor, ints: Tensor, floats: Tensor,
    shaping: Shaping, mask: Tensor | None, *, counted: bool,
) -> Tensor:  # fmt: skip
    """A new float32 [S, V].

    rows, positions: int64 [S]. ints: int64 [R, ...], floats: float32 [R, ...], parameters with the
    columns of `replica.io_slot`. mask: uint8 [S, V/8], bits of the tokens that are allowed.
    counted: some row has penalties.
    """
    count, vocab_size = logits.shape
    out = torch.empty_like(logits)
    _shape[(count, triton.cdiv(vocab_size, BLOCK))](
        logits, logits.stride(0), out, rows, floats, floats.stride(0), shaping.counts,
        logits if mask is None else mask, 0 if mask is None else mask.stride(0), vocab_size,
        PRESENCE=PRESENCE, FREQUENCY=FREQUENCY, REPETITION=REPETITION, IN_PROMPT=IN_PROMPT,
        COUNTED=counted, MASKED=mask is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _touch[(count,)](
        out, rows, positions, ints, ints.stride(0), shaping.bias_ids, shaping.biases, vocab_size,
        HOLD_UNTIL=HOLD_UNTIL, NUM_BIASES=NUM_BIASES, FIRST_STOP_ID=FIRST_STOP_ID,
        BIASES=MAX_BIASES, STOPS=MAX_STOP_IDS,
        BIAS_WIDTH=triton.next_power_of_2(MAX_BIASES), num_warps=4,
    )  # fmt: skip
    return out
