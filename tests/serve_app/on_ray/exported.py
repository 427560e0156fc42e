"""Metrics that rules and dashboards ask for, and those that a running cluster exports."""

from __future__ import annotations

import re

import httpx
import ray

from tests.k8s.manifests import ROOT


def asked() -> set[str]:
    """Names of Ray's metrics, ours among them, in the files of k8s/monitoring."""
    files = (ROOT / "k8s/monitoring").iterdir()
    return {name for file in files for name in re.findall(r"ray_\w+", file.read_text())}


async def exported() -> str:
    """In Prometheus' text format. Processes pass them on every ten seconds or so."""
    port = ray.nodes()[0]["MetricsExportPort"]
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/metrics")).text
