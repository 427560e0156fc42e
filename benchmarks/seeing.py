"""Whether what the server tells of itself is true, and what telling it costs.

Parts: `breakdown` asks for answers of all kinds, and compares each request's phases with a clock
around the ingress, and the requests' device seconds with the engine's; `overhead` switches
telemetry on and off, by turns, under load; `series` counts series after 10,000 names. The first two
start a server behind Serve's HAProxy. What the doctor finds is in `benchmarks.doctor`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import yaml

from benchmarks import seeing_clock
from benchmarks.cpu_time import cpu_seconds
from benchmarks.report import Report, parser
from benchmarks.server import OUR_RUN, Server, behind_haproxy, running
from router.latencies import Latency
from router.ledger import Usage
from router.messages import HeldBack
from router.snapshot import Snapshot, TenantSnapshot
from router.tenant import Tenant, digest
from serve_app import request_ids
from serve_app.telemetry.exposition import Source, exposition
from serve_app.telemetry.instruments import Instruments
from serve_app.telemetry.metrics import AdmissionMetrics, IngressMetrics
from serve_app.telemetry.readings import scrape
from serve_app.telemetry.records import RequestRecord

PARTS = ("breakdown", "overhead", "series")
ADMIN, TENANT, LIMITED = "seeing-admin", "seeing-tenant", "seeing-limited"
REQUESTS, CLIENTS = 1000, 8
WITHIN_S, WITHIN = 0.001, 0.01
"""An error below either is none."""
STREAMS, WINDOW_S, SETTLE_S = 16, 4.0, 0.5
MODES = ("off", "on", "looked")
"""Telemetry taken away; as it is; with a scrape a second, and `Server-Timing` for each request."""
NAMES = 10_000


@contextmanager
def server_of(config: Path) -> Iterator[tuple[Server, Path]]:
    """With the file that the clock writes."""
    made = yaml.safe_load(config.read_text())
    [application] = made["applications"]
    application.pop("deployments", None)
    tenants = [
        {"id": "seeing", "keys": [digest(TENANT)], "max_concurrency": 64},
        {"id": "limited", "keys": [digest(LIMITED)], "requests_per_minute": 1},
    ]
    application["args"] |= {"tenants": tenants, "admin_keys": [digest(ADMIN)], "usage": None}
    application["args"]["api"]["max_chunk_delay_ms"] = 0  # so that each event is a token
    behind_haproxy(made)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clock"
        os.environ[request_ids.VARIABLE] = f"{seeing_clock.__name__}:layers"
        os.environ[seeing_clock.FILE] = str(file)
        with running(made, module=OUR_RUN) as server:
            yield server, file


@asynccontextmanager
async def calling(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    url = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client


def headers_of(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def kind(model: str, number: int) -> tuple[str, str, dict[str, Any]]:
    """The key, the path and the body of a request."""
    text = f"{number}: Once upon a time " * (1 + number % 7)
    least = {"model": model, "max_tokens": 4 + number % 16, "ignore_eos": True}
    plain = least | {"prompt": text}
    chat = least | {"messages": [{"role": "user", "content": text}]}
    every: list[tuple[str, str, dict[str, Any]]] = [
        (TENANT, "completions", plain),
        (TENANT, "completions", plain | {"stream": True}),
        (TENANT, "chat/completions", chat),
        (TENANT, "chat/completions", chat | {"stream": True}),
        (TENANT, "completions", plain | {"n": 2}),
        (TENANT, "chat/completions", chat | {"n": 2, "stream": True}),
        (TENANT, "completions", plain | {"stop": ["the"], "ignore_eos": False}),
        (LIMITED, "completions", plain),
    ]
    return every[number % len(every)]


async def ask(client: httpx.AsyncClient, model: str, number: int) -> float:
    """Seconds from the call to the last byte, as the client sees it."""
    key, path, body = kind(model, number)
    headers = headers_of(key, **{"X-Request-ID": name_of(number)})
    began = time.perf_counter()
    reply = await client.post(f"/v1/{path}", json=body, headers=headers)
    seconds = time.perf_counter() - began
    if reply.status_code != 200 and (key, reply.status_code) != (LIMITED, 429):
        raise RuntimeError(f"{path} is answered {reply.status_code}: {reply.text[:200]}")
    return seconds


def name_of(number: int) -> str:
    return f"seeing-{number}"


async def ask_all(client: httpx.AsyncClient, model: str) -> dict[str, float]:
    """What the client saw of each request, in seconds."""
    numbers, seen = iter(range(REQUESTS)), {}

    async def one_after_the_other() -> None:
        for number in numbers:
            seen[name_of(number)] = await ask(client, model, number)

    await asyncio.gather(*(one_after_the_other() for _ in range(CLIENTS)))
    return seen


async def told_of(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a request's phases, in seconds."""
    reply = await client.get(f"/admin/requests/{name}", headers=headers_of(ADMIN))
    [told] = reply.raise_for_status().json()["data"]
    return float(sum(told["phases"].values()) if "phases" in told else told["seconds"])


