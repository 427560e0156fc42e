from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.messages import Grant, Outcome, RequestInfo, Sync, SyncReply
from serve_app.fleet import admission_client
from serve_app.fleet.admission_client import AdmissionClient, Hint, Notice
from serve_app.protocol.backend import Refused
from tests.serve_app.admission_in_process import AdmissionInProcess


def request(request_id: str = "r", tenant: str = "acme", attempt: int = 0) -> RequestInfo:
    return RequestInfo(request_id, tenant, prompt_tokens=10, max_tokens=20, attempt=attempt)


async def until(condition: Callable[[], object], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.002)


@pytest.fixture
async def admission(monkeypatch: pytest.MonkeyPatch) -> AdmissionInProcess:
    monkeypatch.setattr(admission_client, "RETRY_S", 0.005)
    return AdmissionInProcess()


@pytest.fixture
async def client(admission: AdmissionInProcess) -> AsyncIterator[AdmissionClient]:
    client = AdmissionClient("ingress", admission.sync, admission.watch)
    client.start()
    yield client
    await client.close()


async def test_a_request_is_granted_at_once_where_a_slot_is_free(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 1)
    started = time.monotonic()
    assert await client.acquire(request()) == Grant("r", 0, "a", 20)
    assert time.monotonic() - started < admission_client.SYNC_PERIOD_S


