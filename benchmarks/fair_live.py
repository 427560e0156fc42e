"""Fairness on a live server: shares by weight, a tenant that arrives late, and a flood.

Two tenants keep more requests open than the server has room for. Their shares of output tokens
are compared with their weights. Then one floods alone, and the other's first request comes late:
how long it waits for its first token is compared with what the flood's requests wait. At last one
asks far more often than it may, and the other's first tokens are compared with those alone.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import fmean

import numpy as np
import yaml
from openai import AsyncOpenAI

from benchmarks.client import Answer, Flood, stream
from benchmarks.report import Report
from benchmarks.server import OUR_RUN, Server, behind_haproxy, running, serving
from router.tenant import digest

WEIGHTS = {"demo-alice": 1, "demo-bob": 3}
OPEN_REQUESTS = 32
ANSWER_TOKENS = (8, 16, 24, 32)
"""Lengths of answers, in turn: equal ones would all end in the same step."""
ALONE_S = 15.0
"""So long a flood lasts before what is beside it is looked at."""
FLOODER, VICTIM, VICTIM_TOKENS = "demo-alice", "demo-bob", 8
FLOODER_PER_MINUTE = 60
SETTLE_S = 5.0
PAUSE_S = 0.2
"""Between the victim's requests."""


async def ask(client: AsyncOpenAI, model: str, turn: int) -> Answer:
    length = ANSWER_TOKENS[turn % len(ANSWER_TOKENS)]
    return await stream(client, model, f"Story number {turn}:", length)


def flood_of(server: Server, key: str) -> Flood:
    return Flood(
        server.base_url, key, OPEN_REQUESTS, lambda client, turn: ask(client, server.model, turn)
    )


def tokens_until(flood: Flood, end: float) -> int:
    return sum(answer.tokens for when, answer in flood.finished if when < end)


async def shares(server: Server, seconds: float) -> Counter[str]:
    """Output tokens per tenant of the answers that ended within `seconds` of overload, from the
    first request on."""
    async with AsyncExitStack() as stack:
        floods = {key: await stack.enter_async_context(flood_of(server, key)) for key in WEIGHTS}
        start = time.monotonic()
        await asyncio.sleep(seconds)
    end = start + seconds
    return Counter({key: tokens_until(flood, end) for key, flood in floods.items()})


async def late(server: Server) -> tuple[float, float]:
    """Bob floods; alice's first request comes late. Seconds to first tokens: hers, bob's mean."""
    client = AsyncOpenAI(base_url=server.base_url, api_key="demo-alice", max_retries=0)
    async with client, flood_of(server, "demo-bob") as flood:
        await asyncio.sleep(ALONE_S)
        answer = await ask(client, server.model, 0)
    steady = flood.finished[OPEN_REQUESTS:]  # the first found the server idle
    return answer.first_s, fmean(other.first_s for _, other in steady)


async def first_tokens(server: Server, seconds: float) -> list[float]:
    """Bob asks one thing after the other: seconds to each first token."""
    until, times = time.monotonic() + seconds, list[float]()
    client = AsyncOpenAI(base_url=server.base_url, api_key=VICTIM, max_retries=0)
    async with client:
        while time.monotonic() < until:
            answer = await stream(client, server.model, "Once upon a time", VICTIM_TOKENS)
            times.append(answer.first_s)
            await asyncio.sleep(PAUSE_S)
    return times


def flooded(server: Server, seconds: float) -> tuple[list[float], dict[str, int]]:
    """Bob's first tokens while alice floods from a process of her own; her answers by status."""
    url = server.base_url.removesuffix("/v1")
    flood = ["flood", url, FLOODER, server.model, str(seconds + SETTLE_S), "127.0.0.1"]
    command = [sys.executable, "-m", "benchmarks.attacks", *flood]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        time.sleep(SETTLE_S)
        times = asyncio.run(first_tokens(server, seconds))
        said, _ = attack.communicate(timeout=seconds + 120)
    return times, json.loads(said.splitlines()[-1])


def measure(report: Report, config: Path, seconds: float, runs: int) -> None:
    """Add the figures of shares and of who comes late."""
    with serving(config) as server:
        for run in range(runs):
            tokens = asyncio.run(shares(server, seconds))
            total = tokens.total()
            print(f"run {run}: {dict(tokens)}, share of bob {tokens['demo-bob'] / total:.4f}")
            report.figures[f"live_ratio.run{run}"] = tokens["demo-bob"] / tokens["demo-alice"]
        ratios = [report.figures[f"live_ratio.run{run}"] for run in range(runs)]
        report.add("live_share_error", [_share_error(ratio) for ratio in ratios])
        waits = [asyncio.run(late(server)) for _ in range(runs)]
        report.add("first_token_s.late", [late_s for late_s, _ in waits])
        report.add("first_token_s.flood", [flood_s for _, flood_s in waits])


def _share_error(ratio: float) -> float:
    """How far alice's share is from a quarter, as a part of all."""
    return abs(1 / (1 + ratio) - 1 / 4)


def measure_flood(report: Report, config: Path, seconds: float, runs: int) -> None:
    """Add the figures of a flood of refusals, behind Serve's proxy and behind HAProxy."""
    for suffix, haproxy in (("", False), (".haproxy", True)):
        ratios: dict[int, list[float]] = {50: [], 95: []}
        with _limited(config, haproxy) as server:
            asyncio.run(first_tokens(server, SETTLE_S))
            for run in range(runs):
                alone = asyncio.run(first_tokens(server, seconds))
                beside, statuses = flooded(server, seconds)
                per_s = statuses["429"] / (seconds + SETTLE_S)
                report.figures[f"live_flood_refusals_per_s{suffix}.run{run}"] = per_s
                print(f"run {run}: {len(alone)} and {len(beside)} requests, flood {statuses}")
                for p, found in ratios.items():
                    quiet_s, flooded_s = (float(np.percentile(x, p)) for x in (alone, beside))
                    print(f"  p{p}: {quiet_s:.4f} s alone, {flooded_s:.4f} beside", flush=True)
                    found.append(flooded_s / quiet_s)
        for p, found in ratios.items():
            report.add(f"live_flood_ttft_ratio_p{p}{suffix}", found)


@contextmanager
def _limited(config: Path, haproxy: bool) -> Iterator[Server]:
    """A server on which the flooder may ask once a second."""
    settings = yaml.safe_load(config.read_text())
    [application] = settings["applications"]
    tenants = yaml.safe_load(Path(application["args"]["tenants"]).read_text())
    for tenant in tenants["tenants"]:
        if digest(FLOODER) in tenant["keys"]:
            tenant["requests_per_minute"] = FLOODER_PER_MINUTE
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(tenants, file)
        file.flush()
        application["args"]["tenants"] = file.name
        application.pop("deployments", None)
        if haproxy:
            behind_haproxy(settings)
        with running(settings, module=OUR_RUN) as server:
            yield server