async def measure_breakdown(report: Report, server: Server, file: Path) -> None:
    async with calling(server) as client:
        seen = await ask_all(client, server.model)
        told = {name: await told_of(client, name) for name in seen}
        await asyncio.sleep(3)  # until replicas and ingresses have told what they counted last
        spent = await gpu_seconds(client)
    lines = (line.split() for line in (await asyncio.to_thread(file.read_text)).splitlines())
    wall = {name: float(seconds) for name, seconds in lines if name in seen}
    off_s = {name: abs(told[name] - wall[name]) for name in seen}
    shares = {name: off_s[name] / wall[name] for name in seen}
    wrong = [name for name in seen if off_s[name] > WITHIN_S and shares[name] > WITHIN]
    figures = {
        "breakdown_requests": len(seen),
        "breakdown_error_p99": p99(shares.values()),
        "breakdown_error_p99_ms": p99(off_s.values()) * 1e3,
        "breakdown_wrong_share": len(wrong) / len(seen),
        "client_beyond_p50_ms": 1e3 * median(seen[name] - told[name] for name in seen),
        "client_beyond_p99_ms": 1e3 * p99(seen[name] - told[name] for name in seen),
        "gpu_seconds_error": spent,
    }
    report.figures |= figures
    for key, value in figures.items():
        print(f"{key:<44} {value:>12.4g}", flush=True)


async def gpu_seconds(client: httpx.AsyncClient) -> float:
    """How much the sum of what tenants' requests took differs from what the engine was busy for
    them, as a share."""
    usage = await client.get("/admin/usage", headers=headers_of(ADMIN))
    billed = sum(row["gpu_seconds"] for row in usage.raise_for_status().json()["data"])
    page = await client.get("/metrics", headers=headers_of(ADMIN))
    states = scrape(page.raise_for_status().text, 0.0).metrics["fairstream_gpu_seconds_total"]
    busy = sum(value for labels, value in states.items() if ("state", "requests") in labels)
    return abs(float(billed) - busy) / busy


