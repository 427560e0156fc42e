"""Clients that leave, over real HTTP and a real router: whatever they held is free again."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from router.messages import Outcome
from tests.serve_app.metered_site import MeteredSite, key_of, metered_site, until

SOON_S = 0.1


def at_rest(site: MeteredSite) -> bool:
    """No request, no lease, no hold, no row."""
    state = site.admission.router.snapshot()
    return (
        site.client.idle
        and not any(state.ingresses.values())
        and not any(replica.leases for replica in state.replicas.values())
        and not site.transport.engines["r"].running
    )


async def call(site: MeteredSite, stream: bool, n: int = 1) -> asyncio.StreamWriter:
    """A connection on which a long answer was asked for."""
    fields = {"model": "text", "prompt": "hello", "max_tokens": 900, "ignore_eos": True}
    body = json.dumps(fields | {"stream": stream, "n": n}).encode()
    host, port = site.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key_of('a')}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return writer


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("n", [1, 3])
async def test_what_a_client_held_is_free_within_a_tenth_of_a_second(stream: bool, n: int) -> None:
    """C32, C34, X2. The quickest of five: another process may have the processor."""
    async with metered_site(step_s=0.005, a={"tokens_per_minute": 100_000}) as site:
        seconds = []
        for _ in range(5):
            writer = await call(site, stream, n)
            await until(lambda: len(site.transport.engines["r"].running) == n)
            writer.close()
            start = time.monotonic()
            await until(lambda: at_rest(site))
            seconds.append(time.monotonic() - start)
        assert min(seconds) < SOON_S
        outcomes = site.admission.router.snapshot().usage["a"].outcomes
        assert outcomes[Outcome.CANCELLED] == 5 * n
        assert outcomes[Outcome.SUCCEEDED] == outcomes[Outcome.FAILED] == 0


async def test_a_thousand_clients_that_leave_at_any_moment_leave_nothing() -> None:
    """C32: 500 streams and 500 plain calls: before routing, queued, at their prompt, decoding."""
    draw = random.Random(1)

    async def call_and_leave(number: int) -> None:
        writer = await call(site, stream=number % 2 == 0)
        await asyncio.sleep(draw.uniform(0, 0.05))
        writer.close()

    async with metered_site(step_s=0.001, a={"max_queued": 1000}) as site:
        for first in range(0, 1000, 100):
            await asyncio.gather(*map(call_and_leave, range(first, first + 100)))
        await until(lambda: at_rest(site), 1.0)
        usage = site.admission.router.snapshot().usage["a"]
        assert usage.outcomes[Outcome.CANCELLED] > 100
        assert usage.outcomes[Outcome.SUCCEEDED] == usage.outcomes[Outcome.FAILED] == 0
        assert (await site.ask()).status_code == 200


async def test_time_that_ends_in_the_queue_leaves_nothing() -> None:
    async with metered_site(a={"max_concurrency": 1, "max_queued": 5}) as site:
        first = asyncio.create_task(site.ask(max_tokens=900))
        await until(lambda: site.transport.engines["r"].running)
        headers = {"X-Request-Timeout": "0.05", "Authorization": f"Bearer {key_of('a')}"}
        for stream in (False, True):
            body = {"model": "text", "prompt": "hello", "stream": stream}
            late = await site.calls.post("/v1/completions", json=body, headers=headers)
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert (await first).status_code == 200
        await until(lambda: at_rest(site))
