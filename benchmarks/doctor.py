"""Whether `fairstream-doctor` names what was planted: a live server, one bottleneck after another.

Each is planted in the local example or by what clients send; healthy traffic is the control. What
cannot be planted here is not judged: slow readers, which Serve's proxy hides, a slow tokenizer, and
a CPU that holds a GPU up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import openai
import yaml

from benchmarks.report import Report, parser
from benchmarks.server import OUR_RUN, Server, running
from router.tenant import digest
from serve_app.doctor import watch
from serve_app.telemetry.diagnosis import Cause, diagnose, lines

ADMIN = "doctor-admin"
TENANTS = ("one", "two")
SETTLE_S = 4.0
"""Until metrics are of the load alone."""


SMALL = {"kv_tokens": 2048, "max_model_len": 1024}


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


PLANTED = [
    Planted("no demand", Cause.NO_DEMAND),
    Planted("healthy", Cause.NOTHING, clients=2),
    Planted("full", Cause.DEVICE, clients=24),
    Planted("prompts", Cause.PROMPTS, clients=6, prompt="word " * 400, tokens=2),
    Planted(
        "rate", Cause.QUOTA, clients=2, tokens=2, pause_s=0.1, tenant={"requests_per_minute": 30}
    ),
    Planted("concurrency", Cause.QUOTA, clients=4, tokens=4, tenant={"max_concurrency": 1}),
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
    return made


async def load(server: Server, planted: Planted) -> None:
    """Until it is cancelled."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            with suppress(openai.APIStatusError):
                await client.completions.create(
                    model=server.model,
                    prompt=f"{number} {turn} {planted.prompt}",
                    max_tokens=planted.tokens,
                    extra_body={"ignore_eos": True},
                )
            await asyncio.sleep(planted.pause_s)

    async with asyncio.TaskGroup() as group:
        for name in TENANTS:
            client = openai.AsyncOpenAI(base_url=server.base_url, api_key=name, max_retries=0)
            for number in range(planted.clients):
                group.create_task(ask(client, number))


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
    chosen = options.parse_args()
    report, right = Report("seeing"), []
    for planted in PLANTED:
        with running(settings(chosen.config, planted), module=OUR_RUN) as server:
            cause = asyncio.run(verdict(server, planted, chosen.seconds))
        right.append(cause is planted.cause)
        report.add(f"right.{planted.name.replace(' ', '_')}", [float(right[-1])])
    report.add("doctor_right_share", [sum(right) / len(right)])
    report.keep(chosen.json)  # `benchmarks.seeing` writes into the same file
    report.write(chosen.json)


if __name__ == "__main__":
    main()
