"""The answer to one request: its choices, followed to their end and written down.

Nothing is generated before the answer is read. The module does not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from serve_app.backend import Backend
from serve_app.choices import Choice, Piece, follow_all
from serve_app.replies import Reply, Usage, usage


@dataclass(frozen=True)
class Answer:
    """To be read once, as a whole or by events.

    Whichever way reading ends, every sequence of the request has ended before.
    """

    backend: Backend
    choices: list[Choice]
    """Prompt by prompt."""
    prompts: int
    reply: Reply

    async def whole(self) -> bytes:
        """The JSON of a plain answer; its texts are the joined pieces of the stream."""
        pieces: list[Piece] = []
        async with aclosing(follow_all(self.choices, self.backend)) as batches:
            async for batch in batches:
                pieces += batch
        return self.reply.whole(pieces, self._usage())

    async def events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events; [DONE] comes when all sequences are settled."""
        writer = self.reply.events(include_usage)
        async with aclosing(follow_all(self.choices, self.backend)) as batches:
            async for batch in batches:
                yield writer.pieces(batch)
        yield writer.closing(self._usage())

    def _usage(self) -> Usage:
        return usage(self.choices, self.prompts)
