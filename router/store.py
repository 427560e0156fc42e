"""Where usage is kept for good: the journal behind one small interface, and SQLite for it.

The journal is the truth about money: what a request cost is written once, under its id, in one
transaction with the totals that it changes. So a request that is booked again, by a router that
was started anew or by an ingress that was not heard, changes nothing. Beside it is kept what runs,
in a form that only those know who wrote it. Knows neither HTTP nor Ray.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Protocol

from router.ledger import Entry, Journal
from router.messages import GpuTime, Outcome

logger = logging.getLogger(__name__)

HOUR_S = 3600
KEPT_S = 900
"""How long ids are remembered: an ending is repeated until it is acknowledged, several times a
second, so only by an ingress that reached nobody for so long a known one could come again ..."""
MOST_KEPT = 200_000
"""... and of how many requests, which is 30 MB of a file."""
FORGOTTEN = 10_000
"""Ids that one transaction deletes at most: a file of an earlier version may have millions."""

MICROS = 1_000_000
"""Seconds are kept as whole microseconds, as money is."""


def gpu_micros(outcome: Outcome) -> str:
    """The sum of GPU microseconds of requests that ended so."""
    return f"gpu_us_{outcome.value}"


SUMS = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "micro_dollars",
    "slo_met",
    *(outcome.value for outcome in Outcome),
    "refused",
    *(gpu_micros(outcome) for outcome in Outcome),
)
"""What is added up, in the order of the columns. New ones come last: older files lack them."""
GPU = tuple(field.name for field in fields(GpuTime))


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one tenant used of one model in one hour."""

    hour: int
    """Unix time of its begin."""
    tenant: str
    model: str
    sums: Mapping[str, int]
    """By the names in `SUMS`."""


def sums_of(entry: Entry) -> dict[str, int]:
    """What a request adds to which of the `SUMS`."""
    return {
        "prompt_tokens": entry.used.prompt,
        "cached_tokens": entry.used.cached,
        "output_tokens": entry.used.output,
        "micro_dollars": entry.micro_dollars,
        "slo_met": int(entry.slo_met),
        entry.outcome.value: 1,
        gpu_micros(entry.outcome): round(entry.gpu_s * MICROS),
    }


def gpu_times(gpu: Mapping[str, GpuTime]) -> dict[str, list[int]]:
    """Microseconds by replica, in the order of `GPU`."""
    return {
        replica: [round(seconds * MICROS) for seconds in astuple(time)]
        for replica, time in gpu.items()
    }


