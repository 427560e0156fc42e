from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.messages import Output, Sampling, Submit
from serve_app.fleet import engine_host, replica_link
from serve_app.fleet.mailbox import ReplicaLost
from serve_app.fleet.step_streams import StepStreams
from tests.serve_app.scripted_engine import tokens
from tests.serve_app.transport import Transport


def submit(request_id: str = "r", max_tokens: int = 5, attempt: int = 0) -> Submit:
    sampling = Sampling(max_tokens=max_tokens)
    return Submit(request_id=request_id, attempt=attempt, prompt_ids=(1,), sampling=sampling)


class Lab:
    """One ingress and its replicas."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.lost: list[str] = []
        self.streams = StepStreams("ingress", transport, self.lost.append)

    async def collect(self, replica: str, request: Submit) -> list[Output]:
        return [output async for output in self.streams.run(replica, request)]

    async def until(self, condition: object, seconds: float = 3.0) -> None:
        """Wait for `condition()`, or fail."""
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        await self.streams.close()
        await self.transport.close()


@pytest.fixture
async def lab(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(replica_link, "RETRY_S", 0.001)
    lab = Lab(Transport())
    await lab.transport.start("a", step_s=0.001)
    yield lab
    await lab.close()


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


async def test_a_sequence_arrives_in_order_and_ends_with_its_reason(lab: Lab) -> None:
    outputs = await lab.collect("a", submit(max_tokens=7))
    assert ids(outputs) == tokens("r", 7)
    assert [output.finish_reason for output in outputs][-1] == "length"
    assert lab.streams.idle


async def test_all_sequences_on_a_replica_share_one_stream(lab: Lab) -> None:
    names = [f"r{index}" for index in range(20)]
    results = await asyncio.gather(*(lab.collect("a", submit(name)) for name in names))
    assert [ids(result) for result in results] == [tokens(name, 5) for name in names]
    assert lab.transport.streams == 1


async def test_a_busy_reader_gets_what_came_meanwhile_as_one_output(lab: Lab) -> None:
    async with aclosing(lab.streams.run("a", submit(max_tokens=10))) as outputs:
        first = await anext(outputs)
        await lab.until(lambda: not lab.transport.engines["a"].running)
        await asyncio.sleep(0.02)
        second = await anext(outputs)
    assert first.token_ids + second.token_ids == tokens("r", 10)
    assert second.finish_reason == "length"


async def test_leaving_early_aborts_the_sequence(lab: Lab) -> None:
    async with aclosing(lab.streams.run("a", submit(max_tokens=1000))) as outputs:
        await anext(outputs)
    await lab.until(lambda: not lab.transport.engines["a"].running)


async def test_a_sequence_that_finished_is_not_aborted(lab: Lab) -> None:
    """X2: aborting what has ended floods the engine."""
    await lab.collect("a", submit())
    await asyncio.sleep(0.02)
    assert lab.transport.aborts == []


async def test_ready_is_known_once_a_stream_has_opened(lab: Lab) -> None:
    assert lab.streams.ready == {}
    lab.streams.connect("a")
    await lab.until(lambda: lab.streams.ready)
    assert lab.streams.ready["a"].vocab_size == 256


async def test_an_unknown_replica_takes_no_work(lab: Lab) -> None:
    with pytest.raises(ReplicaLost) as caught:
        await lab.collect("nobody", submit())
    assert not caught.value.suspect
    await lab.until(lambda: "nobody" in lab.lost)


async def test_a_replica_that_leaves_finishes_what_it_has(lab: Lab) -> None:
    """C56: it drains; what runs is completed, what is new is turned away."""
    running = asyncio.create_task(lab.collect("a", submit("old", max_tokens=50)))
    await lab.until(lambda: lab.transport.engines["a"].running)
    lab.transport.members.clear()
    with pytest.raises(ReplicaLost) as caught:
        await lab.collect("a", submit("new"))
    assert not caught.value.suspect
    assert ids(await running) == tokens("old", 50)


async def test_the_stream_of_a_drained_replica_ends(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve counts an open stream as a request and would wait for it."""
    monkeypatch.setattr(engine_host, "HEARTBEAT_S", 0.02)
    await lab.collect("a", submit())
    lab.transport.hosts["a"].drains = True
    await lab.until(lambda: lab.lost == ["a"])


async def test_an_engine_that_dies_loses_its_sequences(lab: Lab) -> None:
    running = asyncio.create_task(lab.collect("a", submit(max_tokens=100_000)))
    await lab.until(lambda: lab.transport.engines["a"].running)
    lab.transport.engines["a"].die("out of memory")
    with pytest.raises(ReplicaLost, match="out of memory") as caught:
        await asyncio.wait_for(running, engine_host.HEARTBEAT_S / 3)
    assert caught.value.suspect
    assert lab.lost == ["a"]


async def test_a_process_that_vanishes_loses_its_sequences(lab: Lab) -> None:
    running = asyncio.create_task(lab.collect("a", submit(max_tokens=100_000)))
    await lab.until(lambda: lab.transport.engines["a"].running)
    lab.transport.remove("a")
    with pytest.raises(ReplicaLost):
        await running
    assert lab.lost == ["a"]


async def test_a_silent_stream_is_opened_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "STALL_S", 0.05)
    lab.streams.connect("a")
    await lab.until(lambda: lab.transport.streams >= 3)
    assert lab.lost == []


async def test_a_stream_that_breaks_goes_on_where_it_was(lab: Lab) -> None:
    async with aclosing(lab.streams.run("a", submit(max_tokens=50))) as outputs:
        received = [await anext(outputs)]
        lab.transport.rate = 1.0
        await lab.until(lambda: lab.transport.streams >= 2)
        lab.transport.rate = 0.0
        received += [output async for output in outputs]
    assert ids(received) == tokens("r", 50)
    assert lab.transport.offsets["r", 0] >= len(received[0].token_ids)


async def test_a_replica_that_stays_silent_is_lost(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "LOST_S", 0.1)
    running = asyncio.create_task(lab.collect("a", submit(max_tokens=100_000)))
    await lab.until(lambda: lab.transport.engines["a"].running)
    lab.transport.rate = 1.0
    with pytest.raises(ReplicaLost, match="no word"):
        await running


async def test_an_ingress_that_is_gone_leaves_nothing_running(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C32: its sequences are aborted although nobody says so."""
    monkeypatch.setattr(engine_host, "ORPHANED_S", 0.05)
    running = asyncio.create_task(lab.collect("a", submit(max_tokens=100_000)))
    await lab.until(lambda: lab.transport.engines["a"].running)
    await lab.streams.close()
    running.cancel()
    await asyncio.sleep(0.06)
    lab.transport.hosts["a"].drop_orphans()
    await lab.until(lambda: not lab.transport.engines["a"].running)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.02, 0.1, 0.3]))
async def test_every_token_arrives_once_over_a_network_that_fails(seed: int, rate: float) -> None:
    """Lost calls, lost answers, cut streams: what a client sees is what the engine made."""
    chance = random.Random(seed)
    lab = Lab(Transport(chance, rate))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_link, "RETRY_S", 0.0)
        for name in "ab":
            await lab.transport.start(name)
        requests = [submit(f"r{i}", chance.randint(1, 12), chance.randint(0, 1)) for i in range(8)]
        collecting = (lab.collect(chance.choice("ab"), request) for request in requests)
        results = await asyncio.wait_for(asyncio.gather(*collecting), 20)
        for request, result in zip(requests, results, strict=True):
            assert ids(result) == tokens(request.request_id, request.sampling.max_tokens)
        await lab.close()
