from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.messages import (
    Ending,
    LeaseInfo,
    Outcome,
    ReplicaReport,
    RequestInfo,
    Sync,
    SyncReply,
)
from router.policy import FairPolicy
from router.pricing import Prices
from router.quota import windows_of
from router.router import Router
from router.store import SqliteStore
from router.tenant import Tenant
from serve_app import admission as router_deployment
from serve_app.admission import Admission
from serve_app.settings import TenantsSource
from serve_app.telemetry.exposition import Source
from serve_app.telemetry.recent import Ended
from tests.router.test_store import entry, journal
from tests.serve_app.fleet.test_admission_client import until


class AdmissionAlone(Admission):
    """Without Serve, which would await the end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass

    def stop(self) -> None:
        self._self_check.stop()
        self._clock.cancel()
        self._watching.cancel()
        self._writing.cancel()


@pytest.fixture(autouse=True)
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Admission whose clock was stopped would end the whole run of tests."""
    monkeypatch.setattr(router_deployment.LivenessCheck, "start", lambda self: None)


@pytest.fixture
async def admission() -> AsyncIterator[Admission]:
    """As Serve starts one."""
    admission = AdmissionAlone(FairPolicy())
    await admission.reconfigure({"tenants": [{"id": "acme"}]})
    yield admission
    admission.stop()


def report(replica: str, model: str, slots: int = 0) -> ReplicaReport:
    return ReplicaReport(replica, slots, kv_tokens=1000, model=model)


async def test_a_replica_hears_of_those_only_who_wait_for_its_model(admission: Admission) -> None:
    """What waits for another model does not starve it."""
    await admission.report(report("r", "m"))
    info = RequestInfo("x", "acme", 10, 10, model="n")
    await admission.sync(msgspec.msgpack.encode(Sync("i", 0, 0, waiting=(info,))))
    await until(lambda: admission._waiting.get("n"))
    assert (await admission.report(report("r", "m"))).backlog is False
    assert (await admission.report(report("s", "n"))).backlog is True


async def test_ingresses_hear_which_replica_serves_which_model(admission: Admission) -> None:
    await admission.report(report("r", "m", slots=2))
    await admission.report(report("s", "n", slots=1))
    hint = await admission.watch("i", (0, 0))
    assert hint.notice is not None
    assert hint.notice.replicas == {"r": "m", "s": "n"}
    await admission.report(report("r", "m"))
    assert (await admission.watch("i", hint.notice.version)).notice.replicas == {"s": "n"}


