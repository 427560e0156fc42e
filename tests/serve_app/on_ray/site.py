"""A running application: who to call, who to kill, and what it says about itself."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
from ray import serve
from ray.serve.schema import ServeDeploySchema

from replica.messages import Stats
from router.snapshot import Snapshot
from tests.serve_app.collector import Collector

APP = "fairstream"
MODEL = "tiny"
KEY = "key-acme"
BULK_KEY = "key-bulk"
"""Of a tenant with more requests at once."""
ADMIN_KEY = "key-admin"
PAGE = "https://app.example.com"
"""Origin of a web page that may call the API."""
TOKENS = 64
DEPLOY_S = 150.0
"""Longer than Serve's own 60 s: machines are busy."""


class Site:
    def __init__(
        self, port: int, config: dict[str, Any], collector: Collector | None = None
    ) -> None:
        """collector: of the spans of all its requests."""
        self.url, self.collector = f"http://127.0.0.1:{port}", collector or Collector()
        self._config = config

    def config(self) -> dict[str, Any]:
        """A copy of it, to be changed."""
        return copy.deepcopy(self._config)

    @property
    def tenants(self) -> list[dict[str, Any]]:
        return self._config["applications"][0]["args"]["tenants"]

    async def deploy(
        self,
        args: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        **overrides: dict[str, Any],
    ) -> None:
        """Apply the configuration, as `serve deploy` does: with other arguments, other settings
        of the engine, and options by name of the deployment. Returns when it runs.
        """
        config = copy.deepcopy(self._config)
        [application] = config["applications"]
        application["args"] |= args or {}
        application["args"]["engine"] |= engine or {}
        application["deployments"] = [
            {"name": name, **options} for name, options in overrides.items()
        ]
        await _apply(config)
        await self.wait_ready()

    async def deploy_beside(self, application: dict[str, Any]) -> None:
        """Run another application, too, until the next `deploy`."""
        own = self._config["applications"]
        await _apply({**self._config, "applications": [*own, application]})

    async def wait_ready(self) -> None:
        """Every ingress is ready; the proxy picks one for each call."""
        async with self.http() as client:
            await until(lambda: _is_ready(client), 60)

    def http(self, key: str = KEY) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    async def snapshot(self) -> Snapshot:
        """What Admission counts."""
        return await serve.get_deployment_handle("Admission", APP).snapshot.remote()

    async def offering(self) -> list[str]:
        """Replicas that Admission may grant."""
        replicas = (await self.snapshot()).replicas
        return [name for name, replica in replicas.items() if replica.slots]

    async def running(self) -> int:
        """Sequences in all engines."""
        return sum(stats.running + stats.waiting for stats in await self.stats())

    async def aborted(self) -> int:
        """Sequences that these engines have aborted."""
        return sum(stats.finished.get("abort", 0) for stats in await self.stats())

    async def stats(self) -> list[Stats]:
        """What the engines report of themselves."""
        handle = serve.get_deployment_handle("Replica", APP)
        return [await handle.stats.remote(name) for name in await self.offering()]

    async def all_run(self) -> bool:
        """Serve has started as many processes of each kind as there should be."""
        deployments = (await asyncio.to_thread(serve.status)).applications[APP].deployments
        return all(one.status == "HEALTHY" for one in deployments.values())

    async def at_rest(self) -> bool:
        """No request waits, no lease is held, no row is taken."""
        state = await self.snapshot()
        leases = sum(replica.leases for replica in state.replicas.values())
        return state.queued == leases == await self.running() == 0


async def _apply(config: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(config)
    client = serve.context._get_global_client()
    await asyncio.to_thread(client.deploy_apps, schema, _blocking=False)
    await until(_is_deployed, DEPLOY_S)


async def _is_deployed() -> bool:
    applications = (await asyncio.to_thread(serve.status)).applications.values()
    assert all(one.status != "DEPLOY_FAILED" for one in applications), applications
    return all(one.status == "RUNNING" for one in applications)


async def until(condition: Callable[[], Awaitable[object]], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.05)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    answers = [await client.get("/ready") for _ in range(8)]
    return all(answer.status_code == 200 for answer in answers)


async def complete(client: openai.AsyncOpenAI, prompt: str, max_tokens: int = TOKENS) -> str:
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    return answer.choices[0].text


async def ask_all_the_while(site: Site, done: asyncio.Event) -> int:
    """Short requests, one behind the other. Each of them is answered."""
    count = 0
    async with site.openai() as client:
        while not done.is_set():
            await complete(client, "still there?", 8)
            count += 1
    return count


async def stream(
    client: openai.AsyncOpenAI, prompt: str, max_tokens: int = TOKENS, **extra: object
) -> str:
    text = ""
    async for chunk in await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body=extra,
    ):
        text += "".join(choice.text for choice in chunk.choices)
    return text


async def long_stream(client: openai.AsyncOpenAI, prompt: str, tokens: int) -> str:
    """An answer of exactly so many tokens."""
    return await stream(client, prompt, tokens, ignore_eos=True)


def processes(title: str, ancestor: int | None = None) -> list[int]:
    """Descendants, of this process by default, whose command line contains `title`."""
    family = descendants(os.getpid() if ancestor is None else ancestor)
    return [pid for pid in family if title in _read(pid, "cmdline")]


def descendants(ancestor: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {pid: _parent(pid) for pid in pids}

    def descends(pid: int) -> bool:
        parent = parents.get(pid, 0)
        return parent == ancestor or (parent > 1 and descends(parent))

    return [pid for pid in pids if descends(pid)]


def is_alive(pid: int) -> bool:
    """It runs, and is not just a zombie that nobody has waited for."""
    return _read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _read(pid: int, name: str) -> str:
    """Empty once the process is gone."""
    with suppress(OSError):
        return (Path("/proc") / str(pid) / name).read_text(errors="replace")
    return ""


def engines() -> list[int]:
    return processes("replica.process import main")


def actors(deployment: str) -> list[int]:
    return processes(f"ServeReplica:{APP}:{deployment}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
