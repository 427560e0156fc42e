"""Limits, usage and tenants of a real cluster."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.tenant import digest
from tests.serve_app.on_ray.site import (
    ADMIN_KEY,
    KEY,
    MODEL,
    Site,
    actors,
    complete,
    kill,
    until,
)

TENANT = "tenants: [{{id: acme, keys: ['{digest}'], requests_per_minute: {rate}}}]"


async def usage(site: Site) -> dict[str, Any]:
    """Of the tenant that these tests use, in the whole last day."""
    async with site.http(ADMIN_KEY) as client:
        reply = await client.get("/admin/usage", params={"tenant": "acme"})
        assert reply.status_code == 200, reply.text
        rows = reply.json()["data"]
    names = ("prompt_tokens", "output_tokens", "succeeded", "failed", "dollars")
    return {name: sum(row[name] for row in rows) for name in names}


async def test_usage_survives_the_death_of_admission_and_is_counted_once(site: Site) -> None:
    """Killed a second after the last answer; budget and journal go on from there."""
    before = await usage(site)
    async with site.openai() as client:
        await asyncio.gather(*(complete(client, f"number {n}", 16) for n in range(8)))
    await until(site.at_rest)
    await asyncio.sleep(1.0)
    after = await usage(site)
    assert after["succeeded"] == before["succeeded"] + 8
    epoch = (await site.snapshot()).epoch
    kill(actors("Admission")[0])

    async def is_new() -> bool:
        try:
            return (await site.snapshot()).epoch > epoch
        except Exception:
            return False

    await until(is_new, 20)
    assert await usage(site) == after
    [spent] = (await site.snapshot()).tenants["acme"].spent_micro_dollars.values()
    assert spent == round(after["dollars"] * 1e6)
    async with site.openai() as client:
        await complete(client, "and on it goes", 16)
    await until(site.at_rest)
    assert (await usage(site))["succeeded"] == after["succeeded"] + 1


@pytest.mark.long
async def test_what_ran_is_booked_although_admission_and_all_ingresses_died(site: Site) -> None:
    """A second after the last token was counted; it takes the next Admission half a minute."""
    before, received = await usage(site), [0] * 4

    async def listen(place: int) -> None:
        async with site.openai() as client:
            chunks = await client.completions.create(
                model=MODEL, prompt=f"{place}", max_tokens=8000, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in chunks:
                received[place] += 1

    listening = [asyncio.create_task(listen(place)) for place in range(4)]
    await asyncio.sleep(4.0)
    known = sum(received)
    await asyncio.sleep(1.0)
    for pid in (*actors("Admission"), *actors("Ingress")):
        kill(pid)
    ended = await asyncio.gather(*listening, return_exceptions=True)
    assert all(isinstance(one, Exception) for one in ended)

    async def is_booked() -> bool:
        try:
            return bool((await usage(site))["failed"] >= before["failed"] + 4)
        except (AssertionError, httpx.HTTPError):
            return False

    await until(is_booked, 90)
    tokens = (await usage(site))["output_tokens"] - before["output_tokens"]
    assert known > 100
    assert known <= tokens


async def gpu_seconds(site: Site) -> dict[str, float]:
    """Of the whole last day, by outcome."""
    async with site.http(ADMIN_KEY) as client:
        told = (await client.get("/admin/usage")).json()["cost"]["gpu_seconds"]
    return {name: float(seconds) for name, seconds in told.items()}


async def test_every_second_of_every_engine_is_accounted_for(site: Site) -> None:
    """The last report of an engine may be two seconds old."""
    before, began = await gpu_seconds(site), time.monotonic()
    async with site.openai() as client:
        await asyncio.gather(*(complete(client, f"cost {n}", 16) for n in range(8)))
    await until(site.at_rest)
    await asyncio.sleep(4.0)
    after, passed_s = await gpu_seconds(site), time.monotonic() - began
    replicas = len((await site.snapshot()).replicas)
    growth = sum(after.values()) - sum(before.values())
    assert growth == pytest.approx(replicas * passed_s, abs=replicas * 2.0)
    assert after["succeeded"] > before["succeeded"]
    assert after["open"] == pytest.approx(before["open"], abs=0.5)
    assert after["spare"] > before["spare"]
    assert after["starting"] >= 0.1 * replicas


async def test_a_changed_file_of_tenants_is_taken_over_and_a_bad_one_is_not(
    site: Site, tmp_path: Path
) -> None:
    """Without a deployment, a restart, or the loss of a counter."""
    file = tmp_path / "tenants.yaml"
    file.write_text(TENANT.format(digest=digest(KEY), rate=4))
    await site.deploy(Admission={"user_config": {"tenants": str(file), "revision": 10}})
    processes = actors("")

    async def limits() -> tuple[str | None, str | None]:
        async with site.http() as client:
            headers = (await client.get("/v1/models")).headers
        names = ("limit", "remaining")
        limit, remaining = (headers.get(f"x-ratelimit-{name}-requests") for name in names)
        return limit, remaining

    async def shows(limit: str) -> bool:
        return all([(await limits())[0] == limit for _ in range(8)])

    await until(lambda: shows("4"))
    async with site.openai() as client:
        await asyncio.gather(*(complete(client, text, 4) for text in ("one", "two")))
    file.write_text("tenants: [{id: acme, weight: heavy}]")
    await asyncio.sleep(1.0)
    assert await shows("4")
    file.write_text(TENANT.format(digest=digest(KEY), rate=3))
    await until(lambda: shows("3"))
    async with site.openai() as client:
        reply = await client.completions.with_raw_response.create(
            model="tiny", prompt="three", max_tokens=4
        )
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert actors("") == processes
    await site.deploy()


async def test_the_admin_routes_are_closed_to_tenants(site: Site) -> None:
    for key in (KEY, "wrong"):
        async with site.http(key) as client:
            for path in ("/admin/tenants", "/admin/usage"):
                assert (await client.get(path)).status_code == 401
    async with site.http(ADMIN_KEY) as client:
        tenants = (await client.get("/admin/tenants")).json()["data"]
        assert ("acme", 1000.0) in [(one["id"], one["monthly_budget"]) for one in tenants]
        assert (await client.get("/v1/models")).status_code == 401
