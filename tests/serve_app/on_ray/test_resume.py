"""Replicas killed under streams: each client reads what it would have read anyway.

The long form, with figures: `pytest tests/serve_app/on_ray/test_resume.py --kills 20 -s`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from tests.serve_app.on_ray.conftest import REPLICAS
from tests.serve_app.on_ray.flood import Flood, bodies, undisturbed
from tests.serve_app.on_ray.site import Site, actors, engines, kill, until

TOKENS = 200
STREAMS = bodies(20, 20, TOKENS)
PROMPT_TOKENS = sum(len(body["prompt"]) for body in STREAMS)


@pytest.fixture(scope="module")
async def expected(running_site: Site) -> list[str]:
    return await undisturbed(running_site, STREAMS)


async def used(site: Site) -> tuple[int, int]:
    """Prompt and output tokens that were charged, once everything is settled."""
    await until(site.at_rest)
    usage = (await site.snapshot()).usage["bulk"]
    return usage.prompt_tokens, usage.output_tokens


async def all_run_again(site: Site) -> bool:
    return await site.all_run() and len(await site.offering()) == REPLICAS


@pytest.mark.parametrize("part", ["engine", "actor"])
async def test_streams_outlive_their_replica(
    site: Site, expected: list[str], part: str, pytestconfig: pytest.Config
) -> None:
    """Greedy or drawn, to the last token; and each token is charged once."""
    rng = random.Random(part)
    pauses, back = [], []
    for _ in range(pytestconfig.getoption("kills")):
        prompt, output = await used(site)
        async with Flood(site, STREAMS) as flood:
            await asyncio.sleep(rng.random() * 0.3)
            running = flood.running
            struck = time.monotonic()
            kill(rng.choice(engines() if part == "engine" else actors("Replica")))
            assert await flood.texts() == expected
        assert running == len(STREAMS)
        pauses.append(max(stream.longest_gap_s for stream in flood.streams))
        assert await used(site) == (prompt + PROMPT_TOKENS, output + len(STREAMS) * TOKENS)
        await until(lambda: all_run_again(site), 60)
        back.append(time.monotonic() - struck)
    figures = {"kills": len(pauses), "pause_s_max": max(pauses), "back_s_max": max(back)}
    print(json.dumps({"killed": part, "streams": len(STREAMS), **figures}))
