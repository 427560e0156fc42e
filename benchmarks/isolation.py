"""Whether one tenant's requests, or those of somebody without a key, hold others up.

A local server with a small model. A victim streams an answer and somebody asks /health, first
alone and then beside each attack, by a tenant and without a key. What is told: the victim's
longest gaps against those alone, how long /health takes, how many answers cost the attacker
nothing, and which processes took how many cores. `refusals_per_s` is how many a core of the ingress
makes, with nobody beside. All of it shares one machine, so attackers give way to whoever else has
something to do, and there is one that only takes what time is left: what happens beside `burn` is
not the server's doing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from openai import AsyncOpenAI

from benchmarks.attacks import ATTACKS, UNCHARGED
from benchmarks.cpu_time import cpu_seconds
from benchmarks.front import fronted
from benchmarks.report import Report, parser
from benchmarks.server import OUR_RUN, Server, behind_haproxy, running
from router.tenant import digest

VICTIM = "isolation-victim"
REQUESTS_PER_MINUTE = {"refusals": 1}
"""Of attackers; of all others many."""
MANY = 600
FRONT_PORT = 8080
PROBE_S = 0.1
PROBE_TIMEOUT_S = 5.0
SETTLE_S = 2.0
"""Behind an attack, before the next."""


def tenants() -> dict[str, Any]:
    """A file of them. Each attack comes from one of its own, whose buckets nobody has used."""
    attackers = [
        {
            "id": kind,
            "keys": [digest(kind)],
            "requests_per_minute": REQUESTS_PER_MINUTE.get(kind, MANY),
        }
        for kind in ATTACKS
    ]
    return {"tenants": [{"id": "victim", "keys": [digest(VICTIM)]}, *attackers]}


async def watch(server: Server, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds: gaps between the tokens of the victim's stream; answers of /health."""
    until = time.monotonic() + seconds
    client = AsyncOpenAI(base_url=server.base_url, api_key=VICTIM, max_retries=0, timeout=120)
    new = httpx.Limits(max_keepalive_connections=0)
    async with client, httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, limits=new) as http:
        gaps, probes = await asyncio.gather(
            _gaps(client, server.model, until), _probes(http, server.base_url, until)
        )
    return gaps, probes


