"""The replica as Ray sees it: a thin actor around an engine that runs in its own process.

It offers the engine's rows to Admission as long as Serve routes new work to it. The module
decides nothing about scheduling or tenants.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

import anyio
from ray import serve
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from replica.client import EngineClient
from replica.config import EngineConfig
from replica.messages import Stats
from router.messages import GpuTime, ReplicaReport, ReportReply
from serve_app import background
from serve_app.engine_host import EngineHost
from serve_app.feed import Key

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.5
CALL_TIMEOUT_S = 0.4
LEAVE_EARLY_S = 3.0
"""Before the grace ends: that much earlier what still runs is handed back. Serve's clock starts
earlier than ours, and the word has to reach the ingresses before it kills this process."""


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
        context = serve.get_replica_context()
        self._name, self._model = context.replica_tag, model
        self._slots, self._lookahead = engine.max_rows + lookahead, lookahead
        self._admission = admission.options(_by_reference=False)
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._siblings = handle.options(_by_reference=False)
        self._host = EngineHost(await EngineClient.start(engine))
        self._stay_s = grace_s - min(LEAVE_EARLY_S, grace_s / 2)
        self._routed = False
        self._leaves_at: float | None = None
        """While it drains: when it hands back what has not ended."""
        self._reports = background.start(self._report_forever(), "replica-report")

    async def __del__(self) -> None:
        """Serve calls this once: when the last stream has ended, or `__init__` has failed."""
        if not hasattr(self, "_reports"):
            return  # no engine was started
        self._reports.cancel()
        await self._host.close()

    async def check_health(self) -> None:
        """Raises when the engine is gone: Serve then replaces this replica."""
        self._host.check()
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

    async def _report_forever(self) -> None:
        while True:
            await self._look_whether_it_drains()
            others = await self._report()
            if self._leaves_at is not None:
                self._hand_back(self._leaves_at, others)
            self._host.drop_orphans()
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _look_whether_it_drains(self) -> None:
        routed = await self._is_routed()
        if routed:
            self._leaves_at = None
        elif self._routed:
            self._leaves_at = time.monotonic() + self._stay_s
        self._routed = routed
        self._host.drains = self._leaves_at is not None

    def _hand_back(self, leaves_at: float, others: bool) -> None:
        """What has no output yet, if there is another replica; at last, everything."""
        late = time.monotonic() > leaves_at
        if others or late:
            self._host.hand_back(begun=late)

    async def _is_routed(self) -> bool:
        """Whether Serve routes new work here: not before this replica is up, nor while it
        drains, of which Serve tells nobody but those who call it. So be one of them.
        """
        try:
            with anyio.fail_after(CALL_TIMEOUT_S):
                await self._siblings.submit.remote(self._name, self._name, [])
        except ReplicaUnavailableError:
            return False
        except Exception as error:
            logger.warning("Replica %s cannot call itself: %r", self._name, error)
            return self._routed
        return True

    async def _report(self) -> bool:
        """Returns whether another replica takes work, as far as is known."""
        ready = self._host.ready
        report = ReplicaReport(
            replica=self._name,
            slots=self._slots if self._routed and not self._host.failure else 0,
            kv_tokens=ready.num_blocks * ready.block_size,
            lookahead=self._lookahead,
            gpu=_gpu_time(self._host.stats, self._host.starting_s),
            model=self._model,
        )
        try:
            with anyio.fail_after(CALL_TIMEOUT_S):
                reply: ReportReply = await self._admission.report.remote(report)
        except Exception as error:
            logger.debug("Admission did not take the report: %r", error)
            return False
        self._host.tell_backlog(reply.backlog)
        return reply.others


def _gpu_time(stats: Stats, starting_s: float) -> GpuTime:
    return GpuTime(
        requests=stats.busy_s - stats.surplus_s,
        surplus=stats.surplus_s,
        bubble=stats.bubble_s,
        starved=stats.starved_s,
        spare=stats.spare_s,
        starting=starting_s,
    )
