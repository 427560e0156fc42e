"""The whole server under load, over HTTP: how much comes out, how late, and where time goes.

A model of a given shape with random weights. Clients keep as many streams open as there are rows,
from processes of their own. Beside it, in the same run, the engine's process alone under the same
load: what HTTP, admission, texts and events cost.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from itertools import pairwise, product
from typing import Any, NamedTuple

import httpx

from benchmarks.cpu_time import cpu_seconds
from benchmarks.load import IDS, length
from benchmarks.report import Report, parser
from benchmarks.server import Server, running
from benchmarks.shapes import SHAPES
from benchmarks.workload import MODEL
from replica.client import EngineClient
from replica.config import EngineConfig
from replica.messages import Sampling, Submit

KEYS = ("key-one", "key-two")
"""Of two tenants with equal weights; the first also reads usage."""
RAMP_S = 12.0
DOLLARS_PER_HOUR = 4.0
"""A round price of a GPU."""

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

Answers = list[tuple[float, int, float, float]]
"""As `benchmarks.load` prints them."""


def engine_settings(folder: str, chosen: Namespace) -> dict[str, Any]:
    tokens = chosen.prompt + 2 * chosen.output
    settings = {
        "model": folder,
        "device": chosen.device,
        "dtype": "bfloat16",
        "max_rows": chosen.rows,
        "max_model_len": tokens,
    }
    if chosen.device == "cuda":
        return settings | {"block_size": 64, "max_step_tokens": 8192, "memory_fraction": 0.85}
    return settings | {"kv_tokens": chosen.rows * tokens}


def server_settings(folder: str, proxy: str, replicas: int, chosen: Namespace) -> dict[str, Any]:
    digests = ["sha256:" + hashlib.sha256(key.encode()).hexdigest() for key in KEYS]
    limits = {"max_concurrency": 100_000, "max_queued": 100_000}
    arguments = {
        "model_name": chosen.shape,
        "engine": engine_settings(folder, chosen),
        "tenants": [{"id": one[-8:], "keys": [one], **limits} for one in digests],
        "replicas": replicas,
        "ingresses": chosen.ingresses * replicas,
        "gpu_dollars_per_hour": DOLLARS_PER_HOUR,
        "usage": None,
        "admin_keys": digests[:1],
        "api": {"max_chunk_delay_ms": chosen.chunk_delay},
    }
    environment = {"env_vars": HAPROXY if proxy == "haproxy" else {}}
    return {
        "proxy_location": "HeadOnly",
        "controller_options": {"runtime_env": environment},
        "http_options": {"host": "127.0.0.1", "port": chosen.port},
        "applications": [
            {
                "name": "fairstream",
                "route_prefix": "/",
                "import_path": "serve_app.app:build",
                "args": arguments,
                "runtime_env": environment,
            }
        ],
    }


async def engine_alone(folder: str, chosen: Namespace) -> list[float]:
    """Tokens per second of the engine's process, as many requests open as it has rows."""
    client = await EngineClient.start(EngineConfig(**engine_settings(folder, chosen)))

    def ask(number: int) -> None:
        ids = tuple(random.choices(IDS, k=chosen.prompt))
        sampling = Sampling(max_tokens=length(chosen.output), temperature=1.0, ignore_eos=True)
        client.send(Submit(request_id=str(number), prompt_ids=ids, sampling=sampling))

    for asked in range(chosen.rows):
        ask(asked)
    began, tokens = time.monotonic() + RAMP_S, [0] * chosen.runs
    async for report in client.events():
        run = int((time.monotonic() - began) // chosen.seconds)
        if run >= chosen.runs:
            break
        for output in report.outputs:
            if run >= 0:
                tokens[run] += len(output.token_ids)
            if output.finish_reason is not None:
                ask(asked := asked + 1)
    await client.close()
    return [count / chosen.seconds for count in tokens]


def gpu_seconds(server: Server) -> Counter[str]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    url = server.base_url.removesuffix("/v1") + "/admin/usage"
    told = httpx.get(url, headers=headers, timeout=30).raise_for_status().json()
    return Counter(told["cost"]["gpu_seconds"])


def under_load(server: Server, replicas: int, chosen: Namespace) -> Answers:
    """Starts the clients and waits for them."""
    count = chosen.clients * replicas
    streams = [chosen.rows * replicas // count] * count
    lasts = int(RAMP_S + chosen.runs * chosen.seconds + 5)
    command = [sys.executable, "-m", "benchmarks.load", server.base_url, server.model]
    clients = [
        subprocess.Popen(
            [*command, KEYS[number % 2], *map(str, (some, chosen.prompt, chosen.output, lasts))],
            stdout=subprocess.PIPE,
        )
        for number, some in enumerate(streams)
    ]
    answers: Answers = []
    for client in clients:
        said, _ = client.communicate(timeout=lasts + 60)
        if client.returncode:
            raise RuntimeError("a client failed; it says why above")
        answers += json.loads(said)
    return answers


def share(values: list[float], part: float) -> float:
    """The value below which that part of them lies."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


class Reading(NamedTuple):
    """Of one moment."""

    at: float
    gpu_s: Counter[str]
    cpu_s: dict[str, float]


def read(server: Server) -> Reading:
    return Reading(time.monotonic(), gpu_seconds(server), cpu_seconds(server.process.pid))


def figures(before: Reading, after: Reading, answers: Answers, replicas: int) -> dict[str, float]:
    """Of what ended between two moments."""
    ended = [answer for answer in answers if before.at <= answer[0] < after.at]
    passed_s, tokens = after.at - before.at, sum(answer[1] for answer in ended)
    first_ms = [1e3 * answer[2] for answer in ended]
    token_ms = [1e3 * (last - first) / (count - 1) for _, count, first, last in ended]
    found = {"tok_s": tokens / passed_s}
    for part in (0.5, 0.95, 0.99):
        found[f"first_token_ms.p{part * 100:.0f}"] = share(first_ms, part)
        found[f"token_ms.p{part * 100:.0f}"] = share(token_ms, part)
    gpu_s = after.gpu_s - before.gpu_s
    for kind in ("bubble", "starved", "spare"):
        found[f"gpu_{kind}_share"] = gpu_s[kind] / max(gpu_s.total(), 1e-9)
    dollars = replicas * DOLLARS_PER_HOUR * passed_s / 3600
    found["dollars_per_1000_responses"] = 1000 * dollars / len(ended)
    for kind, seconds in sorted(after.cpu_s.items()):
        found[f"cpu_us_per_token.{kind}"] = 1e6 * (seconds - before.cpu_s.get(kind, 0)) / tokens
    return found


async def measure(server: Server, replicas: int, chosen: Namespace) -> list[dict[str, float]]:
    """Figures of as many spans of time, one behind the other."""
    loading = asyncio.create_task(asyncio.to_thread(under_load, server, replicas, chosen))
    await asyncio.sleep(RAMP_S)
    readings = [read(server)]
    for _ in range(chosen.runs):
        await asyncio.sleep(chosen.seconds)
        readings.append(await asyncio.to_thread(read, server))
    answers = await loading
    return [figures(*span, answers, replicas) for span in pairwise(readings)]


def main() -> None:
    options = parser("serving", __doc__)
    options.add_argument("--shape", choices=SHAPES, default="llama-8b")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--replicas", type=int, nargs="+", default=[1])
    options.add_argument("--proxies", choices=["ray", "haproxy"], nargs="+", default=["ray"])
    options.add_argument("--chunk-delay", type=int, default=150, help="api.max_chunk_delay_ms")
    options.add_argument("--rows", type=int, default=256, help="of a replica")
    options.add_argument("--ingresses", type=int, default=2, help="for each replica")
    options.add_argument("--clients", type=int, default=8, help="processes, for each replica")
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--output", type=int, default=256)
    options.add_argument("--seconds", type=int, default=10, help="of a run")
    options.add_argument("--port", type=int, default=8000)
    options.add_argument("--tokenizer", default=MODEL, help="the model to take it from")
    options.add_argument("--folder", help="where the model is kept meanwhile")
    chosen = options.parse_args()
    report = Report("serving")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        make = [chosen.shape, folder, chosen.device, chosen.tokenizer]
        subprocess.run([sys.executable, "-m", "benchmarks.random_model", *make], check=True)
        report.add("tok_s.engine", asyncio.run(engine_alone(folder, chosen)))
        for proxy, replicas in product(chosen.proxies, chosen.replicas):
            case = f"{proxy}.{replicas}"
            with running(server_settings(folder, proxy, replicas, chosen)) as server:
                report.add(f"ready_s.{case}", [server.ready_s])
                spans = asyncio.run(measure(server, replicas, chosen))
            for key in spans[0]:
                report.add(f"{key}.{case}", [span[key] for span in spans])
            report.write(chosen.json)


if __name__ == "__main__":
    main()