async def _gaps(client: AsyncOpenAI, model: str, until: float) -> list[float]:
    came: list[float] = []
    gaps: list[float] = []
    while time.monotonic() < until:
        events = await client.completions.create(
            model=model,
            prompt="A very long story:",
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        came = [time.monotonic()]
        async for _ in events:
            came.append(time.monotonic())
            if came[-1] > until:
                break
        await events.close()
        gaps += [(after - before) * 1e3 for before, after in pairwise(came[1:])]
    return gaps


async def _probes(client: httpx.AsyncClient, base_url: str, until: float) -> list[float]:
    """Each on a new connection. One that fails has taken as long as one may take."""
    times = []
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            answer = await client.get(base_url.removesuffix("/v1") + "/health")
            answered = answer.status_code == 200
        except httpx.TransportError:
            answered = False
        times.append((time.monotonic() - began if answered else PROBE_TIMEOUT_S) * 1e3)
        await asyncio.sleep(PROBE_S)
    return times


@dataclass(frozen=True)
class Found:
    """Beside an attack."""

    gaps: list[float]
    probes: list[float]
    answers: dict[str, int]
    """To the attack, by status."""
    cores: dict[str, float]
    """That each kind of process kept busy."""


def attacked(server: Server, kind: str, key: str, address: str, seconds: float) -> Found:
    with _attack(server, kind, key, address, seconds) as attack:
        before, began = _spent(server, attack), time.monotonic()
        gaps, probes = asyncio.run(watch(server, seconds))
        lasted = time.monotonic() - began
        after = _spent(server, attack)
        said, _ = attack.communicate(timeout=seconds + 120)
    time.sleep(SETTLE_S)
    cores = {name: (after[name] - before.get(name, 0.0)) / lasted for name in after}
    return Found(gaps, probes, json.loads(said), cores)


@contextmanager
def _attack(
    server: Server, kind: str, key: str, address: str, seconds: float
) -> Iterator[subprocess.Popen[str]]:
    """It has made its bodies, and begins."""
    url = server.base_url.removesuffix("/v1")
    command = [sys.executable, "-m", "benchmarks.attacks", kind, url, key, server.model]
    with subprocess.Popen(
        [*command, str(seconds), address], stdout=subprocess.PIPE, text=True
    ) as attack:
        assert attack.stdout is not None
        attack.stdout.readline()
        yield attack


def _spent(server: Server, attack: subprocess.Popen[str]) -> dict[str, float]:
    """Seconds of processors."""
    spent = cpu_seconds(server.process.pid)
    return spent | {"attack": sum(cpu_seconds(attack.pid).values())}


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("inf")


def measure(server: Server, kinds: Iterable[str], seconds: float, report: Report) -> None:
    """Add what is seen beside each of the attacks."""
    alone, probes = asyncio.run(watch(server, seconds))
    report.add("victim_gap_ms_p99.alone", [p99(alone)])
    report.add("health_ms_p99.alone", [p99(probes)])
    attacks = [("burn", "burn", "", "127.0.0.1")]
    for number, kind in enumerate(kinds, 2):
        attacks.append((kind, kind, kind, f"127.0.1.{number}"))
        attacks.append((kind, f"{kind}.no_key", "", f"127.0.0.{number}"))
    for kind, name, key, address in attacks:
        found = attacked(server, kind, key, address, seconds)
        _tell(name, found, p99(alone), report)


def measure_refusals(server: Server, seconds: float, report: Report) -> None:
    """Add how many a core of the ingress makes: more connections ask than are made to wait."""
    before = cpu_seconds(server.process.pid)["ingress"]
    with _attack(server, "crowd", "refusals", "127.0.0.1", seconds) as attack:
        said, _ = attack.communicate(timeout=seconds + 120)
    spent = cpu_seconds(server.process.pid)["ingress"] - before
    answers = json.loads(said)
    print(f"crowd: answers {answers}, {spent:.1f} s of the ingress", flush=True)
    report.add("refusals_per_s", [answers["429"] / spent])


def _tell(name: str, found: Found, alone: float, report: Report) -> None:
    cores = {kind: round(cores, 2) for kind, cores in found.cores.items() if cores > 0.01}
    print(f"{name}: answers {found.answers}, cores {cores}", flush=True)
    report.add(f"victim_gap_ms_p99.{name}", [p99(found.gaps)])
    report.add(f"victim_gap_ms_max.{name}", [max(found.gaps, default=float("inf"))])
    report.add(f"victim_gap_ratio.{name}", [p99(found.gaps) / alone])
    report.add(f"health_ms_p99.{name}", [p99(found.probes)])
    report.add(f"uncharged.{name}", [found.answers.get(UNCHARGED, 0)])
    for kind in ("attack", "proxy", "ingress", "engine"):
        report.add(f"cores.{kind}.{name}", [found.cores.get(kind, 0.0)])


def settings(config: Path, folder: Path, haproxy: bool, threads: int | None) -> dict[str, Any]:
    """The configuration with tenants of this benchmark, and usage in a file of its own.

    threads: of the engine; by default what the configuration says.
    """
    made: dict[str, Any] = yaml.safe_load(config.read_text())
    file = folder / "tenants.yaml"
    file.write_text(yaml.safe_dump(tenants()))
    [application] = made["applications"]
    application["args"] |= {"tenants": str(file), "usage": str(folder / "usage.db")}
    application.pop("deployments", None)
    if threads is not None:
        application["args"]["engine"]["threads"] = threads
    if haproxy:
        # The front says who asks.
        os.environ["FORWARDED_ALLOW_IPS"] = "127.0.0.1"
        behind_haproxy(made)
    return made


def main() -> None:
    options = parser("isolation", __doc__)
    options.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    options.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    options.add_argument("--threads", type=int, help="of the engine, in place of the configured")
    options.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options.add_argument(
        "--haproxy", action="store_true", help="behind Serve's HAProxy, and our front before it"
    )
    asked = options.parse_args()
    report = Report("isolation")
    with (
        tempfile.TemporaryDirectory() as folder,
        running(
            settings(asked.config, Path(folder), asked.haproxy, asked.threads), module=OUR_RUN
        ) as server,
        _front(server) if asked.haproxy else nullcontext(server) as entered,
    ):
        measure(entered, asked.attacks, asked.seconds, report)
        measure_refusals(server, asked.seconds, report)
    if asked.haproxy:
        report.figures = {f"{key}.haproxy": value for key, value in report.figures.items()}
    report.write(asked.json)


@contextmanager
def _front(server: Server) -> Iterator[Server]:
    with fronted(server.base_url, FRONT_PORT, {}) as url:
        yield replace(server, base_url=f"{url}/v1")


if __name__ == "__main__":
    main()