async def test_ingresses_hear_that_the_service_ends_and_tell_what_is_due(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(ingress: str, answers: int) -> None:
        await admission.sync(msgspec.msgpack.encode(Sync(ingress, 0, 0, answers=answers)))

    await tell("i", 2)
    await tell("j", 1)
    before = (await admission.watch("i", (0, 0))).notice
    assert before is not None
    assert not before.closed
    watching = asyncio.create_task(admission.watch("i", before.version))
    await asyncio.sleep(0)
    assert await admission.close() == 3
    notice = (await asyncio.wait_for(watching, 1)).notice
    assert notice is not None
    assert notice.closed
    assert await admission.close() == 3
    assert (await admission.watch("new", (0, 0))).notice == notice
    await tell("i", 0)
    assert await admission.close() == 1
    await tell("j", 0)
    assert await admission.close() == 0
    monkeypatch.setattr(router_deployment, "ANSWER_S", 0.0)
    assert await admission.close() is None


def shown(sequence: int, *leases: str, tenant: str = "acme") -> bytes:
    """A sync of an ingress that runs these."""
    infos = [RequestInfo(name, tenant, 10, 10, model="m") for name in leases]
    held = tuple(LeaseInfo(info, "r", produced=3) for info in infos)
    return msgspec.msgpack.encode(Sync("i", sequence, 0, leases=held))


async def test_ingresses_hear_what_administrators_order(admission: Admission) -> None:
    before = (await admission.watch("i", (0, 0))).notice
    assert before is not None
    watching = asyncio.create_task(admission.watch("i", before.version))
    await asyncio.sleep(0)
    assert await admission.pause_tenant("acme", True)
    notice = (await asyncio.wait_for(watching, 1)).notice
    assert notice is not None
    assert notice.orders.paused == {"acme"}
    assert [state["paused"] for state in await admission.tenant_states()] == [True]
    await admission.pause_tenant("acme", False)
    assert (await admission.watch("i", notice.version)).notice.orders.paused == frozenset()
    assert not await admission.pause_tenant("nobody", True)


async def test_a_pause_outlives_admission(admission: Admission) -> None:
    """By what ingresses were told. What this one was told since goes first."""
    earlier, now = (admission._epoch - 1, 7), (await admission.watch("i", (0, 0))).notice.version
    told = (await admission.watch("i", earlier, frozenset({"acme", "globex"}))).notice
    assert told.version > now
    assert told.orders.paused == {"acme", "globex"}
    await admission.pause_tenant("acme", False)
    again = (await admission.watch("j", earlier, frozenset({"acme"}))).notice
    assert again.orders.paused == {"globex"}
    fresh = (await admission.watch("k", (0, 0), frozenset({"x"}))).notice
    assert "x" not in fresh.orders.paused


async def test_requests_are_listed_and_stopped_by_the_ids_that_clients_know(
    admission: Admission,
) -> None:
    await admission.sync(shown(0, "cmpl-a-0", "cmpl-a-1", "cmpl-b-0"))
    [first, *_] = listed = await admission.open_requests("acme")
    assert [each["id"] for each in listed] == ["cmpl-a", "cmpl-a", "cmpl-b"]
    assert (first["state"], first["replica"], first["output_tokens"]) == ("running", "r", 3)
    assert await admission.open_requests("globex") == []
    assert await admission.stop_request("cmpl-a") == 2
    assert await admission.stop_request("cmpl-b-0") == 1
    assert await admission.stop_request("cmpl-c") == await admission.stop_request("") == 0
    orders = (await admission.watch("i", (0, 0))).notice.orders
    assert orders.stopped == {"cmpl-a", "cmpl-b-0"}


async def test_what_processes_tell_of_requests_that_are_over_is_kept(admission: Admission) -> None:
    """Of each once, however often it is told; and what runs under that id is told beside it."""
    await admission.sync(shown(0, "cmpl-a-0"))
    told = [Ended("j", number, "acme", (f"cmpl-{number}", "mine"), b"{}") for number in range(250)]
    epochs = {await admission.take_metrics(Source("j", {}, b""), told) for _ in range(2)}
    assert epochs == {admission._epoch}
    assert await admission.find_request("cmpl-7") == ([told[7]], [])
    assert (await admission.find_request("mine"))[0] == told[:-21:-1]
    over, [running] = await admission.find_request("cmpl-a")
    assert (over, running["state"]) == ([], "running")
    assert await admission.find_request("none") == ([], [])


async def test_one_tenant_is_asked_for(admission: Admission) -> None:
    await admission.sync(shown(0, "cmpl-a-0"))
    [state] = await admission.tenant_states("acme")
    assert (state["id"], state["running"], state["why"]) == ("acme", 1, [])
    assert await admission.tenant_states("nobody") == []


async def test_what_runs_of_a_tenant_that_is_gone_stays_visible(admission: Admission) -> None:
    await admission.sync(shown(0, "cmpl-a-0"))
    await admission.reconfigure({"tenants": [{"id": "globex"}]})
    kept, gone = await admission.tenant_states()
    assert (kept["id"], kept["running"]) == ("globex", 0)
    assert gone == {"id": "acme", "removed": True, "queued": 0, "running": 1, "paused": False}
    assert await admission.pause_tenant("acme", True)
    await admission.sync(shown(1))
    assert [state["id"] for state in await admission.tenant_states()] == ["globex"]


async def test_the_largest_limits_can_be_told(admission: Admission) -> None:
    """One number that does not travel would hold up everybody's requests."""
    limits = {"requests_per_minute": 2**53, "tokens_per_minute": 2**53}
    await admission.reconfigure({"tenants": [{"id": "acme", **limits}]})
    info = RequestInfo("x", "acme", 10, 10, model="m")
    reply = await admission.sync(msgspec.msgpack.encode(Sync("i", 0, 0, waiting=(info,))))
    told = msgspec.msgpack.decode(reply, type=SyncReply).rate_limits["acme"]
    assert (told.requests.limit, told.tokens.limit) == (2**53, 2**53)


async def test_spending_outlives_a_budget_that_was_away(tmp_path: Path) -> None:
    """Written down by an earlier process, and looked up when the limit comes back."""
    [window] = windows_of(Tenant(id="acme", daily_budget=1.0), time.time())
    store = SqliteStore(tmp_path / "usage.db")
    store.book(journal(entry("x", "acme", windows=(window,))), time.time())
    store.close()
    prices = {"m": Prices(output=1.0)}
    admission = AdmissionAlone(FairPolicy(), prices, tmp_path / "usage.db")
    await admission.report(report("r", "m"))
    for limits in ({}, {"daily_budget": 1.0}):
        await admission.reconfigure({"tenants": [{"id": "acme", **limits}]})
    [state] = await admission.tenant_states()
    assert state["spent"] == {window: 30e-6}
    admission.stop()


async def test_spending_is_looked_up_again_once_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts with a clock that is ahead does not know what was spent today."""
    now = time.time()
    acme = Tenant(id="acme", daily_budget=1.0)
    [window] = windows_of(acme, now)
    store = SqliteStore(tmp_path / "usage.db")
    store.book(journal(entry("x", "acme", windows=(window,))), now)
    store.close()
    ahead_s = 400 * 86400.0
    monkeypatch.setattr(time, "time", lambda: now + ahead_s)
    admission = AdmissionAlone(FairPolicy(), {"m": Prices(output=1.0)}, tmp_path / "usage.db")
    await admission.report(report("r", "m"))
    await admission.reconfigure({"tenants": [acme.model_dump()]})
    admission._router.accounts.quotas["acme"]._wall = time.time  # bound before it was replaced
    [state] = await admission.tenant_states()
    assert list(state["spent"].values()) == [0]
    ahead_s = 0.0
    await admission._journal.flush()
    [state] = await admission.tenant_states()
    assert state["spent"] == {window: 30e-6}
    admission.stop()


async def test_what_is_slow_is_done_beside_the_loop(
    admission: Admission, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading tenants, looking at their file, asking the store."""
    loop, elsewhere = threading.get_ident(), dict[str, bool]()

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any) -> Any:
            elsewhere[name] = elsewhere.get(name, True) and threading.get_ident() != loop
            return original(*args)

        monkeypatch.setattr(owner, name, noted)

    note(TenantsSource, "stamp")
    note(TenantsSource, "load")
    note(SqliteStore, "spending")
    note(SqliteStore, "recent")
    note(SqliteStore, "book")
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{id: acme, daily_budget: 1}]")
    admission._prices = {"m": Prices(output=1.0)}
    await admission.reconfigure({"tenants": str(file)})
    file.write_text("tenants: [{id: acme, daily_budget: 2}, {id: new}]")
    await until(lambda: len(admission._tenants.tenants) == 2)
    info = RequestInfo("x", "acme", 10, 10, model="m")
    ending = Ending(info, Outcome.SUCCEEDED, 5)
    await admission.sync(msgspec.msgpack.encode(Sync("i", 0, 1, endings=(ending,))))
    await admission._journal.flush()
    assert elsewhere == dict.fromkeys(("stamp", "load", "spending", "book"), True)
    other = AdmissionAlone(FairPolicy())
    await other.reconfigure({"tenants": [{"id": "acme"}]})
    other.stop()
    assert elsewhere["recent"]


