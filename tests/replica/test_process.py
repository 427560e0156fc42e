"""The engine's own process: real sockets, real signals."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replica.client import EngineClient, EngineFailed
from replica.config import EngineConfig
from replica.logs import LogFile
from replica.messages import Abort, Output, StepReport, Stop
from tests.models import random_model, save, save_tiny
from tests.oracle import Oracle
from tests.script import submit


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """In float16, which "auto" computes in float32."""
    return save(random_model().half(), tmp_path_factory.mktemp("tiny"))


def config(folder: str, **options: object) -> EngineConfig:
    settings = {"model": folder, "dtype": "auto", "threads": 1, "kv_tokens": 2048}
    return EngineConfig(**(settings | options))


async def outputs_until_end(client: EngineClient, names: set[str]) -> list[Output]:
    found: list[Output] = []
    async for report in client.events():
        found += report.outputs
        names = names - {output.request_id for output in report.outputs if output.finish_reason}
        if not names:
            return found
    raise AssertionError("the stream ended")


async def test_answers_of_the_process_equal_the_reference(folder):
    client = await EngineClient.start(config(folder))
    try:
        assert (client.ready.vocab_size, client.ready.eos_token_ids) == (260, (256,))
        assert client.ready.max_model_len == 512
        assert client.starting_s > 0
        prompts = {f"r{i}": tuple(range(i, i + 20)) for i in range(6)}
        for name, prompt in prompts.items():
            client.send(submit(name, prompt, max_tokens=12))
        found = await asyncio.wait_for(outputs_until_end(client, set(prompts)), 30)
        oracle = Oracle(folder, 12)
        for name, prompt in prompts.items():
            ids = [token for out in found if out.request_id == name for token in out.token_ids]
            assert ids == oracle.greedy(prompt, 12)
    finally:
        await client.close()
    assert not client.alive


async def test_neither_odd_ends_of_text_nor_odd_messages_end_the_process(tmp_path):
    """Each of them did, and the engine after it, which got the same request."""
    folder = save_tiny(tmp_path, eos_token_id=[256, 100000])
    client = await EngineClient.start(config(folder))
    try:
        assert client.ready.eos_token_ids == (256,)
        for data in (b"", b"\xc1", b"\x91" * 100_000):
            await client._socket.send(data)
        client.send(submit("held", min_tokens=3, max_tokens=6))
        client.send(submit("odd", seed=2**64 - 1, top_k=2**63, temperature=1.0))
        found = await asyncio.wait_for(outputs_until_end(client, {"held", "odd"}), 30)
        assert {out.request_id for out in found if out.error} == {"odd"}
        assert sum(len(out.token_ids) for out in found if out.request_id == "held") >= 3
    finally:
        await client.close()


async def test_reports_come_once_a_second_also_without_work(folder):
    client = await EngineClient.start(config(folder))
    try:
        reports: list[StepReport] = []
        async for report in client.events():
            reports.append(report)
            if len(reports) == 3:
                break
        assert reports[-1].stats.time.spare - reports[0].stats.time.spare > 1.5
        assert reports[-1].stats.time.busy == 0, "warm-up is not counted"
    finally:
        await client.close()


async def test_a_killed_process_ends_the_stream_with_an_error(folder):
    client = await EngineClient.start(config(folder))
    client.send(submit("a", max_tokens=400, ignore_eos=True))
    async for _ in client.events():
        break
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="ended with status -9"):
        await asyncio.wait_for(outputs_until_end(client, {"nobody"}), 5)
    client.send(Abort(request_id="a"))  # into the void, without an error
    await client.close()


async def test_a_drain_ends_the_process_after_what_runs(folder):
    client = await EngineClient.start(config(folder))
    client.send(submit("a", max_tokens=60, ignore_eos=True))
    client.send(Stop())
    found = await asyncio.wait_for(outputs_until_end(client, {"a"}), 20)
    assert sum(len(output.token_ids) for output in found) == 60
    with pytest.raises(EngineFailed, match="ended with status 0"):
        await asyncio.wait_for(outputs_until_end(client, {"nobody"}), 5)
    await client.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": "/nowhere/model.gguf"}, "no file"),
        ({"kv_tokens": 100_000, "max_model_len": 100_000}, "context ends at 512"),
    ],
)
async def test_what_cannot_work_is_refused_with_a_sentence(folder, options, sentence):
    with pytest.raises(EngineFailed, match=sentence) as refused:
        await EngineClient.start(config(folder, **options))
    assert "\n" not in str(refused.value)


async def test_it_writes_a_log_of_its_own(folder, tmp_path):
    """What it warns of, and why it ended."""
    log = LogFile(str(tmp_path / "engine.log"), {"replica": "a"})
    client = await EngineClient.start(config(folder, kv_tokens=256), log)
    client._socket.send(b"no command")
    client.send(Stop())
    await asyncio.wait({client._exit}, timeout=10)
    await client.close()
    with pytest.raises(EngineFailed):
        await EngineClient.start(config("/nowhere/model.gguf"), log)
    lines = [json.loads(line) for line in (tmp_path / "engine.log").read_text().splitlines()]
    assert all(line["replica"] == "a" and line["time"] for line in lines)
    told = [(line["level"], line["message"]) for line in lines]
    assert any(level == "WARNING" and "limited to 256 tokens" in text for level, text in told)
    assert ("WARNING", "A command of 10 bytes cannot be read") in told
    assert lines[-1]["level"] == "CRITICAL"
    assert "no file" in lines[-1]["traceback"]


async def test_a_start_that_fails_leaves_no_failure_unseen(folder, monkeypatch):
    """The process is told to stop before it listens."""
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))

    async def fail(client: EngineClient) -> None:
        raise EngineFailed("too early")

    monkeypatch.setattr(EngineClient, "_next_event", fail)
    with pytest.raises(EngineFailed, match="too early"):
        await EngineClient.start(config(folder))
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


def test_the_process_dies_with_its_parent(folder, tmp_path):
    """However the parent ends: here by SIGKILL, in the middle of a step."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from replica.client import EngineClient\n"
        "from replica.config import EngineConfig\n"
        "async def main():\n"
        f"    client = await EngineClient.start(EngineConfig(model={folder!r}, dtype='float32'))\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _runs(engine):
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
