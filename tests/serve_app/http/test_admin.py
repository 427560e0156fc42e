"""What administrators read, over real HTTP, and nobody else does."""

from __future__ import annotations

import pytest

from tests.serve_app.metered_site import ADMIN_KEY, key_of, metered_site

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