async def test_an_ending_is_taken_over_although_the_usage_file_is_locked(tmp_path: Path) -> None:
    admission = AdmissionAlone(FairPolicy(), usage=tmp_path / "usage.db")
    await admission.reconfigure({"tenants": [{"id": "acme"}]})
    other = sqlite3.connect(tmp_path / "usage.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    admission._router.accounts.ledger.refuse(RequestInfo("r", "acme", 1, 1, model="m"))
    writing = asyncio.create_task(admission._journal.flush())
    await asyncio.sleep(0.1)
    ending = Ending(RequestInfo("x", "acme", 10, 10, model="m"), Outcome.SUCCEEDED, 5)
    began = time.perf_counter()
    await admission.sync(msgspec.msgpack.encode(Sync("i", 0, 1, endings=(ending,))))
    assert time.perf_counter() - began < 2.0
    assert not writing.done()
    other.execute("ROLLBACK")
    await writing
    other.close()
    admission.stop()


async def test_many_tenants_are_taken_over_and_told_of_in_parts(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those alone that are new or have changed; the whole state is never counted at once."""
    asked, taken = list[int](), list[list[str]]()
    snapshot, configure = Router.snapshot, Router.configure

    def noted(self: Router, tenants: Any = None) -> Any:
        asked.append(-1 if tenants is None else len(tenants))
        return snapshot(self, tenants)

    def taken_over(self: Router, tenants: Any, spent: Any = None) -> None:
        taken.append([tenant.id for tenant in tenants])
        configure(self, tenants, spent)

    monkeypatch.setattr(Router, "snapshot", noted)
    monkeypatch.setattr(Router, "configure", taken_over)
    tenants = [{"id": f"t{number}"} for number in range(250)]
    await admission.reconfigure({"tenants": tenants})
    assert [len(part) for part in taken] == [100, 100, 50]
    tenants[7] = {"id": "t7", "weight": 2.0}
    await admission.reconfigure({"tenants": tenants[:200]})
    assert taken[3:] == [["t7"]]
    waiting = tuple(RequestInfo(f"x{n}", f"t{n}", 1, 1, model="m") for n in range(200))
    await admission.sync(msgspec.msgpack.encode(Sync("i", 0, 0, waiting=waiting)))
    states = await admission.tenant_states()
    assert [state["queued"] for state in states] == [1] * 200
    await asyncio.sleep(0.7)
    assert 0 <= min(asked) <= max(asked) <= 100


async def test_the_spending_of_others_is_learnt_some_tenants_at_a_time(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_deployment, "LEARNT", 2)
    admission._prices = {"m": Prices(output=1.0)}
    names = [f"t{number}" for number in range(4)]
    tenants = [{"id": name, "daily_budget": 1.0} for name in names]
    await admission.reconfigure({"tenants": tenants})
    admission._writing.cancel()
    admission._store.shared = True
    [window] = windows_of(Tenant(id="t", daily_budget=1.0), time.time())
    spent = journal(*(entry(name, name, windows=(window,)) for name in names))
    admission._store.book(spent, time.time())
    for known in (1, 3, 4):  # the first one of all is acme
        await admission._journal.flush()
        told = [sum(state["spent"].values()) for state in await admission.tenant_states()]
        assert sum(map(bool, told)) == known
