from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.messages import Output, Sampling, Submit
from router.messages import Outcome
from serve_app.fleet import admission_client, engine_host, fleet, replica_link
from serve_app.protocol.backend import EngineFailure, Enough, Refused, ShuttingDown, Unavailable
from tests.serve_app.fleet_world import SLOTS, World, generation, until
from tests.serve_app.scripted_engine import STEP_GPU_S, tokens


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(replica_link, "RETRY_S", 0.001)
    monkeypatch.setattr(engine_host, "HEARTBEAT_S", 0.05)
    world = World()
    yield world
    await until(world.at_rest)
    await world.close()


async def test_a_request_gets_its_tokens_and_succeeds(world: World) -> None:
    await world.start("a")
    assert await world.collect(generation(max_tokens=6)) == tokens("r", 6)
    await until(world.at_rest)
    assert world.outcomes()[Outcome.SUCCEEDED] == 1


async def test_the_engine_is_told_what_concerns_it(world: World) -> None:
    await world.start("a")
    await world.collect(generation())
    submits = [c for c in world.transport.engines["a"].commands if isinstance(c, Submit)]
    assert submits == [
        Submit(
            request_id="r",
            prompt_ids=(1, 2, 3),
            sampling=Sampling(max_tokens=5),
            cache_salt="tenant:acme",
        )
    ]


async def test_requests_beyond_the_slots_wait_and_all_are_served(world: World) -> None:
    await world.start("a", "b")
    names = [f"r{index}" for index in range(20)]
    results = await asyncio.gather(
        *(world.collect(generation(name, tenant=index % 2)) for index, name in enumerate(names))
    )
    assert list(results) == [tokens(name, 5) for name in names]


async def test_enough_counts_as_success_and_stops_the_engine(world: World) -> None:
    await world.start("a")
    deltas = world.fleet.generate(generation(max_tokens=1000))
    await anext(deltas)
    with pytest.raises(Enough):
        await deltas.athrow(Enough())
    await until(world.at_rest)
    assert world.outcomes()[Outcome.SUCCEEDED] == 1


async def test_what_nobody_needs_is_not_charged(world: World) -> None:
    """Though the engine has computed it, and its GPU time is booked."""
    await world.start("a")
    deltas = world.fleet.generate(generation(max_tokens=6))
    received = 0
    while received < 6:
        received += len((await anext(deltas)).token_ids)
    with pytest.raises(Enough):
        await deltas.athrow(Enough(2))
    await until(world.at_rest)
    usage = world.admission.router.snapshot().usage["acme"]
    assert usage.outcomes[Outcome.SUCCEEDED] == 1
    assert (usage.output_tokens, usage.gpu_s) == (2, 6 * STEP_GPU_S)


async def test_what_came_before_an_engine_gave_up_is_told(world: World) -> None:
    """It may be all that is needed: how it ends must not depend on when it is read."""
    await world.start("a", step_s=60)
    deltas = world.fleet.generate(generation())
    first = asyncio.ensure_future(anext(deltas))
    await until(lambda: any(link.sequences for link in world.streams._links.values()))
    [link] = world.streams._links.values()
    [mailbox] = link.sequences.values()
    mailbox.put(Output("r", 0, 0, (7, 8), None))
    mailbox.put(Output("r", 0, 2, (), "error", error="broken"))
    assert (await first).token_ids == (7, 8)
    with pytest.raises(EngineFailure, match="broken"):
        await anext(deltas)


async def test_closing_early_counts_as_cancelled_and_stops_the_engine(world: World) -> None:
    """C32, R49."""
    await world.start("a")
    async with aclosing(world.fleet.generate(generation(max_tokens=1000))) as deltas:
        await anext(deltas)
    await until(world.at_rest)
    assert world.outcomes()[Outcome.CANCELLED] == 1


async def test_being_cancelled_in_the_queue_counts_as_cancelled(world: World) -> None:
    """C32."""
    await world.start("a")
    world.admission.offer("a", 0)
    task = asyncio.create_task(world.collect(generation()))
    await until(lambda: world.admission.router.snapshot().queued)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(world.at_rest)
    assert world.outcomes()[Outcome.CANCELLED] == 1


async def test_a_refusal_reaches_the_caller_and_is_booked_nowhere(world: World) -> None:
    """C49, C52."""
    await world.start("a")
    running = asyncio.create_task(world.collect(generation("first", 100, tenant=2)))
    await until(lambda: world.transport.engines["a"].running)
    with pytest.raises(Refused):
        await world.collect(generation("second", tenant=2))
    await running
    await until(world.at_rest)
    assert sum(world.outcomes().values()) == 1


