"""`serve run` and `python -m serve_app.run`, as a user starts them and a supervisor ends them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.server import OUR_RUN, Server, serving
from router.tenant import digest
from tests.k8s.references import HA_PROXY
from tests.ports import free_ports
from tests.serve_app.on_ray.flood import Stream
from tests.serve_app.on_ray.site import KEY, MODEL, descendants, is_alive, kill, processes, until

GRACE_S = 8.0
END_S = 10.0
"""What Ray takes to end; on an idle machine 3 s."""


@pytest.fixture
def config(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a server beside any cluster that other tests use. It runs two requests at a time."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    [port] = free_ports(1)
    engine = {"model": model, "dtype": "float32", "threads": 1, "kv_tokens": 32768, "max_rows": 2}
    args = {
        "model_name": MODEL,
        "engine": engine,
        "lookahead": 0,
        "tenants": [{"id": "acme", "keys": [digest(KEY)]}],
        "grace_s": GRACE_S,
        "usage": None,
    }
    application = {"name": "fairstream", "import_path": "serve_app.app:build", "args": args}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [application]}))
    return file


def settle(config: Path, **args: Any) -> None:
    """Change settings of the application."""
    settings = yaml.safe_load(config.read_text())
    settings["applications"][0]["args"] |= args
    config.write_text(yaml.safe_dump(settings))


@pytest.fixture
def server(config: Path) -> Iterator[Server]:
    with serving(config, module=OUR_RUN) as running:
        yield running


@pytest.fixture(params=["Serve's proxy", "HAProxy"])
def server_behind(
    request: pytest.FixtureRequest, config: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """HAProxy as the manifests in k8s/ switch it on: ingresses then listen themselves, and Serve
    refuses some of what it allows otherwise."""
    if request.param == "HAProxy":
        for name in HA_PROXY:
            monkeypatch.setenv(name, "1")
        ports = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
        for name, port in zip(ports, free_ports(2), strict=True):
            monkeypatch.setenv(name, str(port))
    with serving(config, module=OUR_RUN) as running:
        yield running


def asking(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = server.base_url.removesuffix("/v1")
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60)


def body(tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "on:", "max_tokens": tokens, "ignore_eos": True}


async def cut_five(server: Server) -> None:
    """Streams whose clients hang up."""
    async with asking(server) as client:
        for _ in range(5):
            with suppress(TimeoutError):
                await asyncio.wait_for(Stream(body(5000)).read(client), 0.05)


async def ended(server: Server, family: list[int], seconds: float) -> int:
    """The exit status, once no process of it is left."""
    deadline = time.monotonic() + seconds
    status = await asyncio.to_thread(server.process.wait, seconds)
    while any(map(is_alive, family)):
        assert time.monotonic() < deadline, "a process outlives the server"
        await asyncio.sleep(0.1)
    return status


@pytest.mark.long
async def test_after_streams_were_cut_sigterm_ends_serve_run(config: Path) -> None:
    """R25. The exit status is Ray's."""
    with serving(config) as server:
        await cut_five(server)
        family = descendants(server.process.pid)
        assert len(family) > 5
        server.process.terminate()
        await ended(server, family, END_S)


async def test_answers_that_run_or_wait_outlive_sigterm(server_behind: Server) -> None:
    """C35, R25: the longest of them for the grace only. Nobody new is let in."""
    server = server_behind
    await cut_five(server)
    family = descendants(server.process.pid)
    short, long, queued = streams = [Stream(body(tokens)) for tokens in (600, 15000, 200)]
    async with asking(server) as client:
        reading = [asyncio.create_task(stream.read(client)) for stream in streams[:2]]

        async def both_run() -> bool:
            return bool(short.data and long.data)

        await until(both_run)
        reading.append(asyncio.create_task(queued.read(client)))
        await asyncio.sleep(0.2)
        assert not queued.data
        assert not reading[0].done()
        server.process.terminate()
        told_at = time.monotonic()

        async def is_unready() -> bool:
            return (await client.get("/ready")).status_code == 503

        await until(is_unready, 3)
        refused = await client.post("/v1/completions", json=body(1))
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "unavailable"
        await asyncio.gather(*reading)
    assert short.text
    assert queued.text
    assert long.told[-1]["error"]["code"] == "unavailable"
    assert b"[DONE]" not in long.data
    assert time.monotonic() - told_at < GRACE_S
    assert await ended(server, family, END_S) == 0


@pytest.mark.long
async def test_admission_may_die_meanwhile(config: Path) -> None:
    """What runs is waited for, and who starts in its place is told, too."""
    settle(config, grace_s=60.0)
    stream = Stream(body(5000))
    with serving(config, module=OUR_RUN) as server:
        family = descendants(server.process.pid)
        async with asking(server) as client:
            reading = asyncio.create_task(stream.read(client))

            async def runs() -> bool:
                return bool(stream.data)

            await until(runs)
            server.process.terminate()
            [admission] = processes("ServeReplica:fairstream:Admission", server.process.pid)
            kill(admission)
            await reading
        assert await ended(server, family, 30 + END_S) == 0
    assert stream.text


async def test_a_second_sigterm_ends_at_once(server: Server) -> None:
    """C35."""
    family = descendants(server.process.pid)
    async with asking(server) as client:
        stream = Stream(body(15000))
        reading = asyncio.create_task(stream.read(client))

        async def runs() -> bool:
            return bool(stream.data)

        await until(runs)
        server.process.terminate()
        await asyncio.sleep(1)
        assert server.process.poll() is None
        server.process.terminate()
        with pytest.raises(httpx.HTTPError):
            await reading
    assert b"[DONE]" not in stream.data
    assert await ended(server, family, END_S) == 1


def test_an_address_that_somebody_has_ends_with_the_reason(config: Path) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", yaml.safe_load(config.read_text())["http_options"]["port"]))
        somebody.listen()
        command = [sys.executable, "-m", *OUR_RUN, str(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"grace_s": -1}, "grace_s"),
        pytest.param({"tenants": "/no/such/file"}, "/no/such/file", marks=pytest.mark.long),
    ],
)
def test_what_cannot_start_ends_with_the_reason(
    config: Path, option: dict[str, Any], told: str
) -> None:
    """What the settings show, or what only Serve finds."""
    settle(config, **option)
    command = [sys.executable, "-m", *OUR_RUN, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert told in done.stderr
