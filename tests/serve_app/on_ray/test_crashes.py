"""Processes killed at random moments, under load, again and again.

The long form, with figures: `pytest tests/serve_app/on_ray/test_crashes.py --kills 20 -s`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from tests.oracle import Oracle
from tests.serve_app.on_ray.site import (
    Site,
    actors,
    complete,
    engines,
    kill,
    processes,
    stream,
    until,
)

LENGTH = 200
VICTIMS: dict[str, Callable[[], list[int]]] = {
    "engine": engines,
    "replica": lambda: actors("Replica"),
    "ingress": lambda: actors("Ingress"),
    "admission": lambda: actors("Admission"),
}
# Long prompts are still computed when the blow comes; short ones stream.
PROMPTS = [f"{number}: " + "what came before? " * (20 * (number % 3)) for number in range(16)]


@pytest.fixture(scope="session")
def answers(model: str) -> dict[str, str]:
    """The reference's answers, by prompt; without the end of the sequence."""
    oracle = Oracle(model, LENGTH)
    ids = {prompt: oracle.greedy(tuple(prompt.encode()), LENGTH) for prompt in PROMPTS}
    return {
        prompt: bytes(token for token in tokens if token < 256).decode(errors="replace")
        for prompt, tokens in ids.items()
    }


@dataclass
class Tally:
    """What became of the requests of all kills of one kind."""

    requests: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)

    def summary(self, kind: str) -> str:
        times = {
            "recovery_s_median": round(statistics.median(self.recovery_s), 2),
            "recovery_s_max": round(max(self.recovery_s), 2),
        }
        kills = len(self.recovery_s)
        return json.dumps({"killed": kind, "kills": kills, **self.requests, **times})


async def one_kill(site: Site, rng: random.Random, kind: str, answers: dict[str, str]) -> Tally:
    """16 requests, half streamed, and a blow somewhere among them."""
    tally = Tally()
    calls = [stream if number % 2 else complete for number in range(len(PROMPTS))]
    async with site.openai() as client:
        running = [
            asyncio.create_task(call(client, prompt, LENGTH))
            for call, prompt in zip(calls, PROMPTS, strict=True)
        ]
        await asyncio.sleep(rng.random() * 0.8)
        victim = rng.choice(VICTIMS[kind]())
        kill(victim)
        struck = time.monotonic()
        results = await asyncio.gather(*running, return_exceptions=True)
    for prompt, result in zip(PROMPTS, results, strict=True):
        if isinstance(result, str):
            assert result == answers[prompt], "an answer that looks whole is not"
            tally.requests["whole"] += 1
        else:
            assert isinstance(result, openai.APIError | httpx.HTTPError), repr(result)
            tally.requests["error"] += 1
    async with site.http() as client:
        await until(lambda: _complete(site, client, victim), 60)
    tally.recovery_s.append(time.monotonic() - struck)
    return tally


async def _complete(site: Site, client: httpx.AsyncClient, victim: int) -> bool:
    """All processes are back, and everything that requests held is free."""
    if victim in VICTIMS["ingress"]():
        return False
    try:
        if not await site.all_run():
            return False
        if (await client.get("/ready")).status_code != 200 or len(await site.offering()) < 2:
            return False
        if not await site.at_rest():
            return False
        stats = await site.stats()
    except Exception:
        return False
    return all(one.running == 0 and one.free_blocks == 8192 for one in stats)


@pytest.mark.parametrize("kind", VICTIMS)
async def test_kills_at_random_moments_lose_nothing_but_what_they_must(
    site: Site, answers: dict[str, str], kind: str, pytestconfig: pytest.Config
) -> None:
    """Requests go on elsewhere when an engine, its actor or Admission dies; only those that a
    dead ingress held fail, and visibly. Rows, blocks and leases are back each time."""
    rng = random.Random(kind)
    total = Tally()
    for _ in range(pytestconfig.getoption("kills")):
        tally = await one_kill(site, rng, kind, answers)
        total.requests += tally.requests
        total.recovery_s += tally.recovery_s
        if kind != "ingress":
            assert tally.requests["error"] == 0, tally
    print(total.summary(kind))


async def test_an_engine_that_hangs_is_replaced_and_its_requests_go_on(
    site: Site, answers: dict[str, str]
) -> None:
    """A stopped process answers nothing and does not end: only silence gives it away."""
    async with site.openai() as client:
        running = [asyncio.create_task(stream(client, p, LENGTH)) for p in PROMPTS[:8]]
        await asyncio.sleep(0.1)
        hung = engines()[0]
        os.kill(hung, signal.SIGSTOP)
        stopped = time.monotonic()

        async def is_unready() -> bool:
            return len(await site.offering()) < 2

        await until(is_unready, 10)
        unready_s = time.monotonic() - stopped
        results = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert results == [answers[prompt] for prompt in PROMPTS[:8]]

    async def is_replaced() -> bool:
        return hung not in processes("replica.process import main") and len(engines()) == 2

    await until(is_replaced, 60)
    print(json.dumps({"hung": "engine", "unready_s": round(unready_s, 2)}))
