"""The answer to one request: its choices, followed to their end and written down.

Nothing is generated before the answer is read. The module does not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from serve_app.http.choices import Choice, Piece, follow_all
from serve_app.http.pacing import Outgoing, Pace
from serve_app.http.replies import KEEP_ALIVE, Reply, Usage, usage
from serve_app.protocol.backend import Backend
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.throttling.fair_work import Run

INLINE_TOLD = 200
"""Tokens whose log probabilities are written at once: with all alternatives it takes 10 ms."""
KEEP_ALIVE_S = 10.0
"""A stream that has nothing to tell for this long sends a comment: proxies give silent ones up."""


@dataclass(frozen=True)
class Answer:
    """One answer. Read it once: as a whole, or by events.

    Whichever way reading ends, every sequence of the request has ended before.
    """

    backend: Backend
    choices: list[Choice]
    """Prompt by prompt."""
    prompts: int
    keep: int
    """Choices of each prompt that are shown."""
    reply: Reply
    run: Run
    """Does what would hold up the event loop."""

    async def whole(self) -> bytes:
        """The JSON of a plain answer; its texts are the joined pieces of the stream."""
        pieces: list[Piece] = []
        async with aclosing(follow_all(self.choices, self.backend)) as batches:
            async for batch in batches:
                pieces += batch
        pieces, kept = self._best(pieces)
        prompts = [choice.generation.prompt_ids for choice in kept]
        write = partial(self.reply.whole, pieces, prompts, self._usage())
        return await self._written(pieces, write)

    async def _written(self, pieces: Sequence[Piece], write: Callable[[], bytes]) -> bytes:
        told = sum(len(piece.tokens) + len(piece.prompt_logprobs) for piece in pieces)
        with records.current().breakdown.during(Phase.TEXT):
            return write() if told <= INLINE_TOLD else await self.run(write)

    def _best(self, pieces: list[Piece]) -> tuple[list[Piece], list[Choice]]:
        """The pieces and choices that are shown: all, or the likeliest `keep` of each prompt."""
        per_prompt = len(self.choices) // self.prompts
        if self.keep == per_prompt:
            return pieces, self.choices
        kept = best(pieces, self.prompts, per_prompt, self.keep)
        places = {index: place for place, index in enumerate(kept)}
        shown = [p._replace(choice=places[p.choice]) for p in pieces if p.choice in places]
        return shown, [self.choices[index] for index in kept]

    async def events(
        self, include_usage: bool, pace: Pace, timeout_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one or more at a time, within `timeout_s` if that is given; the last
        ones, with [DONE], come when all sequences are settled.
        """
        writer = self.reply.events(include_usage)
        async with Outgoing(follow_all(self.choices, self.backend), pace, timeout_s) as outgoing:
            while True:
                pieces = await outgoing.take(KEEP_ALIVE_S)
                events = await self._written(pieces, partial(writer.pieces, pieces))
                if outgoing.ended:
                    break
                if not pieces:
                    yield KEEP_ALIVE
                elif events:
                    yield events
        yield events + writer.closing(self._usage())

    def _usage(self) -> Usage:
        told = records.current().told_usage = usage(self.choices, self.prompts)
        return told


def best(pieces: Sequence[Piece], prompts: int, per_prompt: int, keep: int) -> list[int]:
    """Prompt by prompt, the choices whose tokens were likeliest on average, best first."""
    logprobs: list[list[float]] = [[] for _ in range(prompts * per_prompt)]
    for piece in pieces:
        told = (token.logprobs for token in piece.tokens)
        logprobs[piece.choice] += [entry.logprob for entry in told if entry is not None]
    mean = [sum(values) / max(1, len(values)) for values in logprobs]
    kept: list[int] = []
    for first in range(0, len(mean), per_prompt):
        group = range(first, first + per_prompt)
        kept += sorted(group, key=lambda index: -mean[index])[:keep]
    return kept
