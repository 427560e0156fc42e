"""Administrators ask for a timeline over real HTTP, within bounds, and nobody else does."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from replica.messages import Trace
from serve_app.telemetry.scraping import KEY
from serve_app.trace import main
from tests import timelines
from tests.serve_app.metered_site import ADMIN_KEY, MeteredSite, key_of, metered_site, occupy, until


async def ordered(site: MeteredSite) -> Trace:
    """The engine has been told to trace."""
    engine = site.transport.engines["r"]
    await until(lambda: engine.traces)
    return engine.traces[0]


def code_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


async def test_a_timeline_comes_back_to_administrators_alone() -> None:
    async with metered_site(a={}) as site:
        for key in (None, key_of("a"), "wrong"):
            async with site.http(key) as client:
                assert (await client.post("/admin/trace")).status_code == 401
        async with site.http(ADMIN_KEY) as client:
            assert (await client.get("/admin/trace")).status_code == 405
            asking = asyncio.create_task(client.post("/admin/trace?steps=7&seconds=2.5"))
            trace = await ordered(site)
            assert (trace.steps, trace.seconds) == (7, 2.5)
            site.transport.engines["r"].trace()
            timelines.check((await asking).json())


async def test_one_trace_at_a_time_and_a_failed_one_is_told() -> None:
    async with metered_site(a={}) as site, site.http(ADMIN_KEY) as client:
        for outcome, status in (("busy", 409), ("failed", 500)):
            asking = asyncio.create_task(client.post("/admin/trace"))
            await ordered(site)
            site.transport.engines["r"].trace(outcome)
            assert code_of(await asking) == (status, f"trace_{outcome}")


async def test_what_there_is_not_cannot_be_traced() -> None:
    async with metered_site(a={}) as site, site.http(ADMIN_KEY) as client:
        for which in ("replica=other", "model=other", "model=other&replica=r"):
            assert code_of(await client.post(f"/admin/trace?{which}")) == (404, "trace_unknown")


OUT_OF_BOUNDS = {
    "steps": ("0", "-1", "301", "1.5", "", "x", "9" * 30, "²"),
    "seconds": ("0", "-1", "20.1", "nan", "inf", "x", ""),
}


async def test_what_is_out_of_bounds_is_refused() -> None:
    async with metered_site(a={}) as site, site.http(ADMIN_KEY) as client:
        for param, texts in OUT_OF_BOUNDS.items():
            for text in texts:
                query = f"/admin/trace?{param}={text}"
                reply = await client.post(query, content=b"x" * 100_000)
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), text
        assert site.transport.engines["r"].traces == []


async def test_the_busiest_replica_is_traced_unless_one_is_named() -> None:
    async with metered_site(a={}) as site, site.http(ADMIN_KEY) as client:
        await site.transport.start("z")
        site.streams.connect("z")
        await until(lambda: len(site.streams.ready) == 2)
        running = await occupy(site)
        for query, name in (("", "r"), ("?model=text&replica=z", "z"), ("?replica=r", "r")):
            asking = asyncio.create_task(client.post(f"/admin/trace{query}"))
            engine = site.transport.engines[name]
            await until(lambda engine=engine: engine.traces)
            engine.trace()
            assert (await asking).json()["otherData"]["engine"] == name
        running.cancel()


async def test_an_engine_that_dies_meanwhile_ends_the_wait() -> None:
    async with metered_site(a={}) as site, site.http(ADMIN_KEY) as client:
        asking = asyncio.create_task(client.post("/admin/trace"))
        await ordered(site)
        site.transport.engines["r"].die()
        assert code_of(await asking) == (500, "trace_failed")


async def test_the_command_writes_the_file_and_prints_shares(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv(KEY, ADMIN_KEY)
    path = tmp_path / "trace.json"
    async with metered_site(a={}) as site:
        command = asyncio.create_task(
            asyncio.to_thread(main, [f"{site.url}/v1", "--steps", "7", "-o", str(path)])
        )
        assert (await ordered(site)).steps == 7
        site.transport.engines["r"].trace()
        await command
    text = capsys.readouterr().out
    assert "gaps between them" in text
    assert b"traceEvents" in path.read_bytes()


REFUSED = [
    ("wrong", [], "401: FAIRSTREAM_ADMIN_KEY"),
    (ADMIN_KEY, ["--steps", "1000"], "400: steps must be a whole number from 1 to 300"),
    (ADMIN_KEY, ["--replica", "other"], "404: There is no such replica"),
]


async def test_the_command_says_why_there_is_none(tmp_path, monkeypatch) -> None:
    path = tmp_path / "trace.json"
    async with metered_site(a={}) as site:
        for key, arguments, words in REFUSED:
            monkeypatch.setenv(KEY, key)
            with pytest.raises(SystemExit, match=words):
                await asyncio.to_thread(main, [site.url, "-o", str(path), *arguments])
    assert not path.exists()
