"""A real HTTP server over a real router: everything but the engine, in one process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import uvicorn

from router.cost import UsageReport, usage_report
from router.messages import GpuTime
from router.policy import FairPolicy
from router.pricing import PriceList, Prices
from router.store import SqliteStore
from router.tenant import Tenant, Tenants, digest
from serve_app.fleet.admission_client import AdmissionClient
from serve_app.fleet.fleet import Fleet
from serve_app.fleet.orders import OrderBook
from serve_app.fleet.step_streams import StepStreams
from serve_app.fleet.timelines import FleetTimelines, Timeline
from serve_app.http.admin import AdminApi
from serve_app.http.api import create_app
from serve_app.http.models import Offer
from serve_app.http.rate_headers import RateHeaders
from serve_app.protocol.limits import Limits
from serve_app.telemetry.recent import OwnRecent
from serve_app.telemetry.records import Records, RequestRecord
from serve_app.usage.tenant_states import tenant_states
from tests.serve_app.admission_in_process import AdmissionInProcess
from tests.serve_app.text_backend import byte_tokenizer
from tests.serve_app.transport import Transport

PRICES = PriceList({"text": Prices(prompt=1.0, cached=0.5, output=2.0)})
"""Micro-dollars per token."""
NO_TOLL = Limits(refusals_per_minute=10**6)
ADMIN_KEY = "sk-admin"
SLOTS = 8
GPU_DOLLARS_PER_HOUR = 3.6
"""A thousandth of a dollar a second."""
GPU = GpuTime(requests=6.0, surplus=1.0, bubble=0.5, starved=0.25, spare=12.0, starting=20.25)
"""What the one replica says of itself."""


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.005)


def key_of(tenant: str) -> str:
    return f"sk-{tenant}"


@dataclass
class MeteredSite:
    url: str
    admission: AdmissionInProcess
    client: AdmissionClient
    transport: Transport
    streams: StepStreams
    refusals: Counter[tuple[str, str]]
    """By tenant and reason."""
    calls: httpx.AsyncClient
    """One for all tenants: a client costs more than a call."""

    def http(self, key: str | None) -> httpx.AsyncClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20)

    async def ask(self, tenant: str = "a", **fields: Any) -> httpx.Response:
        """A completion of a prompt of 5 tokens."""
        body = {"model": "text", "prompt": "hello", "max_tokens": 20, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key_of(tenant)}"}
        return await self.calls.post("/v1/completions", json=body | fields, headers=headers)

    async def settled(self) -> None:
        """Admission knows of everything that has ended."""
        await until(lambda: self.client.idle)

    def spent(self, tenant: str = "a") -> int:
        """Micro-dollars."""
        return self.admission.router.snapshot().usage[tenant].micro_dollars


@asynccontextmanager
async def metered_site(
    step_s: float = 0.0005,
    policy: FairPolicy | None = None,
    wall: Callable[[], float] = time.time,
    limits: Limits = NO_TOLL,
    observe: Callable[[RequestRecord], None] = lambda record: None,
    **tenants: dict[str, Any],
) -> AsyncIterator[MeteredSite]:
    """`metered_site(a={"requests_per_minute": 2})`; keys are those of `key_of`."""
    configured = Tenants(
        tenants=[Tenant(id=name, keys=[digest(key_of(name))], **limits)
                 for name, limits in tenants.items()]
    )  # fmt: skip
    admission = AdmissionInProcess(
        tenants=configured, prices=PRICES, model="text", policy=policy, wall=wall
    )
    transport = Transport()
    client = AdmissionClient("ingress", admission.sync, admission.watch)
    streams = StepStreams("ingress", transport, lambda replica: admission.offer(replica, 0), client)
    offer = Offer("text", Fleet("text", client, streams), byte_tokenizer())
    app = create_app([offer], configured.find_by_key, limits, refused=client.early_refusals.refused)
    app.add_middleware(RateHeaders, limits_of=client.rate_limits)
    recent = OwnRecent("ingress")
    administration = _administration(admission, client, streams, transport, recent)
    app.add_middleware(AdminApi, **administration)
    refusals: Counter[tuple[str, str]] = Counter()

    def note(record: RequestRecord) -> None:
        recent.note(record)
        observe(record)

    app.add_middleware(Records, refusals=refusals, observe=note)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # Clients may come back after seconds, and not find a connection that is just being closed.
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=60)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        client.start()
        await transport.start("r", step_s)
        admission.offer("r", SLOTS, GPU)
        streams.connect("r")
        offering = asyncio.create_task(_keep_offering(admission))
        await until(lambda: server.started and streams.ready)
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        calls = httpx.AsyncClient(base_url=url, timeout=20)
        try:
            yield MeteredSite(url, admission, client, transport, streams, refusals, calls)
        finally:
            await calls.aclose()
            offering.cancel()
            server.should_exit = True
            await serving
            await client.close()
            await streams.close()
            await transport.close()


def _administration(
    admission: AdmissionInProcess,
    client: AdmissionClient,
    streams: StepStreams,
    transport: Transport,
    recent: OwnRecent,
) -> dict[str, Any]:
    """What `AdminApi` asks for. Orders reach the ingress at once."""
    store, book = SqliteStore(":memory:"), OrderBook()
    tenants = admission.tenants.tenants

    async def states(only: str | None) -> list[dict[str, Any]]:
        paused, snapshot = book.orders.paused, admission.router.snapshot
        return await tenant_states(tenants, snapshot, book.counts(), paused, only)

    async def usage(start: float, end: float, tenant: str | None) -> UsageReport:
        store.book(admission.router.take_journal(), 1_800_000_000.0)
        return usage_report(store, start, end, tenant, GPU_DOLLARS_PER_HOUR)

    async def scaling() -> dict[str, Any]:
        return {"now": {}, "changes": []}

    async def requests(tenant: str | None) -> list[dict[str, Any]]:
        book.show(admission.syncs[-1])
        return book.requests(tenant)

    async def request(name: str) -> list[dict[str, Any]]:
        book.show(admission.syncs[-1])
        return book.find(name) + [msgspec.json.decode(each.told) for each in recent.find(name)]

    async def pause(tenant: str, on: bool) -> bool:
        book.pause(tenant, on)
        streams.stop(client.obey(book.orders))
        return any(tenant == each.id for each in tenants)

    async def stop(name: str) -> int:
        book.show(admission.syncs[-1])
        found = book.stop(name)
        streams.stop(client.obey(book.orders))
        return found

    async def record(model: str, replica: str, steps: int, seconds: float) -> Timeline:
        return await transport.hosts[replica].timelines.record(steps, seconds, replica)

    return {
        "is_admin": lambda key: key == ADMIN_KEY,
        "trace": FleetTimelines({"text": streams}, record).record,
        "tenants": states,
        "usage": usage,
        "scaling": scaling,
        "requests": requests,
        "request": request,
        "pause": pause,
        "stop": stop,
    }


async def _keep_offering(admission: AdmissionInProcess) -> None:
    while True:
        await asyncio.sleep(0.2)
        admission.router.expire()
        admission.offer("r", SLOTS, GPU)


async def occupy(site: MeteredSite, tenant: str = "a") -> asyncio.Task[httpx.Response]:
    """A long request that runs."""
    task = asyncio.create_task(site.ask(tenant, max_tokens=900))
    await until(lambda: site.transport.engines["r"].running)
    return task
