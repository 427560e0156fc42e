"""A fleet whose replicas sleep: the first request waits for one."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.fleet.fleet import Fleet
from serve_app.protocol.backend import ShuttingDown
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.telemetry.records import RequestRecord
from tests.serve_app.fleet_world import SLOTS, World, until


async def test_where_replicas_sleep_the_first_request_waits_for_one_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody is turned away meanwhile: `/ready` stays 200. Its record tells the wait."""
    record = RequestRecord()
    monkeypatch.setattr(records, "current", lambda: record)
    world = World()
    sleepy = Fleet("model", world.client, world.streams, sleeps=True)
    await world.start()
    await until(lambda: world.client.silence_s < 1)
    await sleepy.check_ready()
    asked = asyncio.create_task(sleepy.model())
    await until(lambda: world.admission.syncs[-1].sleepers == {"model": 1})
    assert world.admission.router.workload()["model"].waiting == 1
    await world.transport.start("a", 0.001)
    world.admission.offer("a", SLOTS)
    world.streams.connect("a")
    assert (await asked).name == "model"
    waited_s = record.breakdown.so_far()[Phase.ADMISSION]
    assert record.held_back() == {"no_replica": pytest.approx(waited_s)}
    assert waited_s > record.breakdown.seconds[Phase.PREPARE]
    await until(lambda: not world.admission.syncs[-1].sleepers)
    await world.close()


async def test_who_waits_for_a_first_replica_hears_that_the_ingress_goes() -> None:
    world = World()
    sleepy = Fleet("model", world.client, world.streams, sleeps=True)
    await world.start()
    asked = asyncio.create_task(sleepy.model())
    await until(lambda: world.admission.syncs and world.admission.syncs[-1].sleepers)
    world.client.fail(ShuttingDown())
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(asked, 1)
    await until(lambda: not world.admission.syncs[-1].sleepers)
    await world.close()
