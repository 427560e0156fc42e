"""A real browser without a window, and what it noticed on a page."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Debian's package of the first name has nothing but what is needed here."""


@asynccontextmanager
async def launched() -> AsyncIterator[Any]:
    """Skips where there is none."""
    playwright = pytest.importorskip("playwright.async_api", reason="needs the extra `dev`")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program)
        yield browser
        await browser.close()


@dataclass
class Seen:
    """A page, and what must not happen on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    """Of its console, and exceptions."""
    hosts: set[str] = field(default_factory=set)
    """That it asked for anything."""

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def figure(self, selector: str) -> float:
        """The exact one, as it is told to who points at it."""
        return float(await self.page.get_attribute(selector, "title") or "nan")

    async def row(self, tenant: str) -> dict[str, str]:
        """Texts of a tenant's cells by column."""
        cells = await self.page.eval_on_selector_all(
            "#tenants tbody tr",
            """(rows, name) => rows.filter((row) => row.cells[0].firstChild.data === name)
               .flatMap((row) => [...row.cells])
               .map((cell) => [cell.dataset.label, cell.innerText])""",
            tenant,
        )
        return dict(cells)


@asynccontextmanager
async def opened(browser: Any, url: str, key: str = "", **options: Any) -> AsyncIterator[Seen]:
    """The page at an address, after the key is given where there is one."""
    context = await browser.new_context(**options)
    page = await context.new_page()
    seen = Seen(page)
    page.on("console", lambda said: seen.errors.extend([said.text] * (said.type == "error")))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
    await page.goto(url)
    if key:
        await page.fill("#key", key)
        await page.click("form button")
    yield seen
    await context.close()