async def test_a_request_that_sent_nothing_starts_again_elsewhere(world: World) -> None:
    await world.start("a", step_s=60)
    task = asyncio.create_task(world.collect(generation()))
    await until(lambda: world.transport.engines["a"].running)
    await world.transport.start("b", 0.001)
    world.admission.offer("b", SLOTS)
    world.transport.remove("a")
    assert await asyncio.wait_for(task, 3) == tokens("r", 5)
    await until(world.at_rest)
    usage = world.admission.router.snapshot().usage["acme"]
    assert usage.outcomes[Outcome.SUCCEEDED] == 1
    assert usage.prompt_tokens == 3


async def test_the_time_to_the_first_token_is_measured_once_and_in_seconds(world: World) -> None:
    """R50: from the arrival to the first token, not to the first message."""
    await world.start("a", step_s=0.3)
    await world.collect(generation(max_tokens=3))
    await until(world.at_rest)
    [latency] = world.admission.router.latencies.take()
    assert latency.model == "model"
    assert 0.25 < latency.first_token_s <= 0.5
    assert latency.token_s == pytest.approx(0.3, abs=0.15)
    assert world.admission.router.latencies.take() == []


async def test_what_a_prompt_took_that_nobody_waits_for_is_its_tenants(world: World) -> None:
    """Nothing has told of it before the first token, but the engine does when it stops."""
    await world.start("a", step_s=0.05)
    asking = asyncio.create_task(world.collect(generation(max_tokens=200)))
    await until(lambda: world.transport.engines["a"].running)
    asking.cancel()
    await until(world.at_rest)
    usage = world.admission.router.snapshot().usage["acme"]
    assert (usage.outcomes[Outcome.CANCELLED], usage.output_tokens) == (1, 0)
    assert usage.gpu_s == STEP_GPU_S


async def test_a_request_that_sent_something_goes_on_elsewhere_without_a_gap(
    world: World,
) -> None:
    await world.start("a")
    deltas = world.fleet.generate(generation(max_tokens=200))
    received = list((await anext(deltas)).token_ids)
    await world.transport.start("b", 0.001)
    world.admission.offer("b", SLOTS)
    world.transport.remove("a")
    async for delta in deltas:
        received += delta.token_ids
    assert tuple(received) == tokens("r", 200)
    await until(world.at_rest)
    usage = world.admission.router.snapshot().usage["acme"]
    assert usage.outcomes[Outcome.SUCCEEDED] == 1
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 200)
    assert usage.gpu_s == 200 * STEP_GPU_S


async def test_a_replica_that_is_removed_hands_back_what_has_not_begun(world: World) -> None:
    """Others take it at once. What has begun stays where it is."""
    await world.start("a", step_s=0.05)
    deltas = world.fleet.generate(generation("begun", 10))
    received = list((await anext(deltas)).token_ids)
    task = asyncio.create_task(world.collect(generation("new")))
    await until(lambda: ("new", 0) in world.transport.engines["a"].running)
    await world.transport.start("b", 0.001)
    world.admission.offer("b", SLOTS)
    world.transport.hosts["a"].hand_back(begun=False)
    assert await asyncio.wait_for(task, 3) == tokens("new", 5)
    async for delta in deltas:
        received += delta.token_ids
    assert tuple(received) == tokens("begun", 10)
    submits = [c for c in world.transport.engines["b"].commands if isinstance(c, Submit)]
    assert [submit.request_id for submit in submits] == ["new"]


async def test_being_handed_back_again_and_again_fails_no_request(world: World) -> None:
    """The clock of a removal runs out more often than an engine may die."""
    await world.start("a", step_s=0.01)
    deltas = world.fleet.generate(generation(max_tokens=60))
    received: list[int] = []
    for hand_back in [True] * (2 * fleet.MAX_LOST_REPLICAS) + [False]:
        received += (await anext(deltas)).token_ids
        if hand_back:
            world.transport.hosts["a"].hand_back(begun=True)
    async for delta in deltas:
        received += delta.token_ids
    assert tuple(received) == tokens("r", 60)
    await until(world.at_rest)
    usage = world.admission.router.snapshot().usage["acme"]
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 60)


async def test_a_request_that_brings_engines_down_is_not_tried_for_ever(world: World) -> None:
    await world.start("a", "b", "c", step_s=60)
    task = asyncio.create_task(world.collect(generation()))
    engines = world.transport.engines
    for _ in range(fleet.MAX_LOST_REPLICAS):
        await until(lambda: any(engine.running for engine in engines.values()))
        world.transport.remove(next(name for name, e in engines.items() if e.running))
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(task, 3)
    assert len(world.transport.engines) == 1


