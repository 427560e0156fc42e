"""`serve run` as a user starts it, and as a supervisor ends it."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import openai
import pytest
import yaml

from benchmarks.server import Server, serving
from router.tenant import digest
from tests.serve_app.on_ray.site import KEY, MODEL, descendants, is_alive

GRACE_S = 10.0


@pytest.fixture
def server(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beside any cluster that other tests use."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = {"model": model, "dtype": "float32", "threads": 1, "kv_tokens": 32768}
    tenants = [{"id": "acme", "keys": [digest(KEY)]}]
    args = {"model_name": MODEL, "engine": engine, "tenants": tenants}
    application = {"name": "fairstream", "import_path": "serve_app.app:build", "args": args}
    config = {"http_options": {"port": port}, "applications": [application]}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    with serving(file) as running:
        yield running


async def test_after_streams_were_cut_sigterm_ends_every_process(server: Server) -> None:
    """R25. The exit status is Ray's."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client:
        for _ in range(5):
            events = await client.completions.create(
                model=MODEL,
                prompt="cut",
                max_tokens=5000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await asyncio.sleep(0.05)
            await events.close()
    family = descendants(server.process.pid)
    assert len(family) > 5
    server.process.terminate()
    deadline = time.monotonic() + GRACE_S
    server.process.wait(GRACE_S)
    while any(map(is_alive, family)):
        assert time.monotonic() < deadline, "a process outlives the server"
        await asyncio.sleep(0.1)
