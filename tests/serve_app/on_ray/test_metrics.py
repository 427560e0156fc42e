"""Prometheus finds what our rules and dashboards ask for, on a running cluster."""

from __future__ import annotations

import re

import anyio
import openai

from router.tenant import digest
from tests.serve_app.on_ray.exported import asked, exported
from tests.serve_app.on_ray.site import KEY, MODEL, Site, complete, until

NOT_HERE = {"ray_fairstream_preemptions_total", "ray_fairstream_late_kernels_total"}
"""Counts what does not happen here."""


async def test_every_metric_that_is_asked_for_is_exported(site: Site) -> None:
    """Nothing is scaled here."""
    names = {name for name in asked() if not name.startswith("ray_fairstream_scaling_")}
    both = rf'ray_fairstream_replicas{{[^}}]*model="{MODEL}"[^}}]*}} 2'  # one may be new
    found = ""

    async def all_are_there() -> object:
        nonlocal found
        found = await exported()
        return all(f"\n{name}{{" in found for name in names - NOT_HERE) and re.search(both, found)

    async with site.openai() as client, anyio.create_task_group() as group:
        await complete(client, "hello")
        group.start_soon(_ask_on, client)  # queues are told of tenants that have one
        await until(all_are_there, 40)
        group.cancel_scope.cancel()
    assert {
        "ray_fairstream_gpu_seconds_total",
        "ray_fairstream_requests_total",
        "ray_serve_deployment_replica_starts_total",
    } <= names
    assert re.search(r'ray_fairstream_requests_total{[^}]*outcome="succeeded"', found)
    assert re.search(r'ray_fairstream_requests_total{[^}]*tenant="acme"', found)
    starts = r'ray_serve_deployment_replica_starts_total{[^}]*deployment="Replica"'
    assert re.search(starts, found)
    count = r'ray_fairstream_first_token_seconds_bucket{[^}]*le="300[^}]*model="%s"[^}]*} [1-9]'
    assert re.search(count % MODEL, found)
    assert KEY not in found
    assert digest(KEY)[7:] not in found


async def _ask_on(client: openai.AsyncOpenAI) -> None:
    while True:
        await complete(client, "hello", 2000)
