"""Fairness on a live server: weights 1:3 under overload, and a tenant that arrives late.

Two tenants keep more requests open than the server has room for. Their shares of output tokens
are compared with their weights. Then one floods alone, and the other's first request comes late:
how long it waits for its first token is compared with what the flood's requests wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean

from openai import AsyncOpenAI

from benchmarks.client import Answer, Flood, stream
from benchmarks.report import Report
from benchmarks.server import Server, serving

WEIGHTS = {"demo-alice": 1, "demo-bob": 3}
OPEN_REQUESTS = 32
ANSWER_TOKENS = (8, 16, 24, 32)
"""Lengths of answers, in turn: equal ones would all end in the same step."""
RAMP_S = 20.0
"""Whoever comes first fills the idle server; the other is then served until they are even."""
ALONE_S = 15.0


async def ask(client: AsyncOpenAI, model: str, turn: int) -> Answer:
    length = ANSWER_TOKENS[turn % len(ANSWER_TOKENS)]
    return await stream(client, model, f"Story number {turn}:", length)


def flood_of(server: Server, key: str) -> Flood:
    return Flood(
        server.base_url, key, OPEN_REQUESTS, lambda client, turn: ask(client, server.model, turn)
    )


def tokens_between(flood: Flood, start: float, end: float) -> int:
    return sum(answer.tokens for when, answer in flood.finished if start <= when < end)


async def shares(server: Server, seconds: float) -> Counter[str]:
    """Output tokens per tenant over `seconds` of overload, after a ramp."""
    async with AsyncExitStack() as stack:
        floods = {key: await stack.enter_async_context(flood_of(server, key)) for key in WEIGHTS}
        await asyncio.sleep(RAMP_S)
        start = time.monotonic()
        await asyncio.sleep(seconds)
        end = time.monotonic()
    return Counter({key: tokens_between(flood, start, end) for key, flood in floods.items()})


async def late(server: Server) -> tuple[float, float]:
    """Bob floods; alice's first request comes late. Seconds to first tokens: hers, bob's mean."""
    client = AsyncOpenAI(base_url=server.base_url, api_key="demo-alice", max_retries=0)
    async with client, flood_of(server, "demo-bob") as flood:
        await asyncio.sleep(ALONE_S)
        answer = await ask(client, server.model, 0)
    steady = flood.finished[OPEN_REQUESTS:]  # the first found the server idle
    return answer.first_s, fmean(other.first_s for _, other in steady)


def measure(report: Report, config: Path, seconds: float, runs: int) -> None:
    """Add the figures of both scenarios."""
    with serving(config) as server:
        for run in range(runs):
            tokens = asyncio.run(shares(server, seconds))
            total = tokens.total()
            print(f"run {run}: {dict(tokens)}, share of bob {tokens['demo-bob'] / total:.4f}")
            report.figures[f"live_ratio.run{run}"] = tokens["demo-bob"] / tokens["demo-alice"]
        ratios = [report.figures[f"live_ratio.run{run}"] for run in range(runs)]
        report.add("share_error.live_weights", [abs(ratio / 3 - 1) for ratio in ratios])
        waits = [asyncio.run(late(server)) for _ in range(runs)]
        report.add("first_token_s.late", [late_s for late_s, _ in waits])
        report.add("first_token_s.flood", [flood_s for _, flood_s in waits])
