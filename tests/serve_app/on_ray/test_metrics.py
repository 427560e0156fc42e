"""Prometheus finds what our rules and dashboards ask for, on a running cluster."""

from __future__ import annotations

import re

import anyio
import httpx
import openai
import ray

from tests.k8s.manifests import ROOT
from tests.serve_app.on_ray.site import MODEL, Site, complete, until

NOT_HERE = {"ray_fairstream_preemptions_total"}
"""Counts what does not happen here."""


async def test_every_metric_that_is_asked_for_is_exported(site: Site) -> None:
    """Processes pass metrics on every ten seconds or so. Nothing is scaled here."""
    files = (ROOT / "k8s/monitoring").iterdir()
    asked = {name for file in files for name in re.findall(r"ray_\w+", file.read_text())}
    asked = {name for name in asked if not name.startswith("ray_fairstream_scaling_")}
    port = ray.nodes()[0]["MetricsExportPort"]
    found = ""

    async def all_are_there() -> bool:
        nonlocal found
        async with httpx.AsyncClient() as client:
            found = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        return all(f"\n{name}{{" in found for name in asked - NOT_HERE)

    async with site.openai() as client, anyio.create_task_group() as group:
        await complete(client, "hello")
        group.start_soon(_ask_on, client)  # queues are told of tenants that have one
        await until(all_are_there, 40)
        group.cancel_scope.cancel()
    assert {
        "ray_fairstream_gpu_seconds_total",
        "ray_fairstream_requests_total",
        "ray_serve_deployment_replica_starts_total",
    } <= asked
    assert re.search(rf'ray_fairstream_replicas{{[^}}]*model="{MODEL}"[^}}]*}} 2', found)
    assert re.search(r'ray_fairstream_requests_total{[^}]*outcome="succeeded"', found)
    assert re.search(r'ray_fairstream_requests_total{[^}]*tenant="acme"', found)
    starts = r'ray_serve_deployment_replica_starts_total{[^}]*deployment="Replica"'
    assert re.search(starts, found)


async def _ask_on(client: openai.AsyncOpenAI) -> None:
    while True:
        await complete(client, "hello", 2000)
