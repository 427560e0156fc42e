from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from router.ledger import Entry, Journal, Used
from router.messages import GpuTime, Outcome
from router.store import SqliteStore
from serve_app.usage.journal import JournalWriter


def entry(request_id: str) -> Entry:
    return Entry(request_id, "a", "m", Outcome.SUCCEEDED, Used(1, 0, 1), 5, True, ("2026",))


class Router:
    """Hands out what a test has put into it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.refused: Counter[tuple[str, str]] = Counter()
        self.gpu = {"r": GpuTime(requests=1.0)}

    async def take_journal(self) -> Journal:
        journal = Journal(self.entries, self.refused, dict(self.gpu), {})
        self.entries, self.refused = [], Counter()
        return journal


class Stuck(SqliteStore):
    """Takes nothing while it `fails`."""

    fails = True

    def book(self, *arguments: object) -> None:
        if self.fails:
            raise OSError("the disk is full")
        super().book(*arguments)


async def test_what_cannot_be_written_is_written_later_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, store = Router(), Stuck(":memory:")
    writer = JournalWriter(store, router.take_journal)
    for name in ("x", "y"):
        router.entries.append(entry(name))
        router.refused["a", "m"] += 1
        with caplog.at_level(logging.ERROR):
            await writer.flush()
    assert "2 entries wait" in caplog.text
    store.fails = False
    router.entries.append(entry("z"))
    await asyncio.gather(*(writer.flush() for _ in range(5)))
    [row] = store.usage(0, 1e12)
    assert (row.sums["succeeded"], row.sums["refused"]) == (3, 2)
    assert store.spent("a", "2026") == 15
    assert store.gpu(0, 1e12).requests == 1.0
