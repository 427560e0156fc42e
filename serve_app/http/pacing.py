"""How often a stream sends: each token at once while few streams run, several together while many
do.

A chunk costs about the same whatever is in it, and with many streams chunks take processor time
that engines on the same machine, or other streams, need. So the more streams there are, the
longer one waits between its chunks. The module does not know what chunks look like.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio

from serve_app.http.choices import Piece, joined
from serve_app.http.deadline import within

CHUNK_CPU_S = 0.0015
"""Processor time of a chunk in the ingress, in Serve's proxy and in a client on this machine."""
CPU_SHARE = 0.05
"""Share of the machine's processor time that the chunks of one ingress may take, as far as
`max_delay_s` allows."""


class Pace:
    """The pace of all streams of one process, which are counted by choice."""

    def __init__(self, max_delay_s: float, processors: int | None = None) -> None:
        """No text waits for longer than `max_delay_s` because of this. processors: by default,
        those that this process may use."""
        self.max_delay_s = max_delay_s
        self.choices = 0
        """Streamed choices that have begun and are not yet sent to the end."""
        self._per_choice_s = CHUNK_CPU_S / (CPU_SHARE * (processors or _processors()))

    @property
    def interval_s(self) -> float:
        """Least time between two chunks of one stream; 0 for a stream that is alone."""
        return min(self.max_delay_s, max(0, self.choices - 1) * self._per_choice_s)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Outgoing:
    """What one stream has to send, and when. A context manager, used by one task.

    The source is read as fast as it comes, so that a stop string or an end takes effect at once,
    whatever is held back here. Leaving the context closes the source.
    """

    def __init__(
        self,
        source: AsyncGenerator[list[Piece], None],
        pace: Pace,
        timeout_s: float | None = None,
    ) -> None:
        """timeout_s: for the source, from entering to its end."""
        self._source, self._pace, self._timeout_s = source, pace, timeout_s
        self._held: dict[int, list[Piece]] = {}
        """By choice."""
        self._begun: set[int] = set()
        self._taken_at = float("-inf")
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Outgoing:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda reader: self._due.set())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stop_timer()
        self._pace.choices -= len(self._begun)
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        if not self._reader.cancelled():
            self._reader.exception()  # seen: it was raised by `take`, or nobody asks any more

    @property
    def ended(self) -> bool:
        """The source is exhausted, without a failure, and what it gave is taken."""
        reader = self._reader
        finished = reader.done() and not reader.cancelled() and reader.exception() is None
        return finished and not self._held

    async def take(self, timeout_s: float) -> list[Piece]:
        """What is to be sent now, one piece for each choice that has any; nothing if nothing is
        due for `timeout_s`. Raises what the source raised, once all before it is taken.
        """
        with anyio.move_on_after(timeout_s):
            await self._due.wait()
        self._stop_timer()
        if self._reader.done() and not self._held:
            self._reader.result()
        pieces = [joined(held) for held in self._held.values()]
        self._held.clear()
        if not self._reader.done():
            self._due.clear()
        self._taken_at = asyncio.get_running_loop().time()
        return pieces

    async def _read(self) -> None:
        with within(self._timeout_s):
            async with aclosing(self._source) as batches:
                async for batch in batches:
                    self._hold(batch)

    def _hold(self, batch: list[Piece]) -> None:
        loop = asyncio.get_running_loop()
        known = len(self._begun)
        for piece in batch:
            self._held.setdefault(piece.choice, []).append(piece)
            self._begun.add(piece.choice)
        begins = len(self._begun) - known
        self._pace.choices += begins
        if begins or loop.time() - self._taken_at >= self._pace.interval_s:
            self._due.set()
        elif self._timer is None:
            self._timer = loop.call_later(self._pace.max_delay_s, self._due.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
