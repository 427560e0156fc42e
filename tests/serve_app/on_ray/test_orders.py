"""Administrators stop a tenant or a request, on a running service with two ingresses."""

from __future__ import annotations

import asyncio

import httpx

from router.tenant import digest
from tests.serve_app.on_ray.flood import Stream
from tests.serve_app.on_ray.site import ADMIN_KEY, BULK_KEY, KEY, MODEL, Site, until

BODY = {"model": MODEL, "prompt": "on:", "max_tokens": 15000, "ignore_eos": True}


async def test_what_became_of_a_request_is_told_by_every_ingress(site: Site) -> None:
    """Also by those that have not served it."""
    async with site.http() as acme, site.http(ADMIN_KEY) as admin:
        short = BODY | {"max_tokens": 3}
        replies = [await acme.post("/v1/completions", json=short) for _ in range(4)]
        names = [name for each in replies
                 for name in (each.json()["id"], each.headers["x-request-id"])]  # fmt: skip

        async def all_are_told() -> bool:
            found = [await admin.get(f"/admin/requests/{name}") for name in names * 4]
            return all(each.status_code == 200 for each in found)

        await until(all_are_told, 20)
        [told] = (await admin.get(f"/admin/requests/{names[0]}")).json()["data"]
        assert (told["outcome"], told["tenant"], told["output_tokens"]) == ("succeeded", "acme", 3)
        assert told["phases"]["prefill"] > 0
        assert (await acme.get(f"/admin/requests/{names[0]}")).status_code == 401
        tenant = (await admin.get("/admin/tenants/acme")).json()
        assert (tenant["id"], tenant["why"]) == ("acme", [])


async def test_a_tenant_and_a_request_are_stopped_now(site: Site) -> None:
    """Whichever ingress has them, and wherever the tenant has gone."""
    async with site.http() as acme, site.http(BULK_KEY) as bulk, site.http(ADMIN_KEY) as admin:
        streams = [Stream(BODY) for _ in range(4)]
        kept = Stream(BODY)
        reading = [asyncio.create_task(stream.read(acme)) for stream in streams]
        other = asyncio.create_task(kept.read(bulk))

        async def all_are_listed() -> bool:
            told = await listed(admin, "acme") + await listed(admin, "bulk")
            return [each["state"] for each in told] == ["running"] * 5

        await until(all_are_listed)
        reply = await admin.post("/admin/tenants/acme/pause")
        assert reply.json() == {"id": "acme", "paused": True}
        await asyncio.wait_for(asyncio.gather(*reading), 5)
        assert {stream.told[-1]["error"]["code"] for stream in streams} == {"tenant_paused"}
        for _ in range(4):
            refused = await acme.post("/v1/completions", json=BODY)
            assert refused.json()["error"]["code"] == "tenant_paused"
        await admin.post("/admin/tenants/acme/resume")

        async def is_served() -> bool:
            short = await acme.post("/v1/completions", json=BODY | {"max_tokens": 1})
            return short.status_code == 200

        await until(is_served, 5)
        assert not other.done()
        acme_alone = {"tenants": [{"id": "acme", "keys": [digest(KEY)]}], "revision": 3}
        await site.deploy(Admission={"user_config": acme_alone})

        async def bulk_is_gone() -> bool:
            states = (await admin.get("/admin/tenants")).json()["data"]
            return {"id": "bulk", "removed": True, "queued": 0, "running": 1,
                    "paused": False} in states  # fmt: skip

        await until(bulk_is_gone)
        [one] = await listed(admin, "bulk")
        reply = await admin.delete(f"/admin/requests/{one['id']}")
        assert reply.json() == {"id": one["id"], "sequences": 1}
        await asyncio.wait_for(other, 5)
        assert kept.told[-1]["error"]["code"] == "request_stopped"
        await site.deploy()


async def listed(admin: httpx.AsyncClient, tenant: str) -> list[dict[str, str]]:
    reply = await admin.get("/admin/requests", params={"tenant": tenant})
    return reply.json()["data"]
