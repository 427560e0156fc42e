"""Graphs without a GPU: a recording is the captured closure, with every host number baked in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replica.device.stream import Work
from replica.scheduling.batch import Batch


class Closure:
    """Replays the work of the capture: the batch that it was captured with, not today's."""

    capture_ms = instantiate_ms = 1.0
    eager_ms, replay_ms = 3.0, 1.0
    memory_bytes = 0

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


def record(work: Work) -> Closure:
    work()
    return Closure(work)


class TokenRunner:
    """A model whose next token depends on its last token and position, as found on the device."""

    def __init__(self, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.forwards = 0

    def following(self, token: int, position: int) -> int:
        return (5 * token + 3 * position + 1) % self.vocab_size

    def expected(self, prompt: tuple[int, ...], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(self.following(ids[-1], len(ids) - 1))
        return ids[len(prompt) :]

    def forward(
        self, batch: Batch, input_ids: Tensor, inputs: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        self.forwards += 1
        positions = inputs["positions"][: batch.num_tokens]
        sampled = inputs["sample_index"][: len(batch.samples)]
        ids = (5 * input_ids + 3 * positions + 1) % self.vocab_size
        logits.copy_(torch.nn.functional.one_hot(ids[sampled], self.vocab_size) * 9)
