"""What the way to Admission and back adds to a request, on a real cluster.

An ingress's own client asks the real deployment for grants while credits are free: 100 requests
at once, all the time. What it measures begins with the request's wish and ends with its grant.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from benchmarks.report import Report
from router.messages import Outcome, ReplicaReport, RequestInfo, Sync, SyncReply
from router.policy import FairPolicy
from serve_app.admission import Admission
from serve_app.app import COMMON
from serve_app.fleet.admission_client import AdmissionClient

CONCURRENT = 100
SECONDS = 10.0
WARM_UP_S = 2.0
TENANT = {"id": "t", "max_concurrency": 10 * CONCURRENT, "max_queued": 10 * CONCURRENT}


async def latencies_ms(handle: DeploymentHandle, name: str) -> list[float]:
    """Each run is an ingress of its own, with a `name` that no other has."""
    admission = handle.options(_by_reference=False)

    async def sync(state: Sync) -> SyncReply:
        reply = await admission.sync.remote(msgspec.msgpack.encode(state))
        return msgspec.msgpack.decode(reply, type=SyncReply)

    client = AdmissionClient(name, sync, lambda: admission.watch.remote(name, (0, 0)))
    client.start()
    begun, waits = time.monotonic(), []

    async def ask(worker: int) -> None:
        for number in range(1_000_000):
            if time.monotonic() - begun > SECONDS + WARM_UP_S:
                return
            info = RequestInfo(f"{name}-{worker}-{number}", "t", prompt_tokens=100, max_tokens=10)
            started = time.perf_counter()
            await client.acquire(info)
            if time.monotonic() - begun > WARM_UP_S:
                waits.append(1e3 * (time.perf_counter() - started))
            await asyncio.sleep(0.2)
            client.end(info.request_id, Outcome.SUCCEEDED)

    async def report() -> None:
        while True:
            await admission.report.remote(ReplicaReport("r", 4 * CONCURRENT, 10**9))
            await asyncio.sleep(0.5)

    reports = asyncio.create_task(report())
    await asyncio.gather(*map(ask, range(CONCURRENT)))
    reports.cancel()
    await client.close()
    return waits


def measure(report: Report, runs: int) -> None:
    ray.init(include_dashboard=False, log_to_driver=False)
    deployment = serve.deployment(
        Admission, num_replicas=1, user_config={"tenants": [TENANT]}, **COMMON
    )
    handle = serve.run(deployment.bind(FairPolicy()), name="hop", route_prefix=None)
    waits = [asyncio.run(latencies_ms(handle, f"run-{run}")) for run in range(runs)]
    report.add("hop_ms_p50", [float(np.percentile(each, 50)) for each in waits])
    report.add("hop_ms_p99", [float(np.percentile(each, 99)) for each in waits])
    serve.shutdown()
    ray.shutdown()