async def test_being_turned_away_is_no_reason_to_give_up(world: World) -> None:
    await world.start("a")
    world.transport.members.clear()
    task = asyncio.create_task(world.collect(generation()))
    for count in range(1, 2 * fleet.MAX_LOST_REPLICAS):
        await until(lambda: world.transport.turned_away == count)  # noqa: B023
        world.admission.offer("a", SLOTS)
    world.transport.members.add("a")
    world.admission.offer("a", SLOTS)
    assert await asyncio.wait_for(task, 3) == tokens("r", 5)


async def test_a_sequence_that_the_engine_gives_up_is_a_failure(world: World) -> None:
    """C19, R20: never an answer that looks whole."""
    await world.start("a", step_s=0.01)
    task = asyncio.create_task(world.collect(generation(max_tokens=500)))
    await until(lambda: world.transport.engines["a"].running)
    world.transport.engines["a"].give_up("r", "it does not fit")
    with pytest.raises(EngineFailure, match="it does not fit"):
        await task
    await until(world.at_rest)
    assert world.outcomes()[Outcome.FAILED] == 1


async def test_a_replica_that_leaves_turns_new_requests_away_to_others(world: World) -> None:
    """C56: not one is failed by a replica that drains."""
    await world.start("a", "b")
    world.transport.members.discard("a")
    results = await asyncio.gather(*(world.collect(generation(f"r{i}")) for i in range(3)))
    assert list(results) == [tokens(f"r{i}", 5) for i in range(3)]


async def test_what_a_shutdown_cuts_short_ends_with_an_error_and_leaves_nothing(
    world: World,
) -> None:
    """C35: what runs, behind the tokens that came, and what waits."""
    await world.start("a", step_s=0.01)
    deltas = world.fleet.generate(generation("runs", max_tokens=1000))
    await anext(deltas)
    world.admission.offer("a", 0)
    waits = asyncio.create_task(world.collect(generation("waits")))
    await until(lambda: world.admission.router.snapshot().queued)
    world.client.fail(ShuttingDown())
    world.streams.fail(ShuttingDown())
    with pytest.raises(ShuttingDown):
        await waits
    with pytest.raises(ShuttingDown):
        async for _ in deltas:
            pass
    await until(world.at_rest)
    assert world.outcomes()[Outcome.FAILED] == 1


async def test_there_is_no_model_before_a_replica_is_up_and_admission_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "JOIN_S", 0.2)
    with pytest.raises(Unavailable):
        await world.fleet.model()
    await world.start("a")
    await until(lambda: world.fleet.ready)
    assert (await world.fleet.model()).vocab_size == 256


async def test_what_comes_before_the_first_replica_is_heard_of_waits_a_little(
    world: World,
) -> None:
    """C56: Serve sends requests to an ingress as soon as its constructor has returned."""
    asked = asyncio.create_task(world.fleet.model())
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await world.fleet.check_ready()
    await world.start("a")
    assert (await asked).vocab_size == 256


async def test_there_is_no_model_while_admission_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FRESH_S", 0.3)
    await world.start("a")
    await until(lambda: world.fleet.ready)
    assert (await world.fleet.model()).name == "model"
    world.admission.away = True
    await until(lambda: not world.fleet.ready)
    with pytest.raises(Unavailable):
        await world.fleet.model()
    world.admission.away = False


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.0, 0.05, 0.2]))
async def test_nothing_leaks_and_nothing_ends_twice_whatever_fails(seed: int, rate: float) -> None:
    """C32: cancellations at any moment, a network that fails, a replica that dies."""
    chance = random.Random(seed)
    world = World(chance, rate)
    seen: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    async def client(index: int) -> None:
        request = generation(f"r{index}", chance.randint(1, 12), chance.randint(0, 1))
        task = asyncio.create_task(world.collect(request))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, tuple):
            assert result == tokens(request.request_id, request.sampling.max_tokens)
            seen[Outcome.SUCCEEDED] += 1
        elif isinstance(result, EngineFailure):
            seen[Outcome.FAILED] += 1
        else:
            assert isinstance(result, asyncio.CancelledError), result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_link, "RETRY_S", 0.0)
        patch.setattr(admission_client, "RETRY_S", 0.0)
        patch.setattr(admission_client, "SYNC_PERIOD_S", 0.005)
        await world.start("a", "b", step_s=0.0)
        clients = asyncio.gather(*(client(index) for index in range(12)))
        await asyncio.sleep(chance.random() * 0.02)
        if chance.random() < 0.5:
            world.transport.remove("a")
        await asyncio.wait_for(clients, 20)
        world.transport.rate = world.admission.rate = 0.0
        await until(world.at_rest)
        await world.close()
    booked = world.outcomes()
    assert booked[Outcome.SUCCEEDED] == seen[Outcome.SUCCEEDED]
    assert booked[Outcome.FAILED] == seen[Outcome.FAILED]
