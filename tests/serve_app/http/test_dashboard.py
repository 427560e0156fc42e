"""The live page in a browser, before made-up processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from serve_app.telemetry import live
from serve_app.telemetry.exposition import Source
from tests.ports import free_ports
from tests.serve_app.browser import opened
from tests.serve_app.live_site import KEY, live_site
from tests.serve_app.told_service import Service

BAD_NAME = "<img src=x onerror=\"document.title='broken'\">"
PHONE = {"width": 390, "height": 844}


class Server:
    """Stands still or moves, or has nothing to tell."""

    def __init__(self, tenant: str = "acme", tenants: int = 3) -> None:
        self.moves, self.is_empty = True, False
        self._service = Service(tenant, tenants)
        self._last = self._service.sources()

    async def read(self) -> list[Source]:
        if self.is_empty:
            return []
        if self.moves:
            self._last = self._service.sources()
        return self._last


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.1)


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    async with live_site(server.read) as url:
        yield f"{url}/dashboard"


async def test_figures_are_shown_and_move(browser: Any, server: Server, url: str) -> None:
    async with opened(browser, url, KEY) as seen:
        await seen.page.wait_for_selector("#tenants tbody tr")
        assert await seen.text("#status") == "live"
        spent = (await seen.row("acme"))["spent"]
        await seen.page.wait_for_function(
            "(was) => !document.body.innerText.includes(was)", arg=spent
        )
        row = await seen.row("acme")
        assert row["tenant"] == "acme\nweight 2"
        assert (row["running"], row["waiting"]) == ("3", "7\nfor fair share")
        assert row["service"].split() == ["33%", "fair", "33%"]
        assert (row["left this minute"], row["budget left"]) == ("4,321 tokens", "day $2.50")
        text = await seen.text("[data-engine='tiny r1']")
        for words in ("busy 50%", "bubble 13%", "spare 38%", "KV 100% used", "3 running"):
            assert words in text
        assert await seen.page.locator("#engines canvas").count() == 1
        assert seen.errors == []
        assert seen.hosts == {urlsplit(url).netloc}


async def test_the_strip_has_the_colours_of_what_became_of_the_time(
    browser: Any, server: Server, url: str
) -> None:
    """From the top: 37.5% spare, 12.5% bubble, and half of it busy."""
    async with opened(browser, url, KEY, color_scheme="light") as seen:
        await seen.page.wait_for_selector("#engines canvas")
        await seen.page.wait_for_timeout(500)
        colours = await seen.page.eval_on_selector(
            "#engines canvas",
            """(canvas) => [0.2, 0.44, 0.8].map((share) => {
                 const at = [canvas.width - 3, Math.round(4 + share * (canvas.height - 8)), 1, 1];
                 return [...canvas.getContext("2d").getImageData(...at).data].join();
               })""",
        )
        states = await seen.page.evaluate(
            """() => ["spare", "bubble", "requests"].map((state) => {
                 const swatch = document.querySelector(`#states .${state}`);
                 return getComputedStyle(swatch).backgroundColor.match(/\\d+/g).join() + ",255";
               })"""
        )
    assert colours == states


async def test_names_are_text_and_nothing_else(browser: Any) -> None:
    server = Server(tenant=BAD_NAME, tenants=1)
    async with live_site(server.read) as url, opened(browser, f"{url}/dashboard", KEY) as seen:
        await seen.page.wait_for_selector("#tenants tbody tr")
        assert (await seen.row(BAD_NAME))["running"] == "3"
        assert await seen.page.locator("img").count() == 0
        assert await seen.page.title() == "fairstream"
        assert seen.errors == []


async def test_a_key_is_asked_for_and_kept_until_it_is_forgotten(browser: Any, url: str) -> None:
    async with opened(browser, url, "fs-wrong") as seen:
        await seen.page.wait_for_selector("#refusal:not(:empty)")
        assert await seen.page.is_visible("#gate")
        await seen.page.fill("#key", "schlüssel-☃")
        await seen.page.click("form button")
        assert "no key" in await seen.text("#refusal")
        await seen.page.fill("#key", KEY)
        await seen.page.click("form button")
        await seen.page.wait_for_selector("#tenants tbody tr")
        await seen.page.reload()
        await seen.page.wait_for_selector("#tenants tbody tr")
        assert KEY not in await seen.page.content()
        await seen.page.click("#forget")
        assert await seen.page.is_visible("#gate")
        await seen.page.reload()
        assert await seen.page.is_visible("#gate")
        assert (
            await seen.page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")
            == "[{},{}]"
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone_in_either_colours(browser: Any, url: str, scheme: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with opened(browser, url, KEY, viewport=PHONE, color_scheme=scheme) as seen:
        await seen.page.wait_for_selector("#tenants tbody tr")
        assert await seen.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        as_system = await seen.page.evaluate(ground)
        await seen.page.click("#theme")
        other = await seen.page.evaluate(ground)
        assert {as_system, other} == {"rgb(245, 246, 248)", "rgb(14, 17, 22)"}
        await seen.page.reload()
        assert await seen.page.evaluate(ground) == other


async def test_a_server_that_has_nothing_to_tell_says_so(
    browser: Any, server: Server, url: str
) -> None:
    server.is_empty = True
    async with opened(browser, url, KEY) as seen:
        await seen.page.wait_for_selector("#windows:not(:empty)")
        for each in ("engines", "models", "tenants"):
            assert await seen.page.is_visible(f"#no-{each}")
        assert "NaN" not in await seen.text("body")
        assert "undefined" not in await seen.text("body")
        server.is_empty = False
        await seen.page.wait_for_selector("#tenants tbody tr")
        assert not await seen.page.is_visible("#no-tenants")
        server.is_empty = True
        await seen.page.wait_for_selector("#no-engines", state="visible")
        assert seen.errors == []


async def test_it_comes_back_with_the_server(browser: Any, server: Server) -> None:
    [port] = free_ports(1)
    async with live_site(server.read, port) as url:
        leaving = opened(browser, f"{url}/dashboard", KEY)
        seen = await leaving.__aenter__()
        await seen.page.wait_for_selector("#tenants tbody tr")
    await seen.page.wait_for_selector("#status[data-state=lost]")
    assert await seen.page.is_visible("#tenants tbody tr >> nth=0")
    async with live_site(server.read, port):
        await seen.page.wait_for_selector("#status[data-state=live]")
        await leaving.__aexit__(None, None, None)
