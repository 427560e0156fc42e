from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from replica.config import EngineConfig
from replica.messages import (
    Abort,
    Backlog,
    Failed,
    Output,
    Ready,
    Sampling,
    Submit,
    decode_event,
    encode,
)
from serve_app.fleet import engine_host
from serve_app.fleet.engine_host import EngineHost
from tests.serve_app.scripted_engine import ScriptedEngine, tokens


def submit(request_id: str = "r", max_tokens: int = 5) -> Submit:
    sampling = Sampling(max_tokens=max_tokens)
    return Submit(request_id=request_id, prompt_ids=(1,), sampling=sampling)


@pytest.fixture
async def engine() -> ScriptedEngine:
    return await ScriptedEngine.start(EngineConfig(model="0.001"))


@pytest.fixture
async def host(engine: ScriptedEngine) -> AsyncIterator[EngineHost]:
    host = EngineHost(engine)
    yield host
    await host.close()


async def outputs(host: EngineHost, ingress: str, offsets: dict[tuple[str, int], int]):
    """The outputs of one stream until nothing is unfinished; checks that it opens with Ready."""
    stream = host.steps(ingress, offsets)
    assert isinstance(decode_event(await anext(stream)), Ready)
    found: list[Output] = []
    unfinished = set(offsets)
    async for message in stream:
        found += decode_event(message).outputs
        unfinished -= {(o.request_id, o.attempt) for o in found if o.finish_reason}
        if not unfinished:
            break
    await stream.aclose()
    return found


async def test_each_ingress_gets_its_own_outputs(host: EngineHost) -> None:
    for ingress, name in (("x", "r1"), ("y", "r2")):
        host.submit(ingress, [encode(submit(name))])
    for ingress, name in (("x", "r1"), ("y", "r2")):
        found = await outputs(host, ingress, {(name, 0): 0})
        assert {output.request_id for output in found} == {name}
        assert tuple(t for output in found for t in output.token_ids) == tokens(name, 5)


async def test_a_second_submit_does_not_reach_the_engine(
    host: EngineHost, engine: ScriptedEngine
) -> None:
    host.submit("x", [encode(submit()), encode(submit())])
    host.submit("x", [encode(submit())])
    assert engine.commands == [submit()]


async def test_a_submit_that_its_abort_overtook_does_not_reach_the_engine(
    host: EngineHost, engine: ScriptedEngine
) -> None:
    host.abort("x", [("r", 0)])
    host.submit("x", [encode(submit())])
    assert engine.commands == []


async def test_a_submit_that_cannot_be_read_is_refused_and_the_others_are_not(
    host: EngineHost, engine: ScriptedEngine
) -> None:
    """They come together, from an ingress of another version, say."""
    odd = msgspec.msgpack.encode({"type": "submit", "request_id": "odd", "prompt_ids": "text"})
    host.submit("x", [b"\xc1", encode(Abort(request_id="r")), odd, encode(submit())])
    assert engine.commands == [submit()]
    found = await outputs(host, "x", {("r", 0): 0, ("odd", 0): 0})
    [refused] = [output for output in found if output.request_id == "odd"]
    assert refused.finish_reason == "error"
    assert "prompt_ids" in refused.error
    assert tuple(t for o in found if o.request_id == "r" for t in o.token_ids) == tokens("r", 5)


async def test_a_sequence_that_has_ended_is_not_aborted(
    host: EngineHost, engine: ScriptedEngine
) -> None:
    """X2."""
    host.submit("x", [encode(submit())])
    await outputs(host, "x", {("r", 0): 0})
    host.abort("x", [("r", 0)])
    assert not any(isinstance(command, Abort) for command in engine.commands)


async def test_a_stream_of_a_host_that_drains_ends_when_all_is_delivered(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "HEARTBEAT_S", 0.02)
    host.submit("x", [encode(submit(max_tokens=30))])
    host.drains = True
    reports = [decode_event(message) async for message in host.steps("x", {("r", 0): 0})]
    found = [token for report in reports[1:] for out in report.outputs for token in out.token_ids]
    assert tuple(found) == tokens("r", 30)


async def test_the_last_word_of_a_dead_engine_is_why(
    host: EngineHost, engine: ScriptedEngine
) -> None:
    engine.die("out of memory")
    events = [decode_event(message) async for message in host.steps("x", {})]
    assert events[-1] == Failed(reason="out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        host.raise_if_dead()


async def test_an_engine_that_hangs_counts_as_gone(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "ENGINE_SILENCE_S", 0.05)
    host = EngineHost(engine)
    host.raise_if_dead()
    events = [decode_event(message) async for message in host.steps("x", {})]
    assert isinstance(events[-1], Failed)
    with pytest.raises(RuntimeError, match="silent"):
        host.raise_if_dead()
    await host.close()


async def test_a_host_that_was_late_itself_takes_no_engine_for_hung(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "ENGINE_SILENCE_S", 0.5)
    host = EngineHost(engine)
    await asyncio.sleep(0.01)
    time.sleep(0.7)  # noqa: ASYNC251  # the loop gets no core
    await asyncio.sleep(0.06)
    host.raise_if_dead()
    await host.close()


async def test_the_engine_hears_of_the_backlog_when_it_changes(
    host: EngineHost, engine: ScriptedEngine
) -> None:
    for waiting in (False, True, True, False):
        host.tell_backlog(waiting)
    assert engine.commands == [Backlog(waiting=True), Backlog(waiting=False)]


async def test_a_quiet_stream_carries_heartbeats(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "HEARTBEAT_S", 0.01)
    stream = host.steps("x", {})
    messages = [await asyncio.wait_for(anext(stream), 1) for _ in range(4)]
    assert not any(decode_event(message).outputs for message in messages[1:])
    await stream.aclose()
