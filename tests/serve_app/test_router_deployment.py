from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from router.messages import LeaseInfo, ReplicaReport, RequestInfo, Sync, SyncReply
from router.policy import FairPolicy
from router.pricing import Prices
from router.quota import windows_of
from router.store import SqliteStore
from router.tenant import Tenant
from serve_app import router_deployment
from serve_app.router_deployment import Admission
from tests.router.test_store import entry, journal
from tests.serve_app.test_admission_client import until


class AdmissionAlone(Admission):
    """Without Serve, which would await the end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass

    def stop(self) -> None:
        self._self_check.stop()
        self._clock.cancel()
        self._writing.cancel()


@pytest.fixture(autouse=True)
def _no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Admission whose clock was stopped would end the whole run of tests."""
    monkeypatch.setattr(router_deployment.SelfCheck, "start", lambda self: None)


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
    admission._router._accounts.quotas["acme"]._wall = time.time  # bound before it was replaced
    [state] = await admission.tenant_states()
    assert list(state["spent"].values()) == [0]
    ahead_s = 0.0
    await admission._journal.flush()
    [state] = await admission.tenant_states()
    assert state["spent"] == {window: 30e-6}
    admission.stop()
