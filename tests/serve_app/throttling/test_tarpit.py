"""Refusals that come too often wait for their turn; nobody else's do."""

from __future__ import annotations

import asyncio
import itertools
import time

import httpx

from router.tenant import Tenant, Tenants, digest
from serve_app.http.models import Offer
from serve_app.protocol.limits import Limits
from serve_app.throttling import tarpit
from serve_app.throttling.tarpit import BURST, MAX_HELD, MAX_WAIT_S, PER_S, Tarpit
from tests.router.world import Clock
from tests.serve_app.conftest import serve_offers
from tests.serve_app.text_backend import TextBackend

CONNECTIONS, FLOOD_S = 16, 2.0


async def waits(pit: Tarpit, sender: str, count: int) -> list[float]:
    """Seconds that each of so many has to wait, all at once."""
    began = time.monotonic()

    async def held() -> float:
        await pit.hold(sender)
        return time.monotonic() - began

    return sorted(await asyncio.gather(*(held() for _ in range(count))))


async def test_few_wait_for_nothing_and_more_for_their_turn() -> None:
    times = await waits(Tarpit(), "a", BURST + 25)
    assert times[BURST - 1] < 0.1
    assert 24 / PER_S <= times[-1] < 24 / PER_S + 0.3
    assert all(later - earlier < 0.1 for earlier, later in itertools.pairwise(times))


async def test_nothing_waits_for_longer_than_a_second() -> None:
    times = await waits(Tarpit(), "a", 300)
    assert MAX_WAIT_S <= times[-1] < MAX_WAIT_S + 0.5


async def test_another_sender_waits_for_nothing() -> None:
    pit = Tarpit()
    flood = asyncio.create_task(waits(pit, "a", 300))
    await asyncio.sleep(0.05)
    assert (await waits(pit, "b", 3))[-1] < 0.1
    await flood


async def test_a_flood_is_forgotten_when_it_has_been_over_for_a_while() -> None:
    """However long it was."""
    clock = Clock()
    pit = Tarpit(clock)
    await waits(pit, "a", 1000)
    clock.now += MAX_WAIT_S + BURST / PER_S + 1 / PER_S
    assert (await waits(pit, "a", BURST))[-1] < 0.1


async def test_so_many_are_held_at_most_and_so_many_senders_known(monkeypatch) -> None:
    monkeypatch.setattr(tarpit, "MAX_SENDERS", 3)
    pit = Tarpit()
    times = await waits(pit, "a", BURST + MAX_HELD + 200)
    assert sum(each < MAX_WAIT_S / PER_S for each in times) >= BURST + 200
    for sender in "bcdefg":
        await pit.hold(sender)
    assert len(pit._due) == 3


async def test_a_closed_loop_of_refusals_is_slow_over_http(tokenizer) -> None:
    """Without a key and with one, whatever is wrong; and a good request is not."""
    tenants = Tenants(tenants=[Tenant(id=name, keys=[digest(name)]) for name in ("bad", "good")])
    offer = Offer("text", TextBackend(), tokenizer)
    limits = Limits(refusals_per_minute=10**6)
    with serve_offers([offer], limits, tenants) as site:
        async with httpx.AsyncClient(base_url=site.url, timeout=10) as client:
            until = time.monotonic() + FLOOD_S

            async def flood(key: str) -> int:
                refused = 0
                while time.monotonic() < until:
                    answer = await client.post("/v1/completions", json={}, headers=bearer(key))
                    refused += answer.status_code in (400, 401)
                return refused

            floods = [
                asyncio.create_task(flood(key))
                for key in ("none", "bad")
                for _ in range(CONNECTIONS)
            ]
            await asyncio.sleep(FLOOD_S / 2)
            began = time.monotonic()
            body = {"model": "text", "prompt": "hi"}
            answer = await client.post("/v1/completions", json=body, headers=bearer("good"))
            took_s = time.monotonic() - began
            refused = sum(await asyncio.gather(*floods))
    assert answer.status_code == 200
    assert took_s < 0.5
    assert 2 * BURST <= refused <= 2 * (BURST + FLOOD_S * PER_S + CONNECTIONS)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
