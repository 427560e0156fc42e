"""Timelines of a real engine in a process of its own."""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from replica.client import EngineClient
from replica.config import EngineConfig
from replica.messages import Sampling, Submit, encode
from serve_app.fleet import timelines as module
from serve_app.fleet.engine_host import EngineHost
from serve_app.fleet.timelines import Timeline
from tests import timelines
from tests.models import save_tiny
from tests.serve_app.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineHost]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    config = EngineConfig(model=folder, dtype="float32", threads=1, kv_tokens=8192)
    host = EngineHost(await EngineClient.start(config))
    yield host
    await host.close()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where traces are written to on their way."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def send(host: EngineHost, name: str, max_tokens: int = 2000) -> None:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    host.submit("x", [encode(Submit(request_id=name, prompt_ids=(1, 2, 3), sampling=sampling))])


def read(found: Timeline) -> dict[str, Any]:
    assert found.outcome == "written"
    made: dict[str, Any] = json.loads(gzip.decompress(found.compressed))
    timelines.check(made)
    return made


async def test_steps_of_a_running_engine_become_a_timeline(host, folders) -> None:
    """Requests that come meanwhile are seen; a second trace at a time is refused."""
    send(host, "before")
    asked = asyncio.create_task(host.timelines.record(40, 10.0, "tiny r1"))
    await asyncio.sleep(0)
    second = asyncio.create_task(host.timelines.record(40, 10.0, "tiny r1"))
    send(host, "a", 5)
    assert (await second).outcome == "busy"
    made = read(await asked)
    told = made["otherData"]
    assert told["engine"] == "tiny r1"
    assert told["hazards"] == []
    assert told["shares"]["all"]["steps"] == 40
    assert told["shares"]["mixed eager"]["steps"] >= 1
    assert len(timelines.lane(made, "compute")) == 40
    for name in ("CPU schedule", "CPU launch", "CPU wait for D2H", "CPU deliver", "H2D", "D2H"):
        assert len(timelines.lane(made, name)) >= 40, name
    assert not any(folders.iterdir())
    host.abort("x", [("before", 0)])


async def test_an_engine_without_work_is_traced_to_the_end_of_its_time(host, folders) -> None:
    made = read(await host.timelines.record(300, 0.2, "tiny r1"))
    assert made["otherData"]["shares"]["all"]["steps"] == 0
    assert 0.2 <= made["otherData"]["seconds"] < 3


async def test_whoever_asks_may_leave(host, folders) -> None:
    """The engine goes on, and can be traced again when that trace is over."""
    asked = asyncio.create_task(host.timelines.record(300, 0.2, "tiny r1"))
    await asyncio.sleep(0.05)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not any(folders.iterdir())
    send(host, "later")
    await asyncio.sleep(0.5)
    found = await host.timelines.record(5, 5.0, "tiny r1")
    assert read(found)["otherData"]["shares"]["all"]["steps"] == 5
    host.abort("x", [("later", 0)])


async def test_an_engine_that_writes_for_long_does_not_count_as_hung(monkeypatch) -> None:
    monkeypatch.setattr("serve_app.fleet.engine_host.ENGINE_SILENCE_S", 0.1)
    host = EngineHost(await ScriptedEngine.start(EngineConfig(model="0.001")))
    asked = asyncio.create_task(host.timelines.record(300, 0.0, "tiny r1"))
    await asyncio.sleep(0.4)
    host.raise_if_dead()
    asked.cancel()
    await asyncio.sleep(0.4)
    with pytest.raises(RuntimeError, match="silent"):
        host.raise_if_dead()
    await host.close()


async def test_what_no_timeline_can_be_made_of_is_told(tmp_path) -> None:
    assert await module._made(tmp_path, "tiny r1") == Timeline("failed")
