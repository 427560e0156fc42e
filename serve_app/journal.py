"""Writes down what the router has settled: in batches, in a thread, a few times a second.

What cannot be written is kept and tried again; the store books every request once. The module
knows neither Ray nor what the entries mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from router.ledger import Entry, Journal
from router.store import Store

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""What a kill may lose."""
MOST_KEPT = 1_000_000
"""Entries that wait for a store which takes nothing; the oldest are given up beyond."""


class JournalWriter:
    """Used from one event loop."""

    def __init__(self, store: Store, take: Callable[[], Journal]) -> None:
        self._store, self._take = store, take
        self._entries: list[Entry] = []
        self._refused: Counter[tuple[str, str]] = Counter()
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what there is when the call is made. Errors are logged."""
        async with self._writing:
            entries, refused = self._take()
            self._entries += entries
            self._refused.update(refused)
            if self._entries or self._refused:
                await self._write()

    async def _write(self) -> None:
        book = self._store.book
        try:
            await asyncio.to_thread(book, self._entries, self._refused, time.time())
        except Exception as error:
            logger.error("usage cannot be written, %d entries wait: %r", len(self._entries), error)
            del self._entries[:-MOST_KEPT]
        else:
            self._entries, self._refused = [], Counter()
