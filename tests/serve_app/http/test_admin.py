"""What administrators read, over real HTTP, and nobody else does."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.serve_app.metered_site import (
    ADMIN_KEY,
    SLOTS,
    MeteredSite,
    key_of,
    metered_site,
    occupy,
    until,
)

METERED = {"requests_per_minute": 100, "tokens_per_minute": 10_000}


async def test_administrators_see_tenants_and_usage_and_nobody_else_does() -> None:
    async with metered_site(a=METERED | {"daily_budget": 1.0}, b={}) as site:
        await site.ask(max_tokens=10)
        await site.ask("b", max_tokens=10)
        await site.settled()
        for key in (None, key_of("a"), "wrong"):
            async with site.http(key) as client:
                for path in ("/admin/tenants", "/admin/usage", "/admin/scaling"):
                    assert (await client.get(path)).status_code == 401
                    assert (await client.get(f"{path}%0A")).status_code in (401, 404)
        async with site.http(ADMIN_KEY) as client:
            assert (await client.get("/v1/models")).status_code == 401
            tenants = await client.get("/admin/tenants")
            assert [each["id"] for each in tenants.json()["data"]] == ["a", "b"]
            assert tenants.json()["data"][0]["tokens_per_minute"] == 10_000
            assert list(tenants.json()["data"][0]["spent"].values()) == [25e-6]
            assert "sha256" not in tenants.text
            span = {"from": "2027-01-01", "to": "2028-01-01T00:00:00Z"}
            told = (await client.get("/admin/usage", params=span)).json()
            usage, cost = told["data"], told["cost"]
            of_one = (await client.get("/admin/usage", params=span | {"tenant": "a"})).json()
            assert [row["tenant"] for row in of_one["data"]] == ["a"]
            assert "cost" not in of_one
            assert [(row["tenant"], row["output_tokens"]) for row in usage] == [
                ("a", 10),
                ("b", 10),
            ]
            assert [(row["gpu_seconds"], row["gpu_dollars"]) for row in usage] == [
                (2.5, pytest.approx(0.0025)),
                (2.5, pytest.approx(0.0025)),
            ]
            assert cost["gpu_seconds"] == {
                "succeeded": 5.0,
                "cancelled": 0.0,
                "failed": 0.0,
                "open": 1.0,
                "surplus": 1.0,
                "bubble": 0.5,
                "starved": 0.25,
                "spare": 12.0,
                "starting": 20.25,
            }
            assert cost["gpu_dollars"] == pytest.approx(0.040)
            assert cost["good_responses"] == 2
            assert cost["gpu_dollars_per_good_response"] == pytest.approx(0.020)
            table = await client.get("/admin/usage", params=span | {"tenant": "a", "format": "csv"})
            head, row = table.text.splitlines()
            assert head.startswith("hour,tenant,model,prompt_tokens")
            assert row.split(",")[-3:-1] == ["2.5e-05", "2.5"]
            assert (await client.get("/admin/usage?from=soon")).status_code == 400
            assert (await client.get("/admin/usage?from=1e400")).status_code == 400
            assert (await client.get("/admin/usage?format=xml")).status_code == 400
            assert (await client.post("/admin/usage")).status_code == 405


async def read(site: MeteredSite, path: str, key: str = ADMIN_KEY) -> httpx.Response:
    return await site.calls.get(path, headers={"Authorization": f"Bearer {key}"})


async def found(site: MeteredSite, name: str) -> list[dict[str, Any]]:
    reply = await read(site, f"/admin/requests/{name}")
    assert reply.status_code == 200, reply.text
    data: list[dict[str, Any]] = reply.json()["data"]
    return data


async def test_what_became_of_a_request_is_told_by_either_of_its_ids() -> None:
    async with metered_site(a={}) as site:
        headers = {"Authorization": f"Bearer {key_of('a')}", "X-Request-ID": "mine-1"}
        body = {"model": "text", "prompt": "the secret", "max_tokens": 7, "ignore_eos": True}
        reply = await site.calls.post("/v1/completions", json=body, headers=headers)
        [told] = await found(site, "mine-1")
        assert [told] == await found(site, reply.json()["id"])
    assert (told["id"], told["request_id"]) == (reply.json()["id"], "mine-1")
    assert (told["state"], told["outcome"], told["status"]) == ("over", "succeeded", 200)
    assert (told["tenant"], told["model"], told["replicas"]) == ("a", "text", ["r"])
    assert (told["prompt_tokens"], told["output_tokens"]) == (10, 7)
    assert sum(told["phases"].values()) == pytest.approx(told["seconds"], abs=0.001)
    assert sum(told["held_back"].values()) == pytest.approx(told["phases"]["admission"], abs=0.001)


async def test_a_request_that_is_not_over_is_found_too() -> None:
    async with metered_site(step_s=0.005, a={"max_concurrency": 1}) as site:
        asking = [asyncio.create_task(site.ask(max_tokens=250))]
        await until(lambda: site.transport.engines["r"].running)
        asking.append(asyncio.create_task(site.ask(max_tokens=2)))
        await asyncio.sleep(0.4)
        listed = (await read(site, "/admin/requests")).json()["data"]
        assert sorted(each["state"] for each in listed) == ["running", "waiting"]
        for each in listed:
            assert [told["state"] for told in await found(site, each["id"])] == [each["state"]]
        await asyncio.gather(*asking)
        await site.settled()
        for each in listed:
            assert [told["state"] for told in await found(site, each["id"])] == ["over"]


async def test_all_requests_of_one_id_are_told_newest_first() -> None:
    """A gateway tries again under the same id, and a client may call all of its requests so."""
    async with metered_site(a={"requests_per_minute": 23}) as site:
        headers = {"Authorization": f"Bearer {key_of('a')}", "X-Request-ID": "again"}
        for number in range(1, 24):
            body = {"model": "text", "prompt": "x", "max_tokens": number, "ignore_eos": True}
            await site.calls.post("/v1/completions", json=body, headers=headers)
        refused = await site.calls.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 429
        told = await found(site, "again")
    assert (told[0]["outcome"], told[0]["reason"]) == ("refused", "rate_limit_exceeded")
    assert [each["output_tokens"] for each in told[1:]] == list(range(23, 4, -1))


async def test_an_id_that_nobody_knows_is_a_404_and_nobody_else_may_ask() -> None:
    async with metered_site(a={}) as site:
        for path in ("/admin/requests/none", "/admin/tenants/none", "/admin/tenants/a/pause/x"):
            reply = await read(site, path)
            assert reply.status_code == 404
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert (await read(site, path, key_of("a"))).status_code == 401
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        for path, allow in (("requests/x", "GET, DELETE"), ("tenants/a", "GET")):
            reply = await site.calls.post(f"/admin/{path}", headers=admin)
            assert (reply.status_code, reply.headers["Allow"]) == (405, allow)


async def test_no_prompt_and_no_key_is_kept() -> None:
    async with metered_site(a={}) as site:
        secret = "my-dear-diary"
        bodies: list[dict[str, Any]] = [
            {"prompt": secret},
            {"prompt": f"{secret} " * 1000},
            {"prompt": secret, "max_tokens": secret},
            {"prompt": [secret, {secret: secret}]},
            {"prompt": secret, "stop": [secret] * 100},
            {"messages": [{"role": "user", "content": {secret: secret}}]},
        ]
        for place, body in enumerate(bodies):
            headers = {"Authorization": f"Bearer {key_of('a')}", "X-Request-ID": f"r{place}"}
            await site.calls.post("/v1/completions", json={"model": "text"} | body, headers=headers)
            reply = await read(site, f"/admin/requests/r{place}")
            assert reply.json()["data"], body
            assert secret not in reply.text
            assert key_of("a") not in reply.text


async def test_one_tenant_is_told_with_what_holds_it_back_now() -> None:
    limits = {"max_concurrency": 1, "max_queued": 1, "requests_per_minute": 2}
    async with metered_site(step_s=0.005, a=limits, b={"max_concurrency": SLOTS}) as site:
        calm = (await read(site, "/admin/tenants/a")).json()
        assert (calm["id"], calm["why"], calm["held_back"]) == ("a", [], {})
        asking = [await occupy(site), asyncio.create_task(site.ask(max_tokens=2))]
        await until(lambda: site.admission.router.snapshot().tenants["a"].queued)
        held = (await read(site, "/admin/tenants/a")).json()
        assert held["held_back"] == {"text": "concurrency"}
        assert held["why"] == [
            "nothing is left of its requests per minute: what comes gets a 429",
            "as many wait as may (max_queued 1): what comes gets a 429",
            "text: 1 of its requests run, and max_concurrency is 1",
        ]
        await site.calls.post(
            "/admin/tenants/a/pause", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
        )
        await asyncio.gather(*asking)
        paused = (await read(site, "/admin/tenants/a")).json()
        assert paused["paused"]
        assert "an administrator has paused it" in paused["why"][0]
        assert "sha256" not in str(paused)
