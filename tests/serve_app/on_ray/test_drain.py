"""Replicas and ingresses taken out of service under long streams."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve_app.on_ray.flood import Flood, Stream, bodies, texts_of
from tests.serve_app.on_ray.site import (
    ADMIN_KEY,
    Site,
    actors,
    ask_all_the_while,
    engines,
    until,
)

TOKENS = 600
STREAMS = bodies(40, 10, TOKENS)
PROMPT_TOKENS = sum(len(body["prompt"]) for body in STREAMS)
OUTPUT_TOKENS = len(STREAMS) * TOKENS
GRACE_S = 2.0


@pytest.fixture(scope="module")
async def expected(running_site: Site) -> list[str]:
    return await texts_of(running_site, STREAMS)


async def has(replicas: int) -> bool:
    return len(engines()) == len(actors("Replica")) == replicas


async def journaled(site: Site) -> tuple[int, int]:
    """Prompt and output tokens of the last day: the journal outlives an Admission."""
    await until(site.at_rest)
    async with site.http(ADMIN_KEY) as client:
        answer = await client.get("/admin/usage?tenant=bulk")
    rows = answer.json()["data"]
    return sum(row["prompt_tokens"] for row in rows), sum(row["output_tokens"] for row in rows)


async def test_fifty_long_streams_read_the_same_while_a_replica_is_removed(
    site: Site, expected: list[str]
) -> None:
    """C56."""
    async with Flood(site, STREAMS) as flood:
        await site.deploy(Replica={"num_replicas": 1})
        assert await flood.texts() == expected
    await until(lambda: has(1), 30)
    await site.deploy()


@pytest.mark.long
async def test_fifty_long_streams_read_the_same_while_everything_is_replaced(
    site: Site, expected: list[str], pytestconfig: pytest.Config
) -> None:
    """New tenants, other settings of the engine: Serve replaces Admission, too. Streams follow on
    streams, and requests that come meanwhile are served."""
    before, charged = {*actors("")}, await journaled(site)
    tenants = {"tenants": site.tenants, "revision": 7}
    done = asyncio.Event()
    asking = asyncio.create_task(ask_all_the_while(site, done))
    change = {"engine": {"max_step_tokens": 256}, "Admission": {"user_config": tenants}}
    changing = asyncio.create_task(site.deploy(**change))
    floods = 1 + pytestconfig.getoption("kills")
    for _ in range(floods):
        assert await texts_of(site, STREAMS) == expected
    await changing
    done.set()
    assert await asking > 0
    assert not before & {*actors("")}
    prompt, output = charged[0] + floods * PROMPT_TOKENS, charged[1] + floods * OUTPUT_TOKENS
    assert await journaled(site) == (prompt, output)
    await site.deploy()


async def finished(site: Site) -> int:
    return sum(stats.finished.get("length", 0) for stats in await site.stats())


def is_cut(stream: Stream) -> bool:
    """Whether it ended with an error event, and not as if it were whole."""
    if stream.data.endswith(b"data: [DONE]\n\n"):
        return False
    assert stream.told[-1]["error"]["code"] == "unavailable"
    return True


async def test_what_outlasts_the_grace_goes_on_elsewhere_or_ends_visibly(site: Site) -> None:
    """C35. A replica hands its streams to the other one; the streams of an ingress end with an
    error event before it is killed, and nothing is left of them. All streams read the same, so
    those that were not moved say what is right."""
    same, grace = bodies(1, 0, 2000) * 16, {"grace_s": GRACE_S}
    await site.deploy(args=grace)
    async with Flood(site, same) as flood:
        one = {"num_replicas": 1}
        await site.deploy(args=grace, Replica=one, Ingress=one)
        await until(lambda: has(1), 30)
        assert flood.running
        await flood.ended()
    whole = [stream for stream in flood.streams if not is_cut(stream)]
    assert 0 < len(whole) < len(same)
    assert len({stream.text for stream in whole}) == 1
    assert await finished(site) == len(whole)
    assert len(actors("Ingress")) == 1
    await until(site.at_rest, 5)
    await site.deploy()


async def test_a_replica_that_starts_is_given_up_before_one_that_runs(site: Site) -> None:
    """R43. Which one goes is Serve's choice."""
    before = set(actors("Replica"))
    done = asyncio.Event()
    asking = asyncio.create_task(ask_all_the_while(site, done))
    growing = asyncio.create_task(site.deploy(Replica={"num_replicas": 4}))

    async def some_start() -> bool:
        return len(actors("Replica")) > len(before)

    await until(some_start, 30)
    await site.deploy()
    await growing
    await until(lambda: has(2), 60)
    assert set(actors("Replica")) == before
    done.set()
    assert await asking > 0
