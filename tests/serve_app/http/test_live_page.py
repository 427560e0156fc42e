"""The live page's files, which anybody may have, and its stream, which is for administrators."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.resources import files

import httpx
import msgspec
import pytest

from serve_app.http import live_page
from serve_app.telemetry import live
from serve_app.telemetry.live import MAX_VIEWERS
from tests.serve_app.live_site import KEY, live_site
from tests.serve_app.metered_site import until
from tests.serve_app.told_service import Service

ADMIN = {"Authorization": f"Bearer {KEY}"}
FILES = sorted(file.name for file in files("serve_app.http").joinpath("dashboard").iterdir())


class Server:
    def __init__(self) -> None:
        self.reads, self._service = 0, Service()

    async def read(self) -> list:
        self.reads += 1
        return self._service.sources()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    return Server()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with live_site(server.read) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def test_the_page_needs_no_key_and_holds_no_data(
    client: httpx.AsyncClient, server: Server
) -> None:
    for path in ("/dashboard", *(f"/dashboard/{name}" for name in FILES if name != "index.html")):
        answer = await client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "acme" not in answer.text
    assert server.reads == 0


async def test_what_the_page_refers_to_is_there(client: httpx.AsyncClient) -> None:
    """By addresses that hold behind a prefix, too; and nothing that the policy forbids."""
    page = (await client.get("/dashboard")).text
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    scripts = [(await client.get(f"/{each}")).text for each in named if each.endswith("app.js")]
    named += [f"dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', scripts[0])]
    assert len(named) >= 8
    for each in named:
        assert each.startswith("dashboard/")
        answer = await client.get(f"/{each}")
        assert answer.status_code == 200, each
        if each.endswith(".js"):
            assert answer.headers["content-type"].startswith("text/javascript")
    assert not re.search(r"<script(?![^>]*src=)|<style|style=| on\w+=", page)


def test_it_works_offline() -> None:
    for name in FILES:
        text = files("serve_app.http").joinpath("dashboard", name).read_text()
        text = re.sub(r"/\*!.*?\*/", "", text)  # where the library says whose it is
        others = set(re.findall(r"https?://[^\s\"')]+", text))
        assert others <= {"http://www.w3.org/2000/svg"}, name


async def test_a_browser_asks_again_and_gets_only_what_is_new(client: httpx.AsyncClient) -> None:
    first = await client.get("/dashboard")
    again = await client.get("/dashboard", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await client.head("/dashboard/app.js")
    assert (head.status_code, head.content) == (200, b"")


async def test_what_there_is_not(client: httpx.AsyncClient) -> None:
    for path in (
        "/dashboard/nothing.js",
        "/dashboard/index.html",
        "/dashboard/%2e%2e/live_page.py",
        "/dashboards",
        "/admin/live/",
    ):
        assert (await client.get(path, headers=ADMIN)).status_code == 404, path
    for path in ("/dashboard", "/admin/live"):
        answer = await client.post(path, headers=ADMIN)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


async def test_a_slash_more_leads_to_the_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/dashboard/", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/dashboard")


async def test_figures_are_for_administrators(client: httpx.AsyncClient, server: Server) -> None:
    for key in ("", "Bearer wrong", f"Basic {KEY}", "Bearer"):
        answer = await client.get("/admin/live", headers={"Authorization": key})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert server.reads == 0


async def first_data(answer: httpx.Response) -> dict:
    async with asyncio.timeout(5):
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return msgspec.json.decode(line.removeprefix("data: "))
    raise AssertionError("the stream has ended")


async def test_events_come_until_the_client_leaves(
    client: httpx.AsyncClient, server: Server
) -> None:
    async with client.stream("GET", "/admin/live", headers=ADMIN) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (await first_data(answer))["tenants"][0]["tenant"] == "acme"

    async def stands_still() -> bool:
        before = server.reads
        await asyncio.sleep(0.1)
        return server.reads == before

    async with asyncio.timeout(5):
        while not await stands_still():
            pass


async def test_so_many_may_look_and_no_more(client: httpx.AsyncClient) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            ask = client.stream("GET", "/admin/live", headers=ADMIN)
            assert (await stack.enter_async_context(ask)).status_code == 200
        refused = await client.get("/admin/live", headers=ADMIN)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_viewers"
        assert int(refused.headers["retry-after"]) > 0
        stranger = await client.get("/admin/live")
        assert stranger.status_code == 401
    statuses: list[int] = []

    async def look() -> None:
        async with client.stream("GET", "/admin/live", headers=ADMIN) as answer:
            statuses.append(answer.status_code)

    async with asyncio.timeout(5):
        while statuses[-1:] != [200]:
            await look()


async def test_who_reads_slowly_misses_events_and_holds_nobody_up(
    client: httpx.AsyncClient, server: Server
) -> None:
    async with client.stream("GET", "/admin/live", headers=ADMIN) as slow:
        before = server.reads
        await until(lambda: server.reads > before + 20)
        async with client.stream("GET", "/admin/live", headers=ADMIN) as quick:
            assert await first_data(quick)
        assert await first_data(slow)


async def test_the_doctor_watches_and_says_what_limits_the_server(
    client: httpx.AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "LEAST_S", 0.2)
    answer = await client.get("/admin/doctor?seconds=0.3", headers=ADMIN)
    assert answer.status_code == 200
    found = answer.json()
    assert found["cause"] == "too little to say"  # of less than a second
    assert 0 < found["seconds"] < 1
    assert found["evidence"]
    assert found["advice"]
    assert sum(found["devices"].values()) == pytest.approx(1)
    assert server.reads > 4


@pytest.mark.parametrize("seconds", ["0", "8", "31", "nan", "inf", "-1", "long", ""])
async def test_the_doctor_watches_neither_too_briefly_nor_for_ever(
    client: httpx.AsyncClient, server: Server, seconds: str
) -> None:
    answer = await client.get("/admin/doctor", params={"seconds": seconds}, headers=ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"
    assert server.reads == 0


async def test_the_doctor_is_for_administrators(client: httpx.AsyncClient) -> None:
    assert (await client.get("/admin/doctor")).status_code == 401
    answer = await client.post("/admin/doctor", headers=ADMIN)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


async def test_a_doctor_who_can_read_nothing_says_so(
    client: httpx.AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "LEAST_S", 0.1)

    def fail() -> list:
        raise ConnectionError

    monkeypatch.setattr(server._service, "sources", fail)
    answer = await client.get("/admin/doctor?seconds=0.2", headers=ADMIN)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
