"""One reading a second for all who look at the live page, and none for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import msgspec
import pytest

from serve_app.fleet import background
from serve_app.telemetry import live
from serve_app.telemetry.exposition import Source, exposition, merged
from serve_app.telemetry.live import MAX_VIEWERS, LiveFigures, TooManyViewers, snapshot
from serve_app.telemetry.readings import gathered, scrape
from tests.serve_app.told_service import Service

PERIOD_S = 0.02


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", PERIOD_S)


class Server:
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.reads, self.fails, self._service = 0, False, Service()

    async def read(self) -> list[Source]:
        self.reads += 1
        if self.fails:
            raise ConnectionError
        return self._service.sources()


async def data(events: AsyncIterator[bytes]) -> Any:
    """Of the next event that has some."""
    async with asyncio.timeout(5):
        async for event in events:
            if event.startswith(b"data: "):
                assert event.endswith(b"\n\n")
                return msgspec.json.decode(event.removeprefix(b"data: "))
    raise AssertionError("the stream has ended")


async def test_nothing_is_read_while_nobody_looks() -> None:
    server = Server()
    figures = LiveFigures(server.read, background.start)
    await asyncio.sleep(3 * PERIOD_S)
    assert server.reads == 0
    for _ in range(2):
        with figures.viewing() as events:
            assert (await data(events))["engines"][0]["replica"] == "r1"
        before = server.reads
        await asyncio.sleep(5 * PERIOD_S)
        assert server.reads <= before + 1


async def test_all_who_look_share_one_reading() -> None:
    server = Server()
    figures = LiveFigures(server.read, background.start)
    with ExitStack() as stack:
        viewers = [stack.enter_context(figures.viewing()) for _ in range(MAX_VIEWERS)]
        for viewer in viewers:
            assert (await anext(viewer)).startswith(b": ")  # at once, so that the head goes out
        events = [await asyncio.gather(*map(anext, viewers)) for _ in range(6)]
        assert all(len({*each}) == 1 for each in events)
        assert len({event[0] for event in events}) > 1
        assert server.reads <= 6 + 1
        with pytest.raises(TooManyViewers), figures.viewing():
            pass
    with figures.viewing() as viewer:
        assert await anext(viewer)


async def test_a_newcomer_sees_the_latest_at_once() -> None:
    server = Server()
    figures = LiveFigures(server.read, background.start)
    with figures.viewing() as first:
        await data(first)
        with figures.viewing() as second:
            assert (await anext(second)).startswith(b"data: ")


async def test_the_stream_ends_when_the_process_leaves() -> None:
    leaves = asyncio.Event()
    figures = LiveFigures(Server().read, background.start, leaves.is_set)
    with figures.viewing() as events:
        await data(events)
        leaves.set()
        async with asyncio.timeout(5):
            rest = [event async for event in events]
        assert len(rest) <= 1


async def test_a_reading_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    figures = LiveFigures(server.read, background.start)
    with figures.viewing() as events:
        await data(events)
        server.fails = True
        async with asyncio.timeout(5):
            while (await anext(events)).startswith(b"data: "):
                pass
        server.fails = False
        assert await data(events)
    assert "The live page has no figures: ConnectionError()" in caplog.text


def test_it_reads_what_the_text_for_prometheus_says() -> None:
    service = Service(tenant='a"b\\c\n', tenants=3)
    sources = [service.sources() for _ in range(live.FEWEST)]
    told = [gathered(merged(each).values(), float(at)) for at, each in enumerate(sources)]
    text = [scrape(exposition(each).decode(), float(at)) for at, each in enumerate(sources)]
    assert told == text
    assert snapshot(told) == snapshot(text)


def test_what_is_shown_is_bounded() -> None:
    service, names = Service(tenants=90), count()
    many = [[*service.sources(), *(engine(service, next(names) % 60) for _ in range(60))]
            for _ in range(2)]  # fmt: skip
    shown = snapshot([gathered(merged(each).values(), float(at)) for at, each in enumerate(many)])
    assert (len(shown["tenants"]), shown["tenants_left_out"]) == (50, 40)
    assert (len(shown["engines"]), shown["engines_left_out"]) == (32, 29)
    assert len(msgspec.json.encode(shown)) < 64 * 1024


def engine(service: Service, number: int) -> Source:
    [told] = [each for each in service.sources() if each.name == "r1"]
    return told._replace(labels={"model": "tiny", "replica": f"e{number:02}"})