class Store(Protocol):
    """Durable usage. Each call is one transaction, and may be made from any one thread."""

    shared: bool
    """Other routers write into it, too."""

    def book(self, journal: Journal, now: float) -> None:
        """Add what has happened, at Unix time `now`. Entries whose ids are known already change
        nothing; neither do times of replicas that are older than others. What runs is replaced."""

    def recent(self) -> set[str]:
        """Ids of the requests that were booked last: at least those of the last `KEPT_S`, or
        `MOST_KEPT`."""

    def lost(self, before: float) -> dict[str, str]:
        """By ingress, what ran there as it was told last, and not since the Unix time `before`."""

    def spent(self, tenant: str, window: str) -> int:
        """Micro-dollars in one window of a tenant's budget."""

    def spending(self, accounts: Sequence[tuple[str, str]]) -> list[int]:
        """The same of many, each a tenant and a window."""

    def usage(self, start: float, end: float, tenant: str | None = None) -> list[UsageRow]:
        """By hour, tenant and model: hours that begin in [start, end)."""

    def gpu(self, start: float, end: float) -> GpuTime:
        """What became of the time of all GPUs in the same hours."""

    def close(self) -> None: ...


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS booked (
    request_id TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS booked_at ON booked (at);
CREATE TABLE IF NOT EXISTS spent (
    tenant TEXT, "window" TEXT, micro_dollars INTEGER NOT NULL,
    PRIMARY KEY (tenant, "window")) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER, tenant TEXT, model TEXT,
    {", ".join(f"{name} INTEGER NOT NULL" for name in SUMS)},
    PRIMARY KEY (hour, tenant, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gpu (
    replica TEXT, hour INTEGER, {", ".join(f"{name} INTEGER NOT NULL" for name in GPU)},
    PRIMARY KEY (replica, hour)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS running (
    ingress TEXT PRIMARY KEY, told_at REAL NOT NULL, requests TEXT NOT NULL);
"""
_ADD_USAGE = f"""
INSERT INTO usage VALUES (?, ?, ?, {", ".join("?" * len(SUMS))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)}
"""
_ADD_SPENT = """
INSERT INTO spent VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET micro_dollars = micro_dollars + excluded.micro_dollars
"""
_SET_RUNNING = """
INSERT INTO running VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET told_at = excluded.told_at, requests = excluded.requests
"""
# The oldest first, and only as many as are too old or too many.
_FORGET = """
DELETE FROM booked WHERE request_id IN (
    SELECT request_id FROM booked
    WHERE at < max(?, ifnull((SELECT at FROM booked ORDER BY at DESC LIMIT 1 OFFSET ?), 0))
    ORDER BY at LIMIT ?)
"""
# Microseconds since a replica started, as it told last in each hour: what is told again, or late,
# changes nothing.
_SET_GPU = f"""
INSERT INTO gpu VALUES (?, ?, {", ".join("?" * len(GPU))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = max({name}, excluded.{name})" for name in GPU)}
"""
_GPU_BEFORE = f"""
SELECT {", ".join(f"ifnull(sum({name}), 0)" for name in GPU)} FROM (
    SELECT {", ".join(f"max({name}) AS {name}" for name in GPU)}
    FROM gpu WHERE hour < ? GROUP BY replica)
"""


class SqliteStore:
    """A `Store` in one file. A transaction that was committed survives the death of the process,
    and of the machine but for the last moments (WAL, synchronous=NORMAL).
    """

    shared = False

    def __init__(self, path: str | PathLike[str]) -> None:
        """Raises OSError or sqlite3.Error where there can be no such file."""
        if str(path) != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Calls come from one thread at a time, but not always from the same one.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
        # What is forgotten gives its room back. It must be said before there is a table.
        self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._add_columns()
        self._compact()

    def book(self, journal: Journal, now: float) -> None:
        """See `Store`."""
        hour = int(now) // HOUR_S * HOUR_S
        self._db.execute("BEGIN IMMEDIATE")
        try:
            fresh = [entry for entry in journal.entries if self._is_new(entry, now)]
            self._db.executemany(_ADD_SPENT, _spending(fresh))
            self._db.executemany(_ADD_USAGE, _totals(hour, fresh, journal.refused))
            self._db.executemany(
                _SET_GPU,
                [(name, hour, *micros) for name, micros in gpu_times(journal.gpu).items()],
            )
            self._tell_running(journal.running, now)
            self._db.execute(_FORGET, (int(now - KEPT_S), MOST_KEPT, FORGOTTEN))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        if self._mostly_free():
            # A script runs to its end; `execute` would stop after the first page.
            self._db.executescript("PRAGMA incremental_vacuum(1000)")

    def recent(self) -> set[str]:
        """See `Store`."""
        found = self._db.execute(
            "SELECT request_id FROM booked ORDER BY at DESC LIMIT ?", (MOST_KEPT,)
        )
        return {request_id for (request_id,) in found}

    def lost(self, before: float) -> dict[str, str]:
        """See `Store`."""
        return dict(
            self._db.execute("SELECT ingress, requests FROM running WHERE told_at < ?", (before,))
        )

    def spent(self, tenant: str, window: str) -> int:
        """See `Store`."""
        query = 'SELECT micro_dollars FROM spent WHERE tenant = ? AND "window" = ?'
        row = self._db.execute(query, (tenant, window)).fetchone()
        return int(row[0]) if row is not None else 0

    def spending(self, accounts: Sequence[tuple[str, str]]) -> list[int]:
        """See `Store`."""
        return [self.spent(*account) for account in accounts]

    def usage(self, start: float, end: float, tenant: str | None = None) -> list[UsageRow]:
        """See `Store`."""
        rows = self._db.execute(
            "SELECT * FROM usage WHERE hour >= ? AND hour < ? AND tenant = ifnull(?, tenant)",
            (start, end, tenant),
        )
        return [
            UsageRow(hour, name, model, dict(zip(SUMS, sums, strict=True)))
            for hour, name, model, *sums in rows
        ]

    def gpu(self, start: float, end: float) -> GpuTime:
        """See `Store`."""
        before, until = (self._db.execute(_GPU_BEFORE, (at,)).fetchone() for at in (start, end))
        return GpuTime(*((b - a) / MICROS for a, b in zip(before, until, strict=True)))

    def close(self) -> None:
        self._db.close()

    def _add_columns(self) -> None:
        """Sums that a file of an earlier version lacks."""
        known = {column for _, column, *_ in self._db.execute("PRAGMA table_info(usage)")}
        for name in SUMS:
            if name not in known:
                self._db.execute(f"ALTER TABLE usage ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")

    def _compact(self) -> None:
        """Of a file of an earlier version, which gives nothing back by itself, copy what is left
        of it, if that is less than half."""
        [mode] = self._db.execute("PRAGMA auto_vacuum").fetchone()
        if not mode and self._mostly_free():
            try:
                self._db.execute("VACUUM")
            except sqlite3.OperationalError as error:  # A full disk has no room for the copy.
                logger.warning("the usage file stays as large as it is: %s", error)

    def _mostly_free(self) -> bool:
        """Half of the file is free, and worth the work."""
        [free] = self._db.execute("PRAGMA freelist_count").fetchone()
        [pages] = self._db.execute("PRAGMA page_count").fetchone()
        return bool(free > max(pages // 2, 256))

    def _tell_running(self, running: Mapping[str, str], now: float) -> None:
        ended = [(name,) for name, requests in running.items() if not requests]
        self._db.executemany("DELETE FROM running WHERE ingress = ?", ended)
        told = [(name, now, requests) for name, requests in running.items() if requests]
        self._db.executemany(_SET_RUNNING, told)

    def _is_new(self, entry: Entry, now: float) -> bool:
        added = self._db.execute(
            "INSERT OR IGNORE INTO booked VALUES (?, ?)", (entry.request_id, int(now))
        )
        return added.rowcount == 1


def _spending(entries: Iterable[Entry]) -> list[tuple[str, str, int]]:
    return [
        (entry.tenant, name, entry.micro_dollars) for entry in entries for name in entry.windows
    ]


def _totals(
    hour: int, entries: Iterable[Entry], refused: Mapping[tuple[str, str], int]
) -> list[tuple[object, ...]]:
    """One row per tenant and model."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for entry in entries:
        sums = totals.setdefault((entry.tenant, entry.model), dict.fromkeys(SUMS, 0))
        for name, amount in sums_of(entry).items():
            sums[name] += amount
    for key, count in refused.items():
        totals.setdefault(key, dict.fromkeys(SUMS, 0))["refused"] += count
    return [(hour, *key, *sums.values()) for key, sums in totals.items()]
