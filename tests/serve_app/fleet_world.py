"""An ingress without HTTP, with Admission and scripted engines behind it, in one process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from replica.messages import Sampling
from router.messages import Outcome
from serve_app.fleet.admission_client import AdmissionClient
from serve_app.fleet.fleet import Fleet
from serve_app.fleet.step_streams import StepStreams
from serve_app.protocol.backend import Generation
from tests.serve_app.admission_in_process import TENANTS, AdmissionInProcess
from tests.serve_app.transport import Transport

SLOTS = 3


def generation(request_id: str = "r", max_tokens: int = 5, tenant: int = 0) -> Generation:
    sampling = Sampling(max_tokens=max_tokens)
    return Generation(request_id, TENANTS.tenants[tenant], (1, 2, 3), sampling)


async def until(condition: Callable[[], object], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.002)


class World:
    """An ingress with everything behind it, in one process."""

    def __init__(self, chance: random.Random | None = None, rate: float = 0.0) -> None:
        self.transport = Transport(chance, rate)
        self.admission = AdmissionInProcess(chance, rate, model="model")
        self.client = AdmissionClient("ingress", self.admission.sync, self.admission.watch)
        self.streams = StepStreams(
            "ingress", self.transport, lambda replica: self.admission.offer(replica, 0), self.client
        )
        self.fleet = Fleet("model", self.client, self.streams)

    async def start(self, *replicas: str, step_s: float = 0.001) -> None:
        self.client.start()
        for name in replicas:
            await self.transport.start(name, step_s)
            self.admission.offer(name, SLOTS)
            self.streams.connect(name)
        await until(lambda: len(self.streams.ready) == len(replicas))

    async def collect(self, request: Generation) -> tuple[int, ...]:
        deltas = [delta async for delta in self.fleet.generate(request)]
        return tuple(token for delta in deltas for token in delta.token_ids)

    def outcomes(self) -> dict[Outcome, int]:
        usage = self.admission.router.snapshot().usage.values()
        return {outcome: sum(u.outcomes[outcome] for u in usage) for outcome in Outcome}

    def at_rest(self) -> bool:
        """Nothing is left anywhere: no request, no lease, no row."""
        state = self.admission.router.snapshot()
        return (
            self.client.idle
            and self.streams.idle
            and not any(state.ingresses.values())
            and not any(replica.leases for replica in state.replicas.values())
            and not any(engine.running for engine in self.transport.engines.values())
        )

    async def close(self) -> None:
        await self.client.close()
        await self.streams.close()
        await self.transport.close()
