"""The same store on a real Redis: it tells what the SQLite one tells."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from router.messages import GpuTime, Outcome, RefusalKind, Sync, SyncReply
from router.policy import FairPolicy
from router.pricing import Prices
from router.quota import windows_of
from router.store import HOUR_S, KEPT_S, SqliteStore, Store
from router.tenant import Tenant, digest
from serve_app.admission import Admission
from serve_app.usage import redis_store
from serve_app.usage.redis_store import RedisStore
from serve_app.usage.stores import open_store
from tests.router.desk import ending, info
from tests.router.test_store import (
    NOW,
    WINDOWS,
    check_what_runs_is_told_until_it_is_over,
    entry,
    journal,
)
from tests.serve_app.metered_site import until
from tests.serve_app.redis_server import RedisServer, executable

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no redis-server: neither the system's nor a package's"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Sockets have short names, so not under pytest's own folder."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        yield server
        server.kill()


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    server.clear()
    store = RedisStore(server.url)
    yield store
    store.close()


def test_it_is_a_store(store: RedisStore) -> None:
    used: Store = store
    assert used.shared


ENTRIES = st.builds(
    entry,
    request_id=st.sampled_from("uvwxyz"),
    tenant=st.sampled_from(["a", 'b "c"']),
    micro=st.integers(0, 2**52),
    model=st.sampled_from("mn"),
    outcome=st.sampled_from(Outcome),
    slo_met=st.booleans(),
    gpu_s=st.integers(0, 10**10).map(lambda micros: micros / 1e6),
)
TIMES = st.builds(GpuTime, *[st.integers(0, 10**14).map(lambda micros: micros / 1e6)] * 6)
BATCHES = st.tuples(
    st.lists(ENTRIES, max_size=4),
    st.dictionaries(st.tuples(st.sampled_from("ab"), st.just("m")), st.integers(1, 9)),
    st.dictionaries(st.sampled_from("pq"), TIMES),
    st.integers(0, 2),
)


@settings(deadline=None)
@given(batches=st.lists(BATCHES, max_size=5))
def test_it_tells_what_the_sqlite_store_tells(server: RedisServer, batches) -> None:
    server.clear()
    stores: list[Store] = [RedisStore(server.url), SqliteStore(":memory:")]
    for store in stores:
        for entries, refused, gpu, hour in batches:
            store.book(journal(*entries, refused=refused, gpu=gpu), NOW + hour * HOUR_S)
    ours, reference = stores
    span = 101 * HOUR_S
    for start, end in ((0, 1e9), (0, span), (span, 1e9)):
        assert ours.gpu(start, end) == reference.gpu(start, end)
        for tenant in (None, "a", 'b "c"'):
            told = sorted(ours.usage(start, end, tenant), key=lambda row: (row.hour, row.tenant))
            known = reference.usage(start, end, tenant)
            assert {str(row) for row in told} == {str(row) for row in known}
    for tenant in ("a", 'b "c"'):
        for window in WINDOWS:
            assert ours.spent(tenant, window) == reference.spent(tenant, window)
    accounts = [(tenant, window) for tenant in ("a", 'b "c"') for window in WINDOWS]
    assert ours.spending(accounts) == reference.spending(accounts)
    assert ours.spending([]) == []
    assert ours.recent() == reference.recent()
    for store in stores:
        store.close()


def test_ids_are_forgotten_after_minutes_and_money_is_not(store: RedisStore) -> None:
    store.book(journal(entry("x")), NOW)
    store.book(journal(), NOW + KEPT_S - 1)
    assert store.recent() == {"x"}
    store.book(journal(entry("y")), NOW + KEPT_S + 1)
    assert store.recent() == {"y"}
    assert store.spent("a", WINDOWS[0]) == 60


def test_ids_are_bounded_by_their_number(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MOST_KEPT", 3)
    for second in range(10):
        store.book(journal(entry(f"{second}a"), entry(f"{second}b")), NOW + second)
    assert store.recent() == {"8b", "9a", "9b"}


def test_what_runs_is_told_until_it_is_over(store: RedisStore) -> None:
    check_what_runs_is_told_until_it_is_over(store)


def test_a_batch_that_fails_changes_nothing(store: RedisStore) -> None:
    with pytest.raises(AttributeError):
        store.book(journal(entry("x"), entry("y", outcome=None)), NOW)
    assert not store.recent()
    store.book(journal(entry("x")), NOW)
    assert store.spent("a", WINDOWS[0]) == 30


def test_two_clusters_that_book_at_once_book_each_request_once(server: RedisServer) -> None:
    server.clear()

    def book() -> None:
        store = RedisStore(server.url)
        for number in range(50):
            store.book(journal(*(entry(f"{number}-{i}") for i in range(4))), NOW)
        store.close()

    clusters = [Thread(target=book) for _ in range(4)]
    for cluster in clusters:
        cluster.start()
    for cluster in clusters:
        cluster.join()
    store = RedisStore(server.url)
    assert store.spent("a", WINDOWS[0]) == 30 * 200
    assert [row.sums["succeeded"] for row in store.usage(0, 1e9)] == [200]
    store.close()


def test_its_password_need_not_be_in_its_url(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.clear()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "secret")
        try:
            monkeypatch.setenv("FAIRSTREAM_REDIS_PASSWORD", "secret")
            store = open_store(server.url)
            store.book(journal(entry("x")), NOW)
            assert store.spent("a", WINDOWS[0]) == 30
            monkeypatch.delenv("FAIRSTREAM_REDIS_PASSWORD")
            with pytest.raises(OSError, match="does not answer"):
                open_store(server.url).spent("a", WINDOWS[0])
        finally:
            client.config_set("requirepass", "")


def test_its_death_loses_nothing(store: RedisStore, server: RedisServer) -> None:
    store.book(journal(entry("x")), NOW)
    server.kill()
    with pytest.raises(redis.RedisError):
        store.book(journal(entry("y")), NOW)
    with pytest.raises(OSError, match="does not answer"):
        store.recent()
    server.start()
    assert store.recent() == {"x"}
    store.book(journal(entry("x"), entry("y")), NOW)
    assert store.spent("a", WINDOWS[0]) == 60


class Cluster(Admission):
    """The part of a cluster that counts."""

    def __init__(self, url: str) -> None:
        super().__init__(FairPolicy(), {"m": Prices(prompt=1.0, output=2.0)}, url)

    def __del__(self) -> None:
        """Serve awaits the real one; here nobody does."""

    async def say(self, **said: object) -> SyncReply:
        sync = Sync("i", sequence=time.monotonic_ns(), epoch=0, **said)
        reply = await self.sync(msgspec.msgpack.encode(sync))
        return msgspec.msgpack.decode(reply, type=SyncReply)

    async def stop(self) -> None:
        self._self_check.stop()
        tasks = (self._clock, self._watching, self._writing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_clusters_share_a_budget(server: RedisServer) -> None:
    """Each spends 200 of 500 micro-dollars; none has 200 left for a third request. A third
    cluster, started later, knows it at once."""
    server.clear()

    async def cluster() -> Cluster:
        admission = Cluster(server.url)
        await admission.reconfigure({"tenants": [{"id": "a", "daily_budget": 500e-6}]})
        return admission

    clusters = [await cluster(), await cluster()]
    for number, admission in enumerate(clusters):
        await admission.say(endings=(ending(info(f"r{number}"), produced=50),))
    for admission in clusters * 2:
        await admission.usage(0, 1e9, None)
    clusters.append(await cluster())
    for number, admission in enumerate(clusters):
        [refusal] = (await admission.say(waiting=(info(f"s{number}"),))).refusals
        assert refusal.kind is RefusalKind.BUDGET
        [state] = await admission.tenant_states()
        assert list(state["spent"].values()) == [400e-6]
    for admission in clusters:
        await admission.stop()


async def test_a_router_without_its_redis_does_not_start(tmp_path: Path) -> None:
    """It would not know what is spent. Serve starts it again until it does."""
    admission = Cluster(f"unix://{tmp_path}/nobody")
    with pytest.raises(OSError, match="does not answer"):
        await admission.reconfigure({"tenants": [{"id": "a", "daily_budget": 1.0}]})
    await admission.stop()


async def test_tenants_change_while_its_redis_is_away(server: RedisServer) -> None:
    """A key that is revoked is of no use any more; what a new tenant has spent is learnt later."""
    server.clear()
    admission = Cluster(server.url)
    old = {"id": "old", "keys": [digest("sk-old")]}
    await admission.reconfigure({"tenants": [old, {"id": "b"}]})
    window = next(iter(windows_of(Tenant(id="a", daily_budget=1.0), time.time())))
    admission._store.book(journal(entry("x", windows=(window,))), NOW)
    server.kill()
    await admission.reconfigure({"tenants": [{"id": "a", "daily_budget": 1.0}, {"id": "b"}]})
    notice = (await admission.watch("i", (0, 0))).notice
    assert pickle.loads(notice.tenants).find_by_key("sk-old") is None
    assert [state["id"] for state in await admission.tenant_states()] == ["a", "b"]
    server.start()
    quota = admission._router.accounts.quotas["a"]
    await until(lambda: quota.spent() == {window: 30})
    await admission.stop()
