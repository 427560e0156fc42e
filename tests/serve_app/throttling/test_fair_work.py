"""Work in threads that tenants share fairly."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.protocol.backend import Refused
from serve_app.throttling.fair_work import SECONDS_PER_MINUTE, FairWork


class Bench:
    """Pieces that run until they are let go, one by one."""

    def __init__(self, threads: int) -> None:
        self.work = FairWork("testing", threads=threads, max_waiting=1000)
        self.begun: list[str] = []
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[str]] = []
        self._gate = threading.Semaphore(0)
        self._lock = threading.Lock()

    def ask(self, tenant: str) -> asyncio.Task[str]:
        self.tasks.append(asyncio.create_task(self.work.run(tenant, lambda: self._piece(tenant))))
        return self.tasks[-1]

    def let_go(self, pieces: int = 1) -> None:
        self._gate.release(pieces)

    def _piece(self, tenant: str) -> str:
        with self._lock:
            self.begun.append(tenant)
            self.running[tenant] += 1
            for name, count in (*self.running.items(), ("all", self.running.total())):
                self.most[name] = max(self.most[name], count)
        assert self._gate.acquire(timeout=10)
        with self._lock:
            self.running[tenant] -= 1
        return tenant


@settings(max_examples=30, deadline=None)
@given(
    order=st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
    threads=st.integers(1, 3),
    given_up=st.sets(st.integers(0, 19)),
)
def test_tenants_take_turns(order: list[str], threads: int, given_up: set[int]) -> None:
    async def scenario() -> Bench:
        bench = Bench(threads)
        tasks = [bench.ask(tenant) for tenant in order]
        await asyncio.sleep(0)
        for index in given_up & set(range(len(tasks))):
            tasks[index].cancel()
        bench.let_go(len(order))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for tenant, index, result in zip(order, range(len(order)), results, strict=True):
            assert result == tenant or index in given_up
        assert await bench.work.run("z", lambda: "free again") == "free again"
        return bench

    bench = asyncio.run(scenario())
    assert bench.most["all"] <= threads
    assert all(count <= 1 for tenant, count in bench.most.items() if tenant != "all")
    if not given_up and threads == 1:
        assert bench.begun == _in_turns(order)


def _in_turns(order: list[str]) -> list[str]:
    """The first begins at once; then one of each tenant, in the order of their first pieces."""
    left, turns, begun = Counter(order), list(dict.fromkeys(order)), []
    while turns:
        tenant = turns.pop(0)
        begun.append(tenant)
        left[tenant] -= 1
        if left[tenant]:
            turns.append(tenant)
    return begun


async def test_one_piece_of_another_tenant_waits_for_no_flood() -> None:
    bench = Bench(threads=1)
    flood = [bench.ask("flood") for _ in range(50)]
    await asyncio.sleep(0)
    victim = bench.ask("victim")
    bench.let_go(2)
    assert await asyncio.wait_for(victim, 5) == "victim"
    bench.let_go(50)
    await asyncio.gather(*flood)


async def test_a_failure_is_told_and_frees_the_thread() -> None:
    work = FairWork("testing", threads=1, max_waiting=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await work.run("a", lambda: 1 / 0)
    assert await work.ask("a", lambda: 5) == 5


async def test_what_one_tenant_may_have_waiting_is_bounded() -> None:
    bench = Bench(threads=1)
    bench.work = FairWork("testing", threads=1, max_waiting=2)
    for _ in range(3):
        bench.work.check("a")
        bench.ask("a")
        await asyncio.sleep(0)
    with pytest.raises(Refused, match="at once"):
        bench.work.check("a")
    bench.work.check("b")
    bench.tasks[-1].cancel()
    await asyncio.sleep(0)
    bench.work.check("a")
    bench.let_go(3)
    await asyncio.gather(*bench.tasks, return_exceptions=True)


async def test_time_is_charged_to_who_takes_it() -> None:
    now = [0.0]
    work = FairWork("testing", threads=1, max_waiting=10, clock=lambda: now[0])

    def slow() -> None:
        now[0] += 2.0 * SECONDS_PER_MINUTE

    work.check("a")
    await work.run("a", slow)
    with pytest.raises(Refused) as refused:
        work.check("a")
    assert refused.value.retry_after_s == pytest.approx(60)
    work.check("b")
    await work.run("a", lambda: None)  # what is owed already is done all the same
    now[0] += 61
    work.check("a")


async def test_work_that_nobody_waits_for_any_more_is_charged_too() -> None:
    now = [0.0]
    work = FairWork("testing", threads=1, max_waiting=10, clock=lambda: now[0])
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(10)
        now[0] += 2.0 * SECONDS_PER_MINUTE

    task = asyncio.create_task(work.run("a", slow))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.wait((task,))
    go_on.set()
    await work.run("b", lambda: None)  # behind it
    with pytest.raises(Refused, match="a minute"):
        work.check("a")