async def test_a_request_waits_for_a_slot_and_hears_of_it_by_the_watch(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    waiting = asyncio.create_task(client.acquire(request()))
    await until(lambda: admission.router.snapshot().queued)
    await asyncio.sleep(0.02)
    started = time.monotonic()
    admission.offer("a", 1)
    await waiting
    assert time.monotonic() - started < admission_client.SYNC_PERIOD_S / 2


async def test_a_bill_that_does_not_come_is_waited_for_a_moment_only(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 1)
    await client.acquire(request())
    client.stopping("r")
    client.end("r", Outcome.CANCELLED)
    await asyncio.sleep(admission_client.BILL_S / 2)
    assert admission.router.snapshot().replicas["a"].leases == 1
    await until(lambda: client.idle)
    assert admission.router.snapshot().replicas["a"].leases == 0
    client.bill("r", 1.0)
    assert client.idle


async def test_a_refusal_tells_why_and_when_to_come_back(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 8)
    await client.acquire(request("first", "modest"))
    with pytest.raises(Refused) as caught:
        await client.acquire(request("second", "modest"))
    client.end("second", Outcome.FAILED)
    assert "at most 0 requests may wait" in caught.value.reason
    assert caught.value.retry_after_s >= 1


async def test_an_ended_request_is_settled_once_with_what_it_did(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 1)
    await client.acquire(request())
    client.progress("r", produced=7, cached=4)
    client.end("r", Outcome.SUCCEEDED)
    client.end("r", Outcome.CANCELLED)
    await until(lambda: client.idle)
    usage = admission.router.snapshot().usage["acme"]
    assert usage.outcomes == {Outcome.SUCCEEDED: 1, Outcome.CANCELLED: 0, Outcome.FAILED: 0}
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (10, 4, 7)


async def test_giving_up_while_waiting_leaves_no_trace(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    """C32: cancelled in the queue."""
    waiting = asyncio.create_task(client.acquire(request()))
    await until(lambda: admission.router.snapshot().queued)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    client.end("r", Outcome.CANCELLED)
    await until(lambda: not admission.router.snapshot().queued)
    assert client.idle
    assert admission.router.snapshot().usage["acme"].prompt_tokens == 0


async def test_a_grant_that_comes_as_the_request_gives_up_returns_its_slot(
    admission: AdmissionInProcess,
) -> None:
    """C32: the answer with the grant is on its way when the client disconnects."""
    granted = asyncio.Event()

    async def slow_sync(sync: Sync) -> SyncReply:
        reply = await admission.sync(sync)
        if reply.grants:
            granted.set()
            await asyncio.sleep(0.02)
        return reply

    client = AdmissionClient("ingress", slow_sync, admission.watch)
    client.start()
    admission.offer("a", 1)
    waiting = asyncio.create_task(client.acquire(request()))
    await granted.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    client.end("r", Outcome.CANCELLED)
    await until(lambda: admission.router.snapshot().replicas["a"].leases == 0)
    await client.close()


async def test_a_later_attempt_gives_its_lease_back_and_waits_again(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 1)
    await client.acquire(request())
    admission.offer("a", 0)
    again = asyncio.create_task(client.acquire(request(attempt=1)))
    await until(lambda: admission.router.snapshot().replicas["a"].leases == 0)
    assert admission.syncs[-1].leases == ()
    admission.offer("b", 1)
    assert await again == Grant("r", 1, "b", 20)
    assert admission.router.snapshot().usage["acme"].prompt_tokens == 10


async def test_what_an_earlier_attempt_did_is_not_lost_on_a_later_one(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    """Its tokens, its share of a GPU, its times; and the prompt's cached part is settled by it."""
    admission.offer("a", 1)
    await client.acquire(request())
    client.progress("r", produced=7, cached=4, gpu_s=1.0)
    again = asyncio.create_task(client.acquire(request(attempt=1)))
    await again
    client.progress("r", produced=9, cached=10, gpu_s=0.5)
    client.end("r", Outcome.SUCCEEDED)
    ending = client._endings["r"]
    assert (ending.produced, ending.cached, ending.gpu_s) == (9, 4, 1.5)
    assert ending.first_token_s is not None
    assert ending.last_token_s is not None
    assert ending.first_token_s < ending.last_token_s


async def test_giving_up_between_two_attempts_is_accounted_for(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    """The output that came since the last sync, too; and nobody inherits a credit."""
    admission.offer("a", 1)
    await client.acquire(request())
    admission.offer("a", 0)
    client.progress("r", produced=7, cached=4, gpu_s=1.0)
    waiting = asyncio.create_task(client.acquire(request(attempt=1)))
    await until(lambda: admission.router.snapshot().queued)
    waiting.cancel()
    client.end("r", Outcome.CANCELLED)
    assert not client._returned
    await until(lambda: client.idle)
    usage = admission.router.snapshot().usage["acme"]
    assert usage.outcomes[Outcome.CANCELLED] == 1
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (10, 4, 7)
    assert usage.gpu_s == 1.0


async def test_a_grant_for_an_earlier_attempt_is_ignored() -> None:
    grants = [Grant("r", 0, "a", 20), Grant("r", 1, "b", 20)]

    async def sync(sync: Sync) -> SyncReply:
        return SyncReply(epoch=1, grants=(grants.pop(0),) if sync.waiting else ())

    client = AdmissionClient("ingress", sync, AdmissionInProcess().watch)
    client.start()
    assert await client.acquire(request(attempt=1)) == Grant("r", 1, "b", 20)
    await client.close()


async def test_an_answer_that_does_not_come_is_given_up(
    admission: AdmissionInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "SYNC_TIMEOUT_S", 0.05)
    hangs = 2

    async def sync(sync: Sync) -> SyncReply:
        nonlocal hangs
        if hangs:
            hangs -= 1
            await asyncio.sleep(60)
        return await admission.sync(sync)

    client = AdmissionClient("ingress", sync, admission.watch)
    client.start()
    admission.offer("a", 1)
    assert await asyncio.wait_for(client.acquire(request()), 2) == Grant("r", 0, "a", 20)
    await client.close()


async def test_many_changes_travel_in_few_syncs(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 100)
    before = len(admission.syncs)
    grants = [client.acquire(request(f"r{index}", "globex")) for index in range(4)]
    await asyncio.gather(*grants)
    assert len(admission.syncs) - before <= 2


async def test_silence_is_measured_from_the_last_answer(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    assert client.silence_s == float("inf")
    await until(lambda: client.silence_s < 0.1)
    admission.away = True
    await until(lambda: client.silence_s > 0.3)


async def test_a_notice_is_handed_on(admission: AdmissionInProcess) -> None:
    notice = Notice((1, 1), ("a", "b"), b"tenants")
    hints = [Hint(news=True), Hint(notice=notice)]

    async def watch() -> Hint:
        return hints.pop(0) if hints else await admission.watch()

    notices: list[Notice] = []
    client = AdmissionClient("ingress", admission.sync, watch, notices.append)
    client.start()
    await until(lambda: notices == [notice])
    await client.close()


async def test_every_sync_tells_how_many_answers_are_due(admission: AdmissionInProcess) -> None:
    due = [3]
    client = AdmissionClient("ingress", admission.sync, admission.watch, answers=lambda: due[0])
    client.start()
    for due[0] in (3, 0):
        await until(lambda: admission.syncs and admission.syncs[-1].answers == due[0])
    await client.close()


async def test_a_client_that_has_stopped_is_unhealthy(client: AdmissionClient) -> None:
    client.raise_if_dead()
    await client.close()
    with pytest.raises(RuntimeError, match="stopped"):
        client.raise_if_dead()


async def test_a_restarted_admission_learns_what_runs(
    admission: AdmissionInProcess, client: AdmissionClient
) -> None:
    admission.offer("a", 2)
    await client.acquire(request())
    admission.restart()
    await until(lambda: client.epoch == admission.router.epoch)
    assert admission.router.snapshot().replicas["a"].leases == 1
    client.end("r", Outcome.SUCCEEDED)
    await until(lambda: client.idle)


async def test_while_admission_is_away_a_tenants_own_credit_is_used_again(
    admission: AdmissionInProcess, client: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "AWAY_S", 0.05)
    admission.offer("a", 1)
    await client.acquire(request("first"))
    others = asyncio.create_task(client.acquire(request("other", "globex")))
    own = asyncio.create_task(client.acquire(request("own")))
    await until(lambda: admission.router.snapshot().queued == 2)
    admission.away = True
    client.end("first", Outcome.SUCCEEDED)
    assert await asyncio.wait_for(own, 1) == Grant("own", 0, "a", 20)
    await asyncio.sleep(0.05)
    assert not others.done()
    admission.away = False
    client.end("own", Outcome.SUCCEEDED)
    assert await asyncio.wait_for(others, 1) == Grant("other", 0, "a", 20)


async def test_a_credit_is_used_again_for_the_same_model_and_by_priority(
    admission: AdmissionInProcess, client: AdmissionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "AWAY_S", 0.05)
    admission.offer("a", 1)
    await client.acquire(request("first"))
    asked = [
        replace(request("elsewhere"), model="another", priority=-9),
        replace(request("patient"), priority=5),
        replace(request("urgent"), priority=-5),
    ]
    elsewhere, patient, urgent = (asyncio.create_task(client.acquire(each)) for each in asked)
    await until(lambda: admission.router.snapshot().queued == 3)
    admission.away = True
    client.end("first", Outcome.SUCCEEDED)
    assert await asyncio.wait_for(urgent, 1) == Grant("urgent", 0, "a", 20)
    client.end("urgent", Outcome.SUCCEEDED)
    assert await asyncio.wait_for(patient, 1) == Grant("patient", 0, "a", 20)
    client.end("patient", Outcome.SUCCEEDED)
    await asyncio.sleep(0.1)
    assert not elsewhere.done()
    elsewhere.cancel()


class User:
    """Acquires, works, and ends in some way, perhaps after another attempt."""

    def __init__(self, client: AdmissionClient, chance: random.Random, request: RequestInfo):
        self.client, self.chance, self.request = client, chance, request
        self.outcome: Outcome | None = None
        self.produced = 0

    async def run(self) -> None:
        attempts = 1 + (self.chance.random() < 0.2)
        for attempt in range(attempts):
            info = RequestInfo(self.request.request_id, self.request.tenant, 10, 20, attempt)
            await self.client.acquire(info)
        for _ in range(self.chance.randint(0, 5)):
            self.produced += 1
            self.client.progress(info.request_id, self.produced, cached=0)
            await asyncio.sleep(self.chance.random() * 0.003)
        self.outcome = self.chance.choice(list(Outcome))
        self.client.end(info.request_id, self.outcome)

    async def run_or_give_up(self) -> None:
        """One in five leaves at some moment."""
        task = asyncio.create_task(self.run())
        if self.chance.random() < 0.2:
            await asyncio.sleep(self.chance.random() * 0.02)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.client.end(self.request.request_id, Outcome.CANCELLED)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.0, 0.1, 0.4]))
async def test_every_request_ends_once_over_a_network_that_fails(seed: int, rate: float) -> None:
    """Lost, late and doubled syncs: no credit leaks, no outcome is booked twice."""
    chance = random.Random(seed)
    admission = AdmissionInProcess(chance, rate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission_client, "RETRY_S", 0.0)
        patch.setattr(admission_client, "SYNC_PERIOD_S", 0.005)
        client = AdmissionClient("ingress", admission.sync, admission.watch)
        client.start()
        admission.offer("a", 2)
        admission.offer("b", 1)
        users = [
            User(client, chance, request(f"r{index}", chance.choice(["acme", "globex"])))
            for index in range(12)
        ]
        await asyncio.wait_for(asyncio.gather(*(user.run_or_give_up() for user in users)), 20)
        await until(lambda: client.idle)
        admission.rate = 0.0
        await until(lambda: sum(admission.router.snapshot().ingresses.values()) == 0)
        await client.close()
    state = admission.router.snapshot()
    assert [replica.leases for replica in state.replicas.values()] == [0, 0]
    assert [replica.kv_held for replica in state.replicas.values()] == [0, 0]
    for outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
        booked = sum(usage.outcomes[outcome] for usage in state.usage.values())
        assert booked == sum(user.outcome is outcome for user in users)
    produced = sum(usage.output_tokens for usage in state.usage.values())
    assert produced == sum(user.produced for user in users)
