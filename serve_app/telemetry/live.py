"""What the live page shows, once a second: one reading for all who look, none while nobody does.

It is what `/metrics` tells, read as `fairstream-top` and the doctor do. The module knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from serve_app.telemetry import figures
from serve_app.telemetry.diagnosis import Facts, diagnose, told
from serve_app.telemetry.exposition import Source, merged
from serve_app.telemetry.readings import Readings, Scrape, gathered

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
WINDOW = 31
"""Readings that tails, tenants and the verdict are taken over."""
RECENT = 11
"""Readings that rates and the use of devices are taken over: processes tell every two seconds."""
FEWEST = 4
"""Readings before anything is shown: rates of fewer would be wrong by half."""
MAX_VIEWERS = 16
"""Of one front end."""
MAX_ENGINES = 32
MAX_TENANTS = 50
"""Those that are shown; the others are counted."""

NOTHING_YET = b": nothing yet\n\n"
"""A comment, as an event."""

Read = Callable[[], Awaitable[list[Source]]]
Start = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class TooManyViewers(Exception):
    """Nobody else may look now."""


class NoFigures(Exception):
    """Nothing could be read."""


class LiveFigures:
    """Used from one event loop."""

    def __init__(self, read: Read, start: Start, ends: Callable[[], bool] = lambda: False) -> None:
        """start: runs a coroutine that belongs to no request, under a name. ends: whether whoever
        looks has to go, since this process does."""
        self._read, self._start, self._ends = read, start, ends
        self._viewers = 0
        self._reading: asyncio.Task[None] | None = None
        self._latest = NOTHING_YET
        self._scrapes = deque[Scrape](maxlen=WINDOW)
        self._tick = asyncio.Event()

    @contextmanager
    def viewing(self) -> Iterator[AsyncGenerator[bytes, None]]:
        """For one more viewer: server-sent events, the first one at once. Raises
        TooManyViewers. Who is slow misses some."""
        if self._viewers >= MAX_VIEWERS:
            raise TooManyViewers
        self._viewers += 1
        try:
            if self._reading is None or self._reading.done():
                self._reading = self._start(self._keep_reading(), "live page")
            yield self._events()
        finally:
            self._viewers -= 1

    async def diagnosis(self, seconds: float) -> dict[str, object]:
        """What the doctor says once somebody has looked for so long; values for JSON. Raises
        TooManyViewers, and NoFigures."""
        with self.viewing():
            await asyncio.sleep(seconds)
            if len(self._scrapes) < FEWEST:
                raise NoFigures
            facts = await asyncio.to_thread(Facts.of, Readings([*self._scrapes]))
            return told(diagnose(facts), facts)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield self._latest
        while not self._ends():
            await self._tick.wait()
            yield self._latest

    async def _keep_reading(self) -> None:
        self._scrapes.clear()
        try:
            while self._viewers:
                try:
                    sources = await self._read()
                    self._latest = await asyncio.to_thread(_told, sources, self._scrapes)
                except Exception as error:
                    logger.warning("The live page has no figures: %r", error)
                    self._latest = NOTHING_YET
                self._tick.set()
                self._tick = asyncio.Event()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._latest = NOTHING_YET


def _told(sources: list[Source], scrapes: deque[Scrape]) -> bytes:
    """One more reading, as an event."""
    scrapes.append(gathered(merged(sources).values(), time.monotonic()))
    if len(scrapes) < FEWEST:
        return NOTHING_YET
    return b"data: " + msgspec.json.encode(snapshot([*scrapes])) + b"\n\n"


def snapshot(scrapes: Sequence[Scrape]) -> dict[str, object]:
    """What is shown, of two or more readings, oldest first; values for JSON."""
    window, recent = Readings(scrapes), Readings(scrapes[-RECENT:])
    engines, tenants = figures.engines(recent), figures.tenants(window)
    return {
        "seconds": window.seconds,
        "recent_s": recent.seconds,
        "verdict": diagnose(Facts.of(window)),
        "whole": figures.whole(recent, window),
        "models": figures.models(window),
        "engines": engines[:MAX_ENGINES],
        "engines_left_out": max(len(engines) - MAX_ENGINES, 0),
        "device": figures.device(recent),
        "tenants": tenants[:MAX_TENANTS],
        "tenants_left_out": max(len(tenants) - MAX_TENANTS, 0),
    }
