"""The choices of one request: each follows one sequence and turns its tokens into text.

Choices are merged as their tokens come. The module knows neither JSON nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

from replica.messages import TokenLogprobs
from serve_app.protocol.backend import Backend, Delta, EngineFailure, Enough, Generation
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.text.logprobs import ShownToken
from serve_app.text.sequence_text import Ending, SequenceText


class Piece(NamedTuple):
    """More text of one choice; the last piece of a choice has an ending."""

    choice: int
    text: str
    ending: Ending | None
    tokens: tuple[ShownToken, ...] = ()
    """The tokens of the text, if log probabilities were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first piece, if they were asked for."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    return Piece(
        pieces[0].choice,
        "".join(piece.text for piece in pieces),
        pieces[-1].ending,
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[0].prompt_logprobs,
    )


class Choice:
    """One sequence and its text. Counts what usage reports."""

    def __init__(
        self, index: int, generation: Generation, text: SequenceText, *, silent: bool = False
    ) -> None:
        """`silent` drops the output: it was computed for the sake of the prompt only."""
        self.index = index
        self.generation = generation
        self.completion_tokens = 0
        """Tokens up to the one that ended it, stop tokens included."""
        self.cached_tokens = 0
        self._text = text
        self._silent = silent

    async def follow(self, backend: Backend) -> AsyncGenerator[Piece, None]:
        """Pieces that join to the text: one at the first token, then each with text.

        The sequence is settled before the ending is told. Raises what the backend raises, and
        EngineFailure if the sequence ends without a reason that a client may see.
        """
        begun = False
        text_time = records.current().breakdown.during(Phase.TEXT)
        async with aclosing(backend.generate(self.generation)) as deltas:
            async for delta in deltas:
                with text_time:
                    piece = self._read(delta)
                if piece.ending is not None:
                    await self._settle(deltas)
                    yield piece
                    return
                if piece.text or piece.tokens or not begun:
                    begun = True
                    yield piece
        raise EngineFailure("the sequence ended without a finish reason")

    def _read(self, delta: Delta) -> Piece:
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if self._silent:
            ending: Ending | None = "length" if delta.finish_reason else None
            return Piece(self.index, "", ending, (), delta.prompt_logprobs)
        text, ending = self._text.read(delta.token_ids, delta.finish_reason, delta.logprobs)
        self.completion_tokens = self._text.tokens
        tokens = self._text.take_tokens()
        return Piece(self.index, text, ending, tokens, delta.prompt_logprobs)

    async def _settle(self, deltas: AsyncGenerator[Delta, None]) -> None:
        """Let the backend end the sequence: by itself, or because fewer tokens count than came."""
        if self._silent or self._text.is_cut:
            with suppress(Enough, StopAsyncIteration):
                await deltas.athrow(Enough(self.completion_tokens))
        else:
            await anext(deltas, None)


async def follow_all(
    choices: Sequence[Choice], backend: Backend
) -> AsyncGenerator[list[Piece], None]:
    """Pieces of all choices; those that wait already come together.

    Closing it, or a failure of one choice, ends all of them before it returns.
    """
    if len(choices) == 1:  # nothing to merge, so no task and no queue
        async with aclosing(choices[0].follow(backend)) as pieces:
            async for piece in pieces:
                yield [piece]
        return
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(choice, backend, queue)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            batch = [await queue.get()]
            batch += [queue.get_nowait() for _ in range(queue.qsize())]
            pieces_now = list(_raise_failures(batch))
            running -= sum(piece.ending is not None for piece in pieces_now)
            yield pieces_now
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(choice: Choice, backend: Backend, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async with aclosing(choice.follow(backend)) as pieces:
            async for piece in pieces:
                queue.put_nowait(piece)
    except Exception as error:
        queue.put_nowait(error)


def _raise_failures(batch: Iterable[Piece | Exception]) -> Iterable[Piece]:
    for item in batch:
        if isinstance(item, Exception):
            raise item
        yield item