class Load:
    """Streams that are always open, and their tokens."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.tokens = 0
        self.timed = False
        """Each asks where its time went."""
        self._client, self._model = client, model

    async def run(self) -> None:
        await asyncio.gather(*(self._stream(number) for number in range(STREAMS)))

    async def _stream(self, number: int) -> None:
        body = {"model": self._model, "max_tokens": 24, "ignore_eos": True, "stream": True}
        turn = 0
        while True:
            turn += 1
            asked = body | {"prompt": f"{number} {turn} Once upon a time"}
            timing = {"X-Fairstream-Timing": "1"} if self.timed else {}
            headers = headers_of(TENANT, **timing)
            async with self._client.stream(
                "POST", "/v1/completions", json=asked, headers=headers
            ) as reply:
                async for part in reply.aiter_raw():
                    self.tokens += part.count(b"data: ")


class Window(NamedTuple):
    """What a few seconds of load took."""

    tok_s: float
    telling_s: float
    """Processor time of ingresses and Admission for each token ..."""
    server_s: float
    """... and of all processes of the server."""


async def measure_overhead(report: Report, server: Server, rounds: int) -> None:
    """Where processors are what there is too little of, as here, what telling takes of their time
    is what throughput loses. The throughput of a few seconds says it, too, but not to a percent."""
    found: dict[str, list[Window]] = {mode: [] for mode in MODES}
    async with calling(server) as client:
        load = Load(client, server.model)
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(5)
        for turn in range(rounds):
            first = turn % len(MODES)
            for mode in MODES[first:] + MODES[:first]:
                found[mode].append(await window(client, load, server, mode))
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
    for mode, key in (("on", "overhead"), ("looked", "overhead_looked")):
        pairs = list(zip(found[mode], found["off"], strict=True))
        more = [told.telling_s - silent.telling_s for told, silent in pairs]
        report.add(f"{key}_us_per_token", [1e6 * s for s in more])
        report.add(
            f"{key}_share", [s / pair[1].server_s for s, pair in zip(more, pairs, strict=True)]
        )
        report.add(f"{key}_tok_s_share", [1 - told.tok_s / silent.tok_s for told, silent in pairs])


async def window(client: httpx.AsyncClient, load: Load, server: Server, mode: str) -> Window:
    await client.get(f"{seeing_clock.SWITCH}{'off' if mode == 'off' else 'on'}")
    load.timed = mode == "looked"
    await asyncio.sleep(SETTLE_S)
    began, before, spent = time.perf_counter(), load.tokens, cpu_seconds(server.process.pid)
    while time.perf_counter() - began < WINDOW_S:
        if load.timed:
            await client.get("/metrics", headers=headers_of(ADMIN))
        await asyncio.sleep(1)
    passed_s, tokens = time.perf_counter() - began, load.tokens - before
    now = cpu_seconds(server.process.pid)
    of_kind = {kind: (now[kind] - spent.get(kind, 0.0)) / tokens for kind in now}
    telling_s = of_kind["ingress"] + of_kind["admission"]
    return Window(tokens / passed_s, telling_s, sum(of_kind.values()))


def measure_series(report: Report) -> None:
    """In `/metrics`, once so many tenants have asked for something and were refused."""
    ingress, admission = IngressMetrics(), AdmissionMetrics()
    names = [f"junk{number}" for number in range(NAMES)]
    for name in names:
        ingress.observe(record_of(name))
    ingress.tell({(name, "rate_limit_exceeded"): 1 for name in names})
    admission.observe(Latency("m", name, 0.2, 0.01) for name in names)
    queue = TenantSnapshot(1, 1, {"m": 1.0}, held_back={"m": HeldBack.CAPACITY})
    tenants, usage = dict.fromkeys(names, queue), {name: Usage(output_tokens=1) for name in names}
    admission.tell(Snapshot(1, {"m": 0.0}, tenants, {}, {}, usage, {"m": NAMES}))
    report.add("series_at_10k_names", [series(ingress.instruments) + series(admission.instruments)])


def record_of(tenant: str) -> RequestRecord:
    record = RequestRecord({"state": {"tenant": Tenant(id=tenant, keys=[])}}, model="m")
    with record.sequence(prompt_tokens=1) as sequence:
        sequence.add_wait({why.value: 0.1 for why in HeldBack})
    return record


def series(instruments: Instruments) -> int:
    """A bucket of a histogram is one."""
    return exposition([Source("", {}, instruments.gather())]).count(b"\nfairstream_")


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.99 * (len(ordered) - 1))]


def main() -> None:
    options = parser("seeing", __doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    options.add_argument("--rounds", type=int, default=10, help="of windows under load")
    chosen = options.parse_args()
    report = Report("seeing")
    if "series" in chosen.only:
        measure_series(report)
    if {"breakdown", "overhead"} & set(chosen.only):
        with server_of(chosen.config) as (server, file):
            if "breakdown" in chosen.only:
                asyncio.run(measure_breakdown(report, server, file))
            if "overhead" in chosen.only:
                asyncio.run(measure_overhead(report, server, chosen.rounds))
    report.keep(chosen.json)  # the doctor writes into the same file
    report.write(chosen.json)


if __name__ == "__main__":
    main()
