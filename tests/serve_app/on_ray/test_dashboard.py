"""The live page of a running cluster under load, in a browser, beside what `/metrics` says."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import openai

from serve_app.telemetry import figures
from serve_app.telemetry.live import MAX_VIEWERS
from serve_app.telemetry.readings import Readings, Scrape, scrape
from tests.serve_app.browser import Seen, opened
from tests.serve_app.on_ray.conftest import REPLICAS
from tests.serve_app.on_ray.site import ADMIN_KEY, MODEL, Site, complete, until

ROW = "#tenants tr:has(td:text('acme'))"
EVERYTHING = "() => [...document.querySelectorAll('[title]')].map((each) => each.title).join()"


async def scraped(site: Site) -> Scrape:
    async with site.http(ADMIN_KEY) as client:
        return scrape((await client.get("/metrics")).text, 0.0)


async def figures_of(site: Site, tenant: str) -> figures.Tenant:
    told = await scraped(site)
    found = figures.tenants(Readings([told, told._replace(at=1.0)]))
    return next(one for one in found if one.tenant == tenant)


async def test_the_page_shows_what_the_cluster_does(site: Site, browser: Any) -> None:
    """While it is asked, figures move; afterwards they are those of `/metrics`, to the digit."""
    async with opened(browser, f"{site.url}/dashboard", ADMIN_KEY) as seen:
        async with site.openai() as client, anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(_ask_on, client)
            await until(lambda: _is_busy(seen), 30)
            states = {await seen.page.evaluate(EVERYTHING)}
            await until(lambda: _changes(seen, states, 3), 15)
            before, spent = (await figures_of(site, "acme")).dollars, f"{ROW} td[data-label=spent]"
            await until(lambda: _reaches(seen, spent, before))
            shown = await seen.figure(spent)
            await until(lambda: _is_told(site, shown))
            # One that another test has ended is shown until nothing is known of it any more.
            await until(lambda: _are_shown(seen, REPLICAS + 1), 40)
            for row in await seen.page.locator("#engines .engine").all_inner_texts():
                assert MODEL in row or row.startswith("all together")
            group.cancel_scope.cancel()
        await until(site.at_rest)
        await until(lambda: _agrees(site, seen), 20)
        assert seen.errors == []
        assert seen.hosts == {urlsplit(site.url).netloc}


async def _ask_on(client: openai.AsyncOpenAI) -> None:
    while True:
        await complete(client, "hello", 100)


async def _is_busy(seen: Seen) -> bool:
    """Engines compute, tokens come, and somebody runs."""
    if not await seen.page.locator("#tenants tbody tr").count():
        return False
    row = await seen.row("acme")
    return (
        await seen.figure("[data-figure=output_per_s]") > 0
        and await seen.figure("#states [data-state=requests]") > 0
        and row.get("running") in {"1", "2", "3", "4"}
        and "100%" in row["service"]
        and "month $1,000.00" not in row["budget left"]
        and row["left this minute"].endswith("tokens")
    )


async def _reaches(seen: Seen, selector: str, figure: float) -> bool:
    return await seen.figure(selector) >= figure


async def _are_shown(seen: Seen, strips: int) -> bool:
    return await seen.page.locator("#engines canvas").count() == strips


async def _is_told(site: Site, spent: float) -> bool:
    return (await figures_of(site, "acme")).dollars >= spent


async def _changes(seen: Seen, states: set[str], often: int) -> bool:
    states.add(await seen.page.evaluate(EVERYTHING))
    return len(states) > often


async def _agrees(site: Site, seen: Seen) -> bool:
    one, told = await figures_of(site, "acme"), await scraped(site)
    columns = ("running", "waiting", "refused", "spent")
    shown = [await seen.figure(f"{ROW} td[data-label={name}]") for name in columns]
    used = max(told.metrics["fairstream_kv_usage_ratio"].values())
    return (
        shown == [0, 0, one.refused, one.dollars]
        and one.dollars > 0
        and await seen.figure("#tiles [data-figure=kv_used]") == used
    )


async def test_who_leaves_makes_room_for_another(site: Site) -> None:
    """Through Serve's proxy, more than all ingresses together let look at once."""

    async def looks() -> bool:
        async with client.stream("GET", "/admin/live") as answer:
            return answer.status_code == 200

    async with site.http(ADMIN_KEY) as client:
        for _ in range(2 * MAX_VIEWERS + 4):
            await until(looks)
    async with site.http() as tenant:
        assert (await tenant.get("/admin/live")).status_code == 401
    async with httpx.AsyncClient(base_url=site.url) as anybody:
        assert (await anybody.get("/dashboard")).status_code == 200
