"""Admission in this process: the real router behind two callables that may fail."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from router.messages import GpuTime, ReplicaReport, Sync, SyncReply
from router.policy import FairPolicy
from router.pricing import PriceList
from router.router import Router
from router.tenant import Tenant, Tenants
from serve_app.fleet.admission_client import Hint

TENANTS = Tenants(
    tenants=[
        Tenant(id="acme", max_concurrency=4, max_queued=100),
        Tenant(id="globex", weight=3, max_concurrency=4, max_queued=100),
        Tenant(id="modest", max_concurrency=1, max_queued=0),
    ]
)


class AdmissionInProcess:
    """With a `rate`, syncs and their answers are lost, late or doubled."""

    def __init__(
        self,
        chance: random.Random | None = None,
        rate: float = 0.0,
        tenants: Tenants = TENANTS,
        prices: PriceList | None = None,
        model: str = "",
        policy: FairPolicy | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """model: of the replicas that are offered."""
        self.tenants, self._model = tenants, model
        self._prices, self._policy, self._wall = prices, policy, wall
        self.rate = rate
        self.away = False
        self.syncs: list[Sync] = []
        self.router = self._new_router()
        self._chance = chance or random.Random(0)
        self._late: list[Sync] = []
        self._news = asyncio.Event()

    def restart(self) -> None:
        """A new process knows nothing but the tenants."""
        self.router = self._new_router(self.router.epoch + 1)

    def offer(self, replica: str, slots: int, gpu: GpuTime | None = None) -> None:
        report = ReplicaReport(replica, slots, kv_tokens=100_000, gpu=gpu, model=self._model)
        self.router.report(report)
        self._news.set()

    async def sync(self, sync: Sync) -> SyncReply:
        await asyncio.sleep(0)
        self.syncs.append(sync)
        self._maybe_fail()
        if self._late and self._chance.random() < 0.5:
            self.router.sync(self._late.pop())
        reply = self.router.sync(sync)
        if self._chance.random() < self.rate:
            reply = self.router.sync(sync)
        if self._chance.random() < self.rate:
            self._late.append(sync)
        self._maybe_fail()
        return reply

    async def watch(self) -> Hint:
        await self._news.wait()
        self._news.clear()
        return Hint(news=True)

    def _new_router(self, epoch: int = 1) -> Router:
        return Router(
            self.tenants,
            epoch=epoch,
            policy=self._policy,
            prices=self._prices,
            wall=self._wall,
            grace_s=0.0,
        )

    def _maybe_fail(self) -> None:
        if self.away or self._chance.random() < self.rate:
            raise ConnectionError("the network ate it")
