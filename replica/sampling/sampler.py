"""From logits to token ids, on the device, inside the step.

The sampler owns what persists on the device between steps: the last token of each row and the
rows' parameters. Both are written on the compute stream only. It knows rows, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from replica.io_slot import (
    CHOICE,
    FIRST_STOP_ID,
    HOLD_UNTIL,
    MIN_P,
    NEUTRAL,
    NUM_BIASES,
    PRESENCE,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from replica.sampling.rng import uniform
from replica.sampling.shaping import Shaping, hold_back
from replica.scheduling.batch import Batch
from replica.scheduling.sequence import MAX_STOP_IDS


class Sampler:
    """Penalties and biases; stop tokens held back; masks; greedy, temperature, top-k, top-p, min-p;
    seeded. In torch's words, for CPUs; and what GPUs are tested against.

    Its state has one row more than there are: the guard row, for padding.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | None = None) -> None:
        rows, ints = max_rows + 1, FIRST_STOP_ID + MAX_STOP_IDS
        self.vocab_size = vocab_size
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ints = torch.zeros((rows, ints), dtype=torch.int64, device=device)
        self.floats = torch.tensor(NEUTRAL, device=device).repeat(rows, 1)
        self.shaping = Shaping(rows, vocab_size, device)
        self._bit = torch.arange(8, dtype=torch.uint8, device=device)

    def input_ids(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """int64 [T]: ids known to the CPU, and last tokens that only the device knows yet."""
        token_ids = inputs["token_ids"][: batch.num_tokens]
        carried_from = inputs["carried_from"][: batch.num_tokens]
        carried = self.last_token[carried_from.clamp(min=0)]
        return torch.where(carried_from >= 0, carried, token_ids)

    def admit_rows(self, batch: Batch, inputs: Mapping[str, Tensor]) -> None:
        """Take over the parameters of rows that changed hands."""
        count = len(batch.new_rows)
        if not count:
            return
        rows = inputs["new_rows"][:count]
        self.ints[rows] = inputs["row_ints"][:count]
        self.floats[rows] = inputs["row_floats"][:count]
        self.shaping.admit(batch, inputs)

    def sample(
        self, batch: Batch, inputs: Mapping[str, Tensor], logits: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Choose one token per sampling row.

        logits: float32 [S, V]. mask: uint8 [S, V/8] or None. Returns int64 [S], and keeps them as
        the rows' last tokens.
        """
        count = len(batch.samples)
        rows = inputs["sample_rows"][:count]
        positions = inputs["sample_positions"][:count]
        ints, floats = self.ints[rows], self.floats[rows]
        if batch.shaped:
            penalties = floats[:, PRESENCE:]
            logits = self.shaping.apply(logits, rows, penalties, ints[:, NUM_BIASES])
        if batch.held:
            held = (positions < ints[:, HOLD_UNTIL])[:, None]
            logits = hold_back(logits, ints[:, FIRST_STOP_ID:], held)
        if mask is not None:
            logits = logits.masked_fill(~self._allowed(mask), -torch.inf)
        token_ids = logits.argmax(dim=-1)
        if not batch.greedy:
            drawn = _draw(batch, logits, ints, floats, positions)
            token_ids = torch.where(floats[:, TEMPERATURE] == 0, token_ids, drawn)
        self.last_token[rows] = token_ids
        if batch.shaped:
            self.shaping.count(rows, token_ids)
        return token_ids

    def _allowed(self, mask: Tensor) -> Tensor:
        """bool [S, V] from packed bits."""
        bits = mask.unsqueeze(-1).bitwise_right_shift(self._bit).bitwise_and(1)
        return bits.flatten(1)[:, : self.vocab_size].bool()


def _draw(batch: Batch, logits: Tensor, ints: Tensor, floats: Tensor, positions: Tensor) -> Tensor:
    """int64 [S]: inverse transform sampling, one uniform number per row.

    Greedy rows have temperature 0 and take part at temperature 1, so that no value is NaN;
    their draw is not used.
    """
    temperature = floats[:, TEMPERATURE]
    temperature = torch.where(temperature == 0, 1.0, temperature)[:, None]
    # Subtract the maximum first: a tiny temperature then yields -inf, never inf - inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities = scaled.softmax(dim=-1)
    numbers = uniform(ints[:, SEED], ints[:, CHOICE], positions)
    top_k, top_p = ints[:, TOP_K], floats[:, TOP_P]
    # min-p (arXiv:2407.01082).
    least = floats[:, MIN_P] * probabilities.amax(-1)
    if batch.filtered:
        probabilities = keep_most_likely(probabilities, top_k, top_p, least)
    return _invert(probabilities, numbers)


def _invert(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """int64 [S]: where the cumulative probabilities of each row pass its number.

    A row of NaN, which a model that overflows may give, gets the last id there is: its answer is
    worthless, and its neighbours' are not.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, numbers[:, None] * total, right=True)
    # Rounding may lift number * total to the total: then the last possible token is meant.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(drawn, last)[:, 0].clamp(max=probabilities.shape[-1] - 1)


def keep_most_likely(probabilities: Tensor, top_k: Tensor, top_p: Tensor, least: Tensor) -> Tensor:
    """Zero all but the top_k most likely of each row, then all but the smallest set of the
    rest with at least top_p of its mass, then what lies below `least`. Ties at a threshold stay.

    probabilities: float32 [S, V]. top_k: int64 [S], 0 keeps all. top_p, least: float32 [S]. No
    sort: thresholds are probabilities, found by bisection over their bit patterns, which order like
    the non-negative floats that they stand for.
    """
    vocab_size = probabilities.shape[1]
    k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    bits = probabilities.view(torch.int32)
    threshold = _largest_threshold(bits, lambda keep: keep.sum(-1) >= k)
    kept = torch.where(bits >= threshold[:, None], probabilities, 0.0)
    mass = (top_p.to(torch.float64) * kept.sum(-1, dtype=torch.float64)).clamp(min=1e-300)

    def enough(keep: Tensor) -> Tensor:
        inside = torch.where(keep, kept, 0.0).sum(-1, dtype=torch.float64)
        return (inside >= mass) | (top_p >= 1)

    threshold = _largest_threshold(kept.view(torch.int32), enough)
    threshold = torch.where(top_p >= 1, 0, threshold)
    threshold = torch.maximum(threshold, least.view(torch.int32))
    return torch.where(kept.view(torch.int32) >= threshold[:, None], kept, 0.0)


def _largest_threshold(bits: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """int32 [S]: per row the largest b for which `enough(bits >= b)` holds; 0 always does."""
    low = bits.new_zeros(len(bits))
    for bit in range(29, -1, -1):  # probabilities are at most 1.0 = 0x3F800000
        candidate = low | (1 << bit)
        low = torch.where(enough(bits >= candidate[:, None]), candidate, low)
    return low
