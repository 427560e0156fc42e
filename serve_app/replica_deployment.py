"""The replica as Ray sees it: a thin actor around an engine that runs in its own process.

It offers the engine's rows to Admission as long as Serve routes new work to it. The module
decides nothing about scheduling or tenants.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from msgspec import structs
from ray import serve
from ray.serve.handle import DeploymentHandle

from replica.client import EngineClient
from replica.config import EngineConfig
from replica.messages import Stats
from router.messages import GpuTime, ReplicaReport, ReportReply
from serve_app import logs, ray_private
from serve_app.fleet import background
from serve_app.fleet.calls import answered
from serve_app.fleet.departure import LOOK_PERIOD_S, Departure
from serve_app.fleet.engine_host import EngineHost
from serve_app.fleet.liveness import LivenessCheck
from serve_app.fleet.membership import Membership
from serve_app.fleet.output_feed import Key
from serve_app.fleet.timelines import Timeline
from serve_app.scaling.signals import LoadMeter
from serve_app.telemetry.exposition import Source
from serve_app.telemetry.metrics import PERIOD_S, ReplicaMetrics

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 0.4


class Replica:
    """One engine. Calls from an ingress name this replica first, for `Placement`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: str,
        engine: EngineConfig,
        lookahead: int,
        admission: DeploymentHandle,
        grace_s: float,
    ) -> None:
        """Returns when the engine is ready. Raises EngineFailed when it cannot start.

        model: what clients call it.
        grace_s: how long after it was told to stop Serve lets this process live.
        """
        logs.start()
        context = serve.get_replica_context()
        self._name, self._model = context.replica_tag, model
        self._slots, self._lookahead = engine.max_rows + lookahead, lookahead
        self._admission = ray_private.unary(admission)
        self._host = EngineHost(await EngineClient.start(engine, logs.log_file("engine")))
        self._metrics, self._tell_at = ReplicaMetrics(self._host.ready), 0.0
        self._load = LoadMeter(self._host.ready)
        self._departure = Departure(self._name, grace_s)
        self._membership = Membership(self._departure.learn)
        self._reports = background.start(self._report_forever(), "replica-report")
        self._self_check = LivenessCheck(self._check)
        self._self_check.start()

    async def __del__(self) -> None:
        """Serve calls this once: when the last stream has ended, or `__init__` has failed."""
        if not hasattr(self, "_reports"):
            return  # no engine was started
        self._self_check.stop()
        self._reports.cancel()
        await self._host.close()

    def _check(self) -> None:
        """Raises RuntimeError when the engine is gone, or nobody would hear of this replica."""
        self._host.raise_if_dead()
        self._membership.raise_if_dead()
        if self._reports.done():
            raise RuntimeError("this replica has stopped to report")

    async def submit(self, replica: str, ingress: str, submits: list[bytes]) -> None:
        """See `ReplicaCalls`."""
        self._host.submit(ingress, submits)

    async def abort(self, replica: str, ingress: str, keys: list[Key]) -> None:
        """See `ReplicaCalls`."""
        self._host.abort(ingress, keys)

    async def steps(
        self, replica: str, ingress: str, offsets: dict[Key, int]
    ) -> AsyncGenerator[bytes, None]:
        """See `ReplicaCalls`."""
        async for message in self._host.steps(ingress, offsets):
            yield message

    async def stats(self, replica: str) -> Stats:
        """What the engine reported last."""
        return self._host.stats

    async def trace(self, replica: str, steps: int, seconds: float) -> Timeline:
        """Of the engine's next steps."""
        title = f"{self._model} {self._name}"
        return await self._host.timelines.record(steps, seconds, title)

    def record_autoscaling_stats(self) -> dict[str, int | float]:
        """Serve calls this where the number of replicas follows the load."""
        return dict(self._load.measure(self._host.stats))

    async def _report_forever(self) -> None:
        while True:
            self._host.drains = self._departure.leaves
            others = await self._report()
            self._hand_back(others)
            self._host.drop_orphans()
            await self._tell_metrics()
            await asyncio.sleep(LOOK_PERIOD_S)

    def _hand_back(self, others: bool) -> None:
        """When it leaves: what has no output yet, if there is another replica; at last, all."""
        late = self._departure.late
        if late or (self._departure.leaves and others):
            self._host.hand_back(begun=late)

    async def _tell_metrics(self) -> None:
        if (now := time.monotonic()) < self._tell_at:
            return
        self._tell_at = now + PERIOD_S
        self._metrics.tell(self._host.stats, _gpu_time(self._host.stats, self._host.starting_s))
        labels = {"replica": self._name, "model": self._model}
        source = Source(self._name, labels, self._metrics.instruments.gather())
        try:
            await answered(self._admission.take_metrics.remote(source), CALL_TIMEOUT_S)
        except Exception as error:
            logger.debug("Admission did not take the metrics: %r", error)

    async def _report(self) -> bool:
        """Returns whether another replica takes work, as far as is known."""
        ready = self._host.ready
        gpu = _gpu_time(self._host.stats, self._host.starting_s)
        report = ReplicaReport(
            replica=self._name,
            slots=self._slots if self._departure.routed and not self._host.failure else 0,
            kv_tokens=ready.num_blocks * ready.block_size,
            lookahead=self._lookahead,
            gpu=gpu,
            model=self._model,
        )
        try:
            call = self._admission.report.remote(report)
            reply: ReportReply = await answered(call, CALL_TIMEOUT_S)
        except Exception as error:
            logger.debug("Admission did not take the report: %r", error)
            return False
        self._host.tell_backlog(reply.backlog)
        return reply.others


def _gpu_time(stats: Stats, starting_s: float) -> GpuTime:
    return GpuTime(**structs.asdict(stats.time), starting=starting_s)
