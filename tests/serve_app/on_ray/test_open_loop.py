"""Requests that come at a fixed rate, whatever becomes of those before, while processes go."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.serve_app.on_ray.flood import Flood, bodies, texts_of
from tests.serve_app.on_ray.site import BULK_KEY, MODEL, Site, actors, until

RATE = 50.0
"""Requests a second."""
SHRINKS = 10
QUICK_S = 25.0
"""A process that took new work until Serve kills it would stay for its grace, 60 s."""
SHORT = {"model": MODEL, "prompt": "short", "max_tokens": 4, "ignore_eos": True, "stream": True}
LONG = bodies(4, 0, 600)


class OpenLoop:
    """Streams over connections that are kept alive. What is wrong with an answer is told."""

    def __init__(self, site: Site) -> None:
        self._client = httpx.AsyncClient(
            base_url=site.url,
            headers={"Authorization": f"Bearer {BULK_KEY}"},
            timeout=60,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.failures: list[str] = []

    @property
    def asked(self) -> int:
        return len(self._tasks)

    async def keep_asking(self) -> None:
        """At the times that the rate gives: if the machine is late, it catches up."""
        began = time.monotonic()
        while True:
            self._tasks.append(asyncio.create_task(self._ask()))
            await asyncio.sleep(began + self.asked / RATE - time.monotonic())

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _ask(self) -> None:
        try:
            answer = await self._client.post("/v1/completions", json=SHORT)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code != 200 or not answer.content.endswith(b"data: [DONE]\n\n"):
            self.failures.append(f"{answer.status_code} {answer.text[-300:]}")


@asynccontextmanager
async def open_loop(site: Site) -> AsyncIterator[OpenLoop]:
    loop = OpenLoop(site)
    asking = asyncio.create_task(loop.keep_asking())
    try:
        yield loop
    finally:
        asking.cancel()
        await loop.finish()


@pytest.mark.long
async def test_removals_under_an_open_loop_fail_no_request(site: Site) -> None:
    """C56. Replicas and ingresses go ten times, while short streams keep coming and long ones run;
    then all processes are replaced."""
    # Its requests may wait in any number: only what a removal does to them is of interest.
    patience = {"max_concurrency": 1000, "max_queued": 100_000}
    patient = {"user_config": {"tenants": [tenant | patience for tenant in site.tenants]}}
    one = {"num_replicas": 1}

    async def one_of_each() -> bool:
        return len(actors("Replica")) == len(actors("Ingress")) == 1

    async def all_are_new() -> bool:
        return not before & {*actors("")}

    expected, gone_s = await texts_of(site, LONG), []
    await site.deploy(Admission=patient)
    async with open_loop(site) as loop:
        for _ in range(SHRINKS):
            async with Flood(site, LONG) as flood:
                began = time.monotonic()
                await site.deploy(Admission=patient, Replica=one, Ingress=one)
                assert await flood.texts() == expected
            await until(one_of_each, QUICK_S)
            gone_s.append(round(time.monotonic() - began, 1))
            await site.deploy(Admission=patient)
        before = {*actors("")}
        await site.deploy(engine={"max_step_tokens": 256}, Admission=patient)
        await until(all_are_new, QUICK_S)
    print(json.dumps({"asked": loop.asked, "failures": len(loop.failures), "gone_s": gone_s}))
    assert loop.failures == []
    await site.deploy()
