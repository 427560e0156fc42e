"""Whether one tenant's requests, or those of somebody without a key, hold others up.

A local server with a small model. A victim streams an answer and somebody asks /health, first
alone and then beside each attack, by a tenant and without a key. What is told: the victim's
longest gaps against those alone, how long /health takes, and what the attacker got for it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from openai import AsyncOpenAI

from benchmarks.attacks import ATTACKS
from benchmarks.report import Report, parser
from benchmarks.server import Server, running
from router.tenant import digest

VICTIM, ATTACKER = "isolation-victim", "isolation-attacker"
TENANTS = {
    "tenants": [
        {"id": "victim", "keys": [digest(VICTIM)], "max_concurrency": 8},
        {"id": "attacker", "keys": [digest(ATTACKER)], "requests_per_minute": 60},
    ]
}
PROBE_S = 0.1
SETTLE_S = 3.0
"""Behind an attack, before the next."""


async def watch(server: Server, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds: gaps between the tokens of the victim's stream; answers of /health."""
    until = time.monotonic() + seconds
    client = AsyncOpenAI(base_url=server.base_url, api_key=VICTIM, max_retries=0, timeout=120)
    async with client, httpx.AsyncClient(timeout=120) as http:
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
    times = []
    while time.monotonic() < until:
        began = time.monotonic()
        answer = await client.get(base_url.removesuffix("/v1") + "/health")
        times.append((time.monotonic() - began) * 1e3)
        assert answer.status_code == 200, answer.status_code
        await asyncio.sleep(PROBE_S)
    return times


def attacked(server: Server, kind: str, key: str, seconds: float) -> dict[str, Any]:
    """What `watch` finds beside an attack, and how that was answered."""
    url = server.base_url.removesuffix("/v1")
    command = [sys.executable, "-m", "benchmarks.attacks", kind, url, key, server.model]
    with subprocess.Popen([*command, str(seconds)], stdout=subprocess.PIPE, text=True) as attack:
        gaps, probes = asyncio.run(watch(server, seconds))
        said, _ = attack.communicate(timeout=seconds + 120)
    time.sleep(SETTLE_S)
    return {"gaps": gaps, "probes": probes, "statuses": json.loads(said)}


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("inf")


def measure(server: Server, kinds: list[str], seconds: float, report: Report) -> None:
    alone, probes = asyncio.run(watch(server, seconds))
    report.add("gap_ms_p99.alone", [p99(alone)])
    report.add("health_ms_p99.alone", [p99(probes)])
    for kind in kinds:
        for who, key in (("", ATTACKER), (".no_key", "")):
            found = attacked(server, kind, key, seconds)
            print(f"{kind}{who}: answered {found['statuses']}", flush=True)
            report.add(f"victim_gap_ms_p99.{kind}{who}", [p99(found["gaps"])])
            report.add(f"victim_gap_ms_max.{kind}{who}", [max(found["gaps"], default=float("inf"))])
            report.add(f"victim_gap_ratio.{kind}{who}", [p99(found["gaps"]) / p99(alone)])
            report.add(f"health_ms_p99.{kind}{who}", [p99(found["probes"])])


def settings(config: Path, folder: Path, haproxy: bool) -> dict[str, Any]:
    """The configuration with tenants of this benchmark, and usage in a file of its own."""
    made: dict[str, Any] = yaml.safe_load(config.read_text())
    tenants = folder / "tenants.yaml"
    tenants.write_text(yaml.safe_dump(TENANTS))
    [application] = made["applications"]
    application["args"] |= {"tenants": str(tenants), "usage": str(folder / "usage.db")}
    application.pop("deployments", None)
    if haproxy:
        names = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
        variables = {"env_vars": dict.fromkeys(names, "1")}
        made["controller_options"] = {"runtime_env": variables}
        application["runtime_env"] = variables
    return made


def main() -> None:
    options = parser("isolation", __doc__)
    options.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    options.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    options.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options.add_argument("--haproxy", action="store_true", help="behind HAProxy")
    asked = options.parse_args()
    report = Report("isolation")
    with (
        tempfile.TemporaryDirectory() as folder,
        running(settings(asked.config, Path(folder), asked.haproxy)) as server,
    ):
        measure(server, asked.attacks, asked.seconds, report)
    report.write(asked.json)


if __name__ == "__main__":
    main()
