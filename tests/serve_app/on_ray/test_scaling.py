"""The number of replicas follows the load on a real cluster, by the engines' own signals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray import serve

from tests.serve_app.on_ray.exported import asked, exported
from tests.serve_app.on_ray.site import ADMIN_KEY, APP, Site, long_stream, until

LIMITS = {"start_s": 4, "hold_s": 4, "zero_hold_s": 4, "down_period_s": 1, "wait_s": 0.5}
"""They suit a test's patience."""
STREAMS, TOKENS = 24, 300


@pytest.fixture
async def sleeping(running_site: Site) -> AsyncIterator[Site]:
    """From no replica to three. The site of the other tests comes back afterwards."""
    config = running_site.config()
    [application] = config["applications"]
    application["autoscaling_policy"] = {
        "policy_function": "serve_app.scaling_policy:ScalingPolicy",
        "policy_kwargs": LIMITS,
    }
    args = application["args"]
    args["autoscaling"] = {"min_replicas": 0, "max_replicas": 3, "window_s": 2.0}
    args["ingresses"] = 1
    args["engine"]["max_rows"] = STREAMS // 3
    for tenant in args["tenants"]:
        tenant["max_concurrency"] = STREAMS
    site = Site(int(running_site.url.rpartition(":")[2]), config)
    await site.deploy()
    yield site
    await running_site.deploy()


async def replicas() -> int:
    """Those that Serve runs."""
    status = (await asyncio.to_thread(serve.status)).applications[APP]
    return status.deployments["Replica"].replica_states.get("RUNNING", 0)


@pytest.mark.long
async def test_from_none_to_one_to_three_and_back(sleeping: Site) -> None:
    """R47: with `min_replicas: 0` nothing runs at first, and nothing at the end."""

    async def none_runs() -> bool:
        return await replicas() == 0

    async def three_run() -> bool:
        return await replicas() == 3

    await until(none_runs, 60)
    async with sleeping.openai() as client:
        assert len(await long_stream(client, "wake up", 8)) > 0
        assert await replicas() == 1
        enough = asyncio.Event()

        async def keep_asking(index: int) -> None:
            while not enough.is_set():
                assert await long_stream(client, f"stream {index}", TOKENS)

        load = [asyncio.create_task(keep_asking(index)) for index in range(STREAMS)]
        await until(three_run, 90)
        enough.set()
        await asyncio.gather(*load)

    await until(none_runs, 60)
    await _decisions_say_why(sleeping)
    await until(_metrics_say_why, 40)


async def _metrics_say_why() -> bool:
    found = await exported()
    return all(
        re.search(rf"\n{name}{{[^}}]*pool=\"Replica\"", found)
        for name in asked()
        if name.startswith("ray_fairstream_scaling_")
    )


async def _decisions_say_why(site: Site) -> None:
    async with site.http(ADMIN_KEY) as admin:
        told: dict[str, Any] = (await admin.get("/admin/scaling")).json()
    changes = told["changes"]
    counts = [change["replicas"] for change in changes]
    asleep = counts.index(0)
    assert max(counts[asleep:]) == 3
    assert counts[-1] == 0
    # Either the backlog wakes it, or a call that waits at a handle: a rule of Serve's own.
    awake = next(change for change in changes[asleep + 1 :] if change["replicas"])
    assert "wait" in awake["reason"] or "by Serve itself" in awake["reason"]
    grown = next(change for change in changes if change["replicas"] > change["target"] > 0)
    assert grown["busy"] > 0
    shares = [grown[name] for name in ("busy", "bubble", "starved", "spare")]
    # Serve weights each series by the times at which it came.
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert "replicas' worth" in grown["reason"]
    assert changes[-1]["spare"] > 0.9
    assert "nothing to do" in changes[-1]["reason"]
    assert told["now"]["Replica"]["replicas"] == 0
