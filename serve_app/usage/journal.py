"""Writes down what the router has settled: in batches, in a thread, a few times a second.

What cannot be written is kept and tried again; the store books every request once. The module
knows neither Ray nor what the entries mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from router.ledger import Journal
from router.store import Store

logger = logging.getLogger(__name__)

FLUSH_S = 0.25
"""What a kill may lose. Ingresses tell as often, so whatever dies at once loses half a second."""
MOST_KEPT = 1_000_000
"""Entries that wait for a store which takes nothing; the oldest are given up beyond."""


async def _nothing_more() -> None:
    """The default of `JournalWriter`."""


class JournalWriter:
    """Used from one event loop. `written` is called while all that was taken is written down, and
    nothing is written meanwhile."""

    def __init__(
        self,
        store: Store,
        take: Callable[[], Awaitable[Journal]],
        written: Callable[[], Awaitable[None]] = _nothing_more,
    ) -> None:
        self._store, self._take, self._written = store, take, written
        self._unwritten = _nothing()
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what there is when the call is made. Errors are logged."""
        async with self._writing:
            taken, kept = await self._take(), self._unwritten
            kept.entries.extend(taken.entries)
            kept.refused.update(taken.refused)
            kept.gpu.update(taken.gpu)
            kept.running.update(taken.running)
            await self._write(kept)

    async def _write(self, kept: Journal) -> None:
        try:
            if any(kept):
                await asyncio.to_thread(self._store.book, kept, time.time())
            await self._written()
        except Exception as error:
            logger.error("usage cannot be written, %d entries wait: %r", len(kept.entries), error)
            del kept.entries[:-MOST_KEPT]
        else:
            self._unwritten = _nothing()


def _nothing() -> Journal:
    return Journal([], Counter(), {}, {})
