from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import store as stores
from router.ledger import Entry, Journal, Used
from router.messages import GpuTime, Outcome
from router.store import HOUR_S, KEPT_S, SUMS, SqliteStore, Store

NOW = 100 * HOUR_S + 7.0
WINDOWS = ("1970-01-05", "1970-01")


def entry(request_id: str = "x", tenant: str = "a", micro: int = 30, **fields: object) -> Entry:
    values = {
        "model": "m",
        "outcome": Outcome.SUCCEEDED,
        "used": Used(10, 4, 5),
        "slo_met": True,
        "windows": WINDOWS,
        "gpu_s": 2.0,
    } | fields
    return Entry(request_id=request_id, tenant=tenant, micro_dollars=micro, **values)


def journal(
    *entries: Entry,
    refused: dict[tuple[str, str], int] | None = None,
    gpu: dict[str, GpuTime] | None = None,
    running: dict[str, str] | None = None,
) -> Journal:
    return Journal(list(entries), Counter(refused or {}), gpu or {}, running or {})


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "new" / "usage.db")


def test_it_is_a_store(store):
    used: Store = store
    assert not used.shared


def test_what_ended_is_added_up_by_hour_tenant_and_model(store):
    store.book(
        journal(entry("1"), entry("2", outcome=Outcome.CANCELLED, slo_met=False, gpu_s=0.5)), NOW
    )
    store.book(
        journal(entry("3", "b"), entry("4", model="n"), refused={("a", "m"): 7}), NOW + HOUR_S
    )
    rows = {(row.hour, row.tenant, row.model): row.sums for row in store.usage(0, 1e9)}
    first = rows[100 * HOUR_S, "a", "m"]
    assert first == {
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 10,
        "micro_dollars": 60,
        "slo_met": 1,
        "succeeded": 1,
        "cancelled": 1,
        "failed": 0,
        "refused": 0,
        "gpu_us_succeeded": 2_000_000,
        "gpu_us_cancelled": 500_000,
        "gpu_us_failed": 0,
    }
    assert rows[101 * HOUR_S, "a", "m"]["refused"] == 7
    assert rows[101 * HOUR_S, "b", "m"]["succeeded"] == 1
    assert len(rows) == 4
    assert [row.tenant for row in store.usage(0, 1e9, "b")] == ["b"]
    assert store.usage(0, 100 * HOUR_S) == []


def test_a_request_is_booked_once_however_often_it_is_told(store):
    for _ in range(3):
        store.book(journal(entry("x"), entry("x", micro=99)), NOW)
    assert store.spent("a", WINDOWS[0]) == store.spent("a", WINDOWS[1]) == 30
    assert [row.sums["succeeded"] for row in store.usage(0, 1e9)] == [1]
    assert store.recent() == {"x"}
    assert store.spent("a", "1970-02") == 0


def test_ids_are_forgotten_after_minutes_and_money_is_not(store):
    store.book(journal(entry("old")), NOW)
    store.book(journal(), NOW + KEPT_S - 1)
    assert store.recent() == {"old"}
    store.book(journal(entry("new")), NOW + KEPT_S + 1)
    assert store.recent() == {"new"}
    assert store.spent("a", WINDOWS[0]) == 60


def test_ids_are_bounded_by_their_number(store, monkeypatch):
    monkeypatch.setattr(stores, "MOST_KEPT", 3)
    for second in range(10):
        store.book(journal(entry(f"{second}a"), entry(f"{second}b")), NOW + second)
    assert store.recent() <= {"8a", "8b", "9a", "9b"}
    assert len(store.recent()) == 3
    [count] = store._db.execute("SELECT count(*) FROM booked").fetchone()
    assert count <= 5


def test_the_file_shrinks_when_ids_are_forgotten(store, tmp_path):
    """A burst of requests does not fill a volume for good."""
    path = tmp_path / "new" / "usage.db"
    store.book(journal(*(entry(f"{number:0100}") for number in range(20_000))), NOW)
    full = _bytes_of(store, path)
    for _ in range(6):
        store.book(journal(entry("y")), NOW + 2 * KEPT_S)
    assert _bytes_of(store, path) < full / 5


def test_a_file_of_an_earlier_version_shrinks_too(tmp_path):
    """It has the ids of a day, and gives no room back by itself."""
    path = tmp_path / "usage.db"
    db = sqlite3.connect(path)
    db.execute(
        "CREATE TABLE booked (request_id TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID"
    )
    ids = ((f"{number:0100}", NOW) for number in range(20_000))
    db.executemany("INSERT INTO booked VALUES (?, ?)", ids)
    db.commit()
    db.close()
    full = path.stat().st_size
    store = SqliteStore(path)
    for _ in range(3):
        store.book(journal(entry("x")), NOW + 2 * KEPT_S)
    store.close()
    store = SqliteStore(path)
    assert store.recent() == {"x"}
    assert _bytes_of(store, path) < full / 5
    assert store.spent("a", WINDOWS[0]) == 30


def _bytes_of(store: SqliteStore, path: Path) -> int:
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


