"""Whether `fairstream-doctor` names what was planted: a live server, one bottleneck after another.

Each is planted in the local example, by what clients send and how they read, or in the code of the
processes (`plants/`); healthy traffic is the control.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import openai
import yaml

from benchmarks.report import Report, parser
from benchmarks.server import OUR_RUN, Server, behind_haproxy, running
from router.tenant import digest
from serve_app.doctor import watch
from serve_app.telemetry.diagnosis import Cause, diagnose, lines

ADMIN = "doctor-admin"
TENANTS = ("one", "two")
SETTLE_S = 4.0
"""Until metrics are of the load alone."""


PLANTS = Path(__file__).with_name("plants")
RECEIVE_BUFFER, PIECE, PIECE_S = 4096, 16 * 1024, 0.2
"""Of a client that reads slowly: bytes that its kernel takes, and that it reads, and how often."""


class Planted(NamedTuple):
    name: str
    cause: Cause
    """What is to be found."""
    clients: int = 0
    """Of each tenant, one request after the other."""
    prompt: str = "Once upon a time"
    tokens: int = 48
    pause_s: float = 0.0
    engine: Mapping[str, Any] = MappingProxyType({})
    tenant: Mapping[str, Any] = MappingProxyType({})
    code: str = ""
    """What of `plants/sitecustomize.py` runs in the server."""
    slow_readers: bool = False
    seconds: float = 0.0
    """That the doctor watches at least."""


PLANTED = [
    Planted("no demand", Cause.NO_DEMAND),
    Planted("healthy", Cause.NOTHING, clients=2),
    Planted("full", Cause.DEVICE, clients=24),
    Planted("prompts", Cause.PROMPTS, clients=6, prompt="word " * 400, tokens=2),
    Planted(
        "rate", Cause.QUOTA, clients=2, tokens=2, pause_s=0.1, tenant={"requests_per_minute": 30}
    ),
    Planted("concurrency", Cause.QUOTA, clients=4, tokens=4, tenant={"max_concurrency": 1}),
    Planted("places", Cause.PLACES, clients=4, engine={"max_rows": 1}),
    Planted("slow tokenizer", Cause.FRONT_END, clients=2, code="slow_tokenizer"),
    Planted("host padding", Cause.CPU, clients=1, code="host_padding", engine={"overlap": False}),
    Planted(
        "slow readers", Cause.SLOW_READERS, clients=2, tokens=600, slow_readers=True, seconds=50.0
    ),
    Planted(
        "KV", Cause.KV, clients=10, tokens=200, engine={"kv_tokens": 2048, "max_model_len": 1024}
    ),
]


def settings(config: Path, planted: Planted) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(config.read_text())
    [application] = made["applications"]
    application.pop("deployments", None)
    tenants = [{"id": name, "keys": [digest(name)], **planted.tenant} for name in TENANTS]
    application["args"] |= {"tenants": tenants, "admin_keys": [digest(ADMIN)], "usage": None}
    application["args"]["engine"] |= dict(planted.engine)
    if planted.slow_readers:  # Serve's own proxy reads whatever comes, and keeps it
        behind_haproxy(made)
    return made


@contextmanager
def planted_code(name: str) -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ["FAIRSTREAM_PLANT"] = name
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PLANTS), before.get("PYTHONPATH", "")])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


async def read_slowly(server: Server, key: str, tokens: int, prompt: str) -> None:
    """An answer of two kilobytes a token: kernels and proxies keep hundreds of them."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "logprobs": True,
        "top_logprobs": 20,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    url = urlsplit(server.base_url)
    host, port = url.hostname or "", url.port or 80
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, port))
        head = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        await loop.sock_sendall(connection, head.encode() + data)
        while True:
            await asyncio.sleep(PIECE_S)
            if not await loop.sock_recv(connection, PIECE):
                return


async def load(server: Server, planted: Planted) -> None:
    """Until it is cancelled."""

    async def read(client: openai.AsyncOpenAI, prompt: str) -> None:
        with suppress(openai.APIStatusError):
            await client.completions.create(
                model=server.model,
                prompt=prompt,
                max_tokens=planted.tokens,
                extra_body={"ignore_eos": True},
            )

    async def keep_asking(number: int, ask: Callable[[str], Awaitable[None]]) -> None:
        turn = 0
        while True:
            turn += 1
            await ask(f"{number} {turn} {planted.prompt}")
            await asyncio.sleep(planted.pause_s)

    async with asyncio.TaskGroup() as group:
        for name in TENANTS:
            client = openai.AsyncOpenAI(base_url=server.base_url, api_key=name, max_retries=0)
            ask = partial(read, client)
            if planted.slow_readers:
                ask = partial(read_slowly, server, name, planted.tokens)
            for number in range(planted.clients):
                group.create_task(keep_asking(number, ask))


async def verdict(server: Server, planted: Planted, seconds: float) -> Cause:
    loading = asyncio.create_task(load(server, planted))
    await asyncio.sleep(SETTLE_S)
    url = server.base_url.removesuffix("/v1") + "/metrics"
    facts = await asyncio.to_thread(watch, url, ADMIN, seconds)
    loading.cancel()
    with suppress(asyncio.CancelledError):
        await loading
    found = diagnose(facts)
    print(f"{planted.name}:", *lines(found, facts), sep="\n  ", flush=True)
    return found.cause


def main() -> None:
    options = parser("seeing", __doc__)
    options.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    options.add_argument("--seconds", type=float, default=14.0, help="that the doctor watches")
    options.add_argument("--only", help="names, comma-separated; by default all")
    options.add_argument("--keep", action="store_true", help="the figures of an earlier file")
    chosen = options.parse_args()
    report, right = Report("seeing"), []
    names = chosen.only.split(",") if chosen.only else [planted.name for planted in PLANTED]
    for planted in (each for each in PLANTED if each.name in names):
        with (
            planted_code(planted.code),
            running(settings(chosen.config, planted), module=OUR_RUN) as server,
        ):
            cause = asyncio.run(verdict(server, planted, max(chosen.seconds, planted.seconds)))
        right.append(cause is planted.cause)
        report.add(f"right.{planted.name.replace(' ', '_')}", [float(right[-1])])
    report.add("doctor_right_share", [sum(right) / len(right)])
    if chosen.keep:
        report.keep(chosen.json)
    report.write(chosen.json)


if __name__ == "__main__":
    main()
