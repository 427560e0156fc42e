"""Changes to the model's logits: penalties, biases, stop tokens held back.

What a sequence holds already is counted on the device, since the newest token is known nowhere
else. Counts and biases persist between steps and are written on the compute stream only. The
module knows rows and tokens, not requests; neutral rows come out as they went in, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replica.messages import MAX_BIASES
from replica.scheduling.batch import Batch

IN_PROMPT = 1 << 24
"""Flag of a count: the token is in the prompt. The bits below count it in the output."""


class Shaping:
    """The state of R rows: int32 [R, V] counts, and MAX_BIASES biases each.

    A row's state is good while it has penalties or biases: rows without are not kept up to date.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device | None) -> None:
        self._vocab_size = vocab_size
        self.counts = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros((rows, MAX_BIASES), dtype=torch.int64, device=device)
        self.biases = torch.zeros((rows, MAX_BIASES), dtype=torch.float32, device=device)
        self._bias_places = torch.arange(MAX_BIASES, device=device)

    def admit(self, batch: Batch, inputs: Mapping[str, Tensor]) -> None:
        """Take over rows that changed hands: biases, and counts from the tokens so far."""
        count = len(batch.shaped_rows)
        if not count:
            return
        rows = inputs["shaped_rows"][:count]
        self.bias_ids[rows] = inputs["bias_ids"][:count]
        self.biases[rows] = inputs["biases"][:count]
        self.counts.index_fill_(0, rows, 0)
        prompt = sum(len(new.prompt_ids) for new in batch.shaped_rows)
        output = sum(len(new.output_ids) for new in batch.shaped_rows)
        places, counts = inputs["past"], self.counts.view(-1)
        counts.index_fill_(0, places[:prompt], IN_PROMPT)
        of_output = places[prompt : prompt + output]
        counts.index_add_(0, of_output, torch.ones_like(of_output, dtype=torch.int32))

    def apply(self, logits: Tensor, rows: Tensor, penalties: Tensor, num_biases: Tensor) -> Tensor:
        """A new float32 [S, V]. penalties: [S, 3] presence, frequency, repetition."""
        shaped = penalise(logits, self.counts[rows], penalties)
        used = self._bias_places < num_biases[:, None]
        # A bias that is not used adds nothing to the logit of token 0.
        ids = torch.where(used, self.bias_ids[rows], 0)
        return shaped.scatter_add_(1, ids, torch.where(used, self.biases[rows], 0.0))

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """Each row has one token more."""
        places = rows * self._vocab_size + token_ids
        one = torch.ones_like(places, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, places, one)


def penalise(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """A new float32 [S, V].

    counts: int32 [S, V]. penalties: [S, 3] presence, frequency (OpenAI's documents define them)
    and repetition (arXiv:1909.05858, section 4.1).
    """
    presence, frequency, repetition = penalties[:, :, None].unbind(1)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(counts > 0, scaled, logits)
    in_output = counts & (IN_PROMPT - 1)
    return penalised - frequency * in_output - presence * (in_output > 0)


def hold_back(logits: Tensor, ids: Tensor, held: Tensor) -> Tensor:
    """A new [S, V] with -inf at the ids that are held. ids, held: [S, N], ids below 0 unused."""
    value = torch.where(held & (ids >= 0), -torch.inf, torch.inf)
    return logits.scatter_reduce(1, ids.clamp(min=0), value, "amin")