def check_what_runs_is_told_until_it_is_over(store: Store) -> None:
    """Of any store."""
    store.book(journal(running={"i": "[1]", "j": "[2]"}), NOW)
    store.book(journal(running={"i": "[3]"}), NOW + 5)
    assert store.lost(NOW) == {}
    assert store.lost(NOW + 1) == {"j": "[2]"}
    assert store.lost(NOW + 9) == {"i": "[3]", "j": "[2]"}
    store.book(journal(running={"i": "", "unknown": ""}), NOW + 6)
    assert store.lost(NOW + 9) == {"j": "[2]"}


def test_what_runs_is_told_until_it_is_over(store, tmp_path):
    check_what_runs_is_told_until_it_is_over(store)
    store.close()
    assert SqliteStore(tmp_path / "new" / "usage.db").lost(NOW + 9) == {"j": "[2]"}


def test_it_is_all_there_when_the_file_is_opened_again(store, tmp_path):
    store.book(journal(entry("x")), NOW)
    store.close()
    again = SqliteStore(tmp_path / "new" / "usage.db")
    assert again.recent() == {"x"}
    assert again.spent("a", WINDOWS[0]) == 30
    assert again.usage(0, 1e9)[0].sums["prompt_tokens"] == 10


def test_a_batch_that_fails_changes_nothing(store):
    with pytest.raises(AttributeError):
        store.book(journal(entry("x"), entry("y", outcome=None)), NOW)
    assert not store.recent()
    store.book(journal(entry("x")), NOW)
    assert store.spent("a", WINDOWS[0]) == 30


def test_a_file_of_an_earlier_version_gets_the_columns_that_it_lacks(tmp_path):
    path = tmp_path / "usage.db"
    old = [name for name in SUMS if not name.startswith("gpu_us")]
    db = sqlite3.connect(path)
    columns = ", ".join(f"{name} INTEGER NOT NULL" for name in old)
    db.execute(
        f"CREATE TABLE usage (hour INTEGER, tenant TEXT, model TEXT, {columns}, "
        "PRIMARY KEY (hour, tenant, model)) WITHOUT ROWID"
    )
    db.execute(
        f"INSERT INTO usage VALUES ({100 * HOUR_S}, 'a', 'm', {', '.join('1' for _ in old)})"
    )
    db.commit()
    db.close()
    store = SqliteStore(path)
    store.book(journal(entry("x")), NOW)
    [row] = store.usage(0, 1e9)
    assert (row.sums["succeeded"], row.sums["gpu_us_succeeded"]) == (2, 2_000_000)


def test_time_of_gpus_is_that_between_the_ends_of_a_span(store):
    """A replica tells what it has come to since it started, again and again."""
    first = GpuTime(requests=10.0, surplus=1.0, bubble=0.5, starved=0.25, spare=3.0, starting=20.0)
    later = GpuTime(requests=50.0, surplus=2.0, bubble=0.5, starved=0.75, spare=3.0, starting=20.0)
    store.book(journal(gpu={"r": first, "q": first}), NOW)
    store.book(journal(gpu={"r": later}), NOW + 2 * HOUR_S)
    for late in (first, later):
        store.book(journal(gpu={"r": late}), NOW + 2 * HOUR_S)
    hour = 100 * HOUR_S
    assert store.gpu(0, hour) == GpuTime()
    assert astuple(store.gpu(hour, hour + HOUR_S)) == tuple(2 * one for one in astuple(first))
    assert store.gpu(hour + HOUR_S, hour + 2 * HOUR_S) == GpuTime()
    assert store.gpu(hour + HOUR_S, 1e9) == GpuTime(requests=40.0, surplus=1.0, starved=0.5)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=5), max_size=8))
def test_totals_are_those_of_distinct_requests(batches):
    store = SqliteStore(":memory:")
    for batch in batches:
        store.book(journal(*(entry(name) for name in batch)), NOW)
    distinct = {name for batch in batches for name in batch}
    assert store.spent("a", WINDOWS[0]) == 30 * len(distinct)
    assert sum(row.sums["succeeded"] for row in store.usage(0, 1e9)) == len(distinct)
    store.close()


WRITER = """
import sys
from itertools import count
from tests.router.test_store import NOW, entry, journal
from router.store import SqliteStore
store = SqliteStore(sys.argv[1])
for number in count(int(sys.argv[2])):
    store.book(journal(*(entry(f"{number}-{i}") for i in range(10))), NOW)
    print(number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_booked_and_doubles_nothing(tmp_path):
    """Killed while it writes, five times; the last batch is told again after each."""
    path, told = tmp_path / "usage.db", -1
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(max(told, 0))], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
        lines = [first, *writer.stdout.read().splitlines()]
        writer.wait()
        told = int(lines[-1])
        writer.stdout.close()
    store = SqliteStore(path)
    known = store.recent()
    booked = [number for number in range(told + 2) if f"{number}-0" in known]
    assert booked[: told + 1] == list(range(told + 1))
    for number in booked:
        assert all(f"{number}-{i}" in known for i in range(10))
    assert store.spent("a", WINDOWS[0]) == 30 * 10 * len(booked)
    assert sum(row.sums["succeeded"] for row in store.usage(0, 1e9)) == 10 * len(booked)
