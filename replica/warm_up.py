"""Runs an engine before it is offered to anybody, so that no client pays for what is slow once.

Every kind of step is taken: each way of sampling by itself, decode batches and prompt chunks in
every shape that is launched differently. Then steps are timed, from which the cost of prompt
chunks is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from replica.engine import Engine
from replica.messages import Command, Sampling, StepReport, Submit
from replica.scheduling.block_manager import BlockManager
from replica.scheduling.cost_fit import CostFit, step_work
from replica.scheduling.sequence import TokenIds

FEW = 2
"""Tokens of a chunk so short that its attention is split by the length of its context alone."""
FIRST_SPLIT = 1024
"""Context from which such a chunk is split into two parts. Each doubling doubles the parts
(`replica.model.attention.triton_paged`)."""
SHORTEST = 4
"""Tokens of the shortest timed chunk; each further one is twice as long."""
BRIEF_MS, LONG_MS = 50.0, 200.0
"""A timed step shorter than the first is repeated; one longer than the second is the last at its
depth."""
GREEDY = Sampling(max_tokens=1, temperature=0.0)
KINDS = (
    Sampling(max_tokens=3, temperature=0.0),
    Sampling(max_tokens=3, top_k=5, top_p=0.9, min_tokens=2),
    Sampling(max_tokens=3, min_p=0.1),
    Sampling(max_tokens=3, allowed_token_ids=(0, 1, 2)),
    Sampling(max_tokens=3, presence_penalty=0.5, logit_bias=((0, 1.0),)),
    Sampling(max_tokens=3, frequency_penalty=0.5, allowed_token_ids=(0, 1, 2)),
    Sampling(max_tokens=3, logprobs=1),
    Sampling(max_tokens=3, prompt_logprobs=1),
)


class Replay:
    """A channel that plays a list of commands and drops the reports."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def receive(self, timeout_s: float) -> Iterable[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, report: StepReport) -> None:
        pass


class PrimedBlocks(BlockManager):
    """Takes every prompt for cached but for its last `fresh` tokens, so that steps at any depth
    can be tried without computing what lies before. What those blocks hold does not matter."""

    fresh = 0

    def match(self, salt: str, token_ids: TokenIds) -> tuple[list[int], list[bytes]]:
        """As of every block manager, but that these blocks are taken at once."""
        return self.allocate(max(0, len(token_ids) - self.fresh) // self.block_size), []

    def share(self, blocks: list[int]) -> None:
        """`match` has done it."""


class WarmUp:
    """Runs every kind of step once. The engine is discarded afterwards."""

    def __init__(self, engine: Engine, channel: Replay) -> None:
        """engine: synchronous, reads from `channel`."""
        config = engine.config
        self._engine, self._channel, self._config = engine, channel, config
        self._blocks = PrimedBlocks(config.num_blocks, config.block_size, prefix_cache=False)
        engine.scheduler.blocks = self._blocks
        self._requests = 0

    def run(self) -> CostFit:
        """Returns what steps cost."""
        self._sample_in_every_way()
        self._launch_every_shape()
        return self._time_steps()

    def _sample_in_every_way(self) -> None:
        """Each alone, for kernels are compiled for combinations; then all together."""
        rows, longest = self._config.max_rows, self._engine.max_model_len
        kinds = KINDS if longest > 8 else ()
        for kind in kinds:
            self._play(4, kind)
        self._play(4, *(KINDS[i % len(KINDS)] for i in range(rows if kinds else 0)))

    def _launch_every_shape(self) -> None:
        """Whatever a launch depends on changes at most once while the batch doubles, and likewise
        while the context of a short chunk doubles."""
        for rows in {*_doubling(1, self._config.max_rows), self._config.max_rows}:
            self._play(1, *[GREEDY] * rows)
        for depth in _doubling(FIRST_SPLIT, self._engine.max_model_len - FEW):
            self._chunk(depth, FEW)

    def _time_steps(self) -> CostFit:
        """Chunks of several sizes behind contexts of several lengths."""
        timed = []
        for depth in self._depths():
            for count in _doubling(
                SHORTEST, min(self._config.max_step_tokens, self._room_behind(depth))
            ):
                ms = self._chunk(depth, count)
                if ms < BRIEF_MS:
                    ms = min(ms, self._chunk(depth, count))
                timed.append((step_work(np.array([depth]), np.array([count])), ms))
                if ms > LONG_MS:
                    break
        return CostFit(timed)

    def _depths(self) -> list[int]:
        longest, size = self._engine.max_model_len, self._config.block_size
        return sorted({part * longest // 16 // size * size for part in (0, 2, 8, 15)})

    def _room_behind(self, depth: int) -> int:
        """Tokens that a prompt can have there, one place left for the answer."""
        return self._engine.max_model_len - depth - 1

    def _chunk(self, depth: int, count: int) -> float:
        """Compute `count` tokens in one step behind `depth` others. Returns busy milliseconds."""
        before = self._engine.idle.busy_ns
        self._play(depth + count, GREEDY, fresh=count)
        return (self._engine.idle.busy_ns - before) / 1e6

    def _play(self, length: int, *kinds: Sampling, fresh: int | None = None) -> None:
        """Prompts of that length, together, to their ends."""
        self._blocks.fresh = length if fresh is None else fresh
        ids = (1,) * length
        for sampling in kinds:
            self._requests += 1
            name = f"warm-up {self._requests}"
            self._channel.commands.append(
                Submit(request_id=name, prompt_ids=ids, sampling=sampling)
            )
        while self._channel.commands or self._engine.busy:
            self._engine.advance()


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
