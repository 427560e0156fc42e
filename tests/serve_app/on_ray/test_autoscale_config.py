"""`serve run configs/autoscale.yaml` does what the file promises, with the real model.

Changed are only the port, the usage file and the administrator's key. From zero and back to it,
`min_replicas` is 0, too, and `zero_hold_s` 20 instead of 300: nobody watches it do nothing for so
long. All other limits are those that users get.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from benchmarks.server import Server, serving
from router.tenant import digest
from tests.serve_app.on_ray.site import ADMIN_KEY, processes, until

CONFIG = Path("configs/autoscale.yaml")
STREAMS = 16
"""Three engines have 12 rows."""
TOKENS = 100
PATIENCE_S = 240.0
"""The machine is busy, most of all while an engine starts."""


@pytest.fixture
def serve_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts the command, with other settings. Beside any cluster that other tests use."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    @contextmanager
    def start(min_replicas: int = 1, **limits: float) -> Iterator[Server]:
        config = yaml.safe_load(CONFIG.read_text())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            config["http_options"]["port"] = free.getsockname()[1]
        [application] = config["applications"]
        application["autoscaling_policy"]["policy_kwargs"] |= limits
        args = application["args"]
        args |= {"usage": str(tmp_path / "usage.db"), "admin_keys": [digest(ADMIN_KEY)]}
        args["autoscaling"]["min_replicas"] = min_replicas
        file = tmp_path / "autoscale.yaml"
        file.write_text(yaml.safe_dump(config))
        with serving(file) as server:
            yield server

    return start


async def wait_for_engines(server: Server, count: int) -> None:
    async def so_many_run() -> bool:
        return len(processes("replica.process import main", server.process.pid)) == count

    await until(so_many_run, PATIENCE_S)


async def ask(client: openai.AsyncOpenAI, server: Server, question: str) -> None:
    """Fails unless all of it comes."""
    reason, pieces = None, 0
    async for chunk in await client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": question}],
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        [choice] = chunk.choices
        reason, pieces = choice.finish_reason or reason, pieces + 1
    assert reason == "length"
    assert pieces > 1


@asynccontextmanager
async def load(server: Server) -> AsyncIterator[list[int]]:
    """So many clients of two tenants, each with one question after the other. Yields what is
    going to be the number of answers of each; at the end no question has failed."""
    enough, answers = asyncio.Event(), [0] * STREAMS

    async def keep_asking(index: int) -> None:
        key = ("demo-alice", "demo-bob")[index % 2]
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key=key, max_retries=0
        ) as client:
            while not enough.is_set():
                await ask(client, server, f"Tell me about the number {index}.")
                answers[index] += 1

    async with asyncio.TaskGroup() as group:
        for index in range(STREAMS):
            group.create_task(keep_asking(index))
        yield answers
        enough.set()


async def decisions(server: Server) -> list[dict[str, Any]]:
    """Those that changed something."""
    url = server.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
        changes: list[dict[str, Any]] = (await client.get("/admin/scaling")).json()["changes"]
    for change in changes:
        if change["reported"]:
            shares = [change[name] for name in ("busy", "bubble", "starved", "spare")]
            assert sum(shares) == pytest.approx(1, abs=0.01)
    return changes


@pytest.mark.long
async def test_one_engine_becomes_three_under_load_and_one_again(
    serve_run: Callable[..., Any],
) -> None:
    with serve_run() as server:
        await wait_for_engines(server, 1)
        async with load(server) as answers:
            await wait_for_engines(server, 3)
            settled = sum(answers)

            async def all_three_have_answered() -> bool:
                return sum(answers) > settled + 2 * STREAMS

            await until(all_three_have_answered, PATIENCE_S)
        await wait_for_engines(server, 1)
        changes = await decisions(server)
    print([(one["replicas"], one["reason"]) for one in changes])
    counts = [change["replicas"] for change in changes]
    top = counts.index(3)
    assert counts == [*sorted(counts[:top]), 3, 2, 1]
    for change in changes[: top + 1]:
        assert "replicas' worth expected" in change["reason"]
        assert change["busy"] > 0.1
        assert change["wait_s"] > 1 or change["expected"] > 0.8 * change["target"]
    for change in changes[top + 1 :]:
        assert "have been enough for 30 s" in change["reason"]
        assert change["spare"] > 0.5 > change["busy"]


@pytest.mark.long
async def test_no_engine_becomes_one_for_a_question_and_none_again(
    serve_run: Callable[..., Any],
) -> None:
    """R47."""
    with serve_run(min_replicas=0, zero_hold_s=20) as server:
        await wait_for_engines(server, 0)
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key="demo-bob", max_retries=0
        ) as client:
            await ask(client, server, "Is anybody there?")
        await wait_for_engines(server, 1)
        await wait_for_engines(server, 0)
        changes = await decisions(server)
    print([(one["replicas"], one["reason"]) for one in changes])
    assert [change["replicas"] for change in changes[-2:]] == [1, 0]
    # Either the backlog wakes it, or a call that waits at a handle: a rule of Serve's own.
    assert "wait" in changes[-2]["reason"] or "by Serve itself" in changes[-2]["reason"]
    assert "nothing to do" in changes[-1]["reason"]
    assert changes[-1]["spare"] > 0.9
