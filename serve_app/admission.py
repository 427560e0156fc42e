"""Admission: the router as Ray sees it, one process for all ingresses and replicas.

It keeps time for the router and tells ingresses when to ask again. It sees costs and ids;
tokens never pass through it. Its state is soft: killed, it learns everything again from the
next sync of each ingress and the next report of each replica.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
from ray import serve

from router.cost import UsageReport, usage_report
from router.ledger import Journal
from router.messages import ReplicaReport, ReportReply, Sync
from router.policy import FairPolicy
from router.pricing import PriceList, Prices
from router.router import Router
from router.snapshot import Snapshot
from router.tenant import Tenants
from serve_app import logs
from serve_app.fleet import background
from serve_app.fleet.admission_client import Hint, Notice
from serve_app.fleet.liveness import LivenessCheck
from serve_app.fleet.membership import require_alone
from serve_app.fleet.orders import OrderBook
from serve_app.scaling.log import read_decisions
from serve_app.scaling.signals import record_workload
from serve_app.settings import Stamp, TenantsSource, deployment_of
from serve_app.telemetry.exposition import Source, Sources
from serve_app.telemetry.metrics import AdmissionMetrics
from serve_app.telemetry.recent import MOST_OF_ALL, Ended, Recent
from serve_app.usage.checkpoints import Checkpoints
from serve_app.usage.journal import JournalWriter
from serve_app.usage.stores import open_store
from serve_app.usage.tenant_states import tenant_states
from serve_app.usage.tenant_updates import PART, read_update

logger = logging.getLogger(__name__)

TICK_S = 0.2
"""How often the router looks at the clock."""
WATCH_S = 5.0
"""Longest wait of a watch without news."""
OFFER_S = 2.0
"""A replica that has not reported for this long no longer counts as offering slots."""
STEP_S = 1.0
"""A clock that differs by more than this from how it should have gone on was set."""
LEARNT = 500
"""Tenants whose spending is learnt at once."""
ANSWER_S = 10.0
"""An ingress that has not synced for this long is dead, and its clients know."""


class _Offer(NamedTuple):
    """How many slots a replica offers."""

    model: str
    made_at: float


class _Answers(NamedTuple):
    """How many answers the clients of an ingress wait for."""

    due: int
    told_at: float


class Admission:
    """Serve runs one of these. All methods run on one event loop."""

    def __init__(
        self,
        fairness: FairPolicy,
        prices: Mapping[str, Prices] | None = None,
        usage: Path | str | None = None,
        gpu_dollars_per_hour: float | None = None,
    ) -> None:
        """Without tenants: Serve calls `reconfigure` before the first request. Without `usage`
        nothing survives this process; see `open_store`. Raises ValueError where Serve would run
        several of these.
        """
        logs.start()
        require_alone()
        gc.set_threshold(100_000, 50, 100)  # Most of what lives here lives long.
        self._epoch = time.time_ns() // 1_000_000
        self._tenants = Tenants(tenants=[])
        self._packed = pickle.dumps(self._tenants)
        self._version = 0
        """The version of what `watch` sends to every ingress."""
        self._source: TenantsSource | None = None
        self._loading = asyncio.Lock()
        self._prices = dict(prices or {})
        self._store = open_store(usage)
        self._gpu_dollars_per_hour = gpu_dollars_per_hour
        self._router = Router(
            self._tenants,
            epoch=self._epoch,
            policy=fairness,
            prices=PriceList(self._prices),
        )
        self._checkpoints = Checkpoints(self._store, self._router)
        self._journal = JournalWriter(self._store, self._take_journal, self._learn)
        self._writing = background.start(self._journal.run(), "journal")
        self._waiting: dict[str, int] = {}
        """Requests that wait for a credit, by model."""
        self._stamp: Stamp | None = None
        self._clock_offset = _clock_offset()
        self._learn_from = 0
        """The tenant whose spending is learnt next, by its place."""
        self._offers: dict[str, _Offer] = {}
        """By replica."""
        self._book = OrderBook()
        self._closed = False
        self._answers: dict[str, _Answers] = {}
        """By ingress."""
        self._news: set[str] = set()
        self._watchers: dict[str, asyncio.Event] = {}
        self._metrics, self._sources = AdmissionMetrics(), Sources()
        self._recent = Recent(MOST_OF_ALL)
        self._clock = background.start(self._keep_time(), "router-clock")
        self._watching = background.start(self._watch_tenants(), "tenants")
        self._self_check = LivenessCheck(self._check)
        self._self_check.start()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take over tenants in place. Those that cannot be read change nothing; at the start
        they raise ValueError or OSError.

        Later an exception would not help: Serve would end this process and start others, which
        would have no tenants at all.
        """
        try:
            self._source = TenantsSource.model_validate(user_config)
            await self._load()
        except (OSError, ValueError) as error:
            if not self._tenants.tenants:
                raise
            logger.error("The tenants stay as they were: %s", error)

    def _check(self) -> None:
        """Raises RuntimeError when the router no longer keeps time."""
        if any(task.done() for task in (self._clock, self._watching, self._writing)):
            raise RuntimeError("the router's clock, its tenants or its journal have stopped")

    async def __del__(self) -> None:
        """Serve calls this once, at an orderly end."""
        if hasattr(self, "_journal"):
            await self._journal.flush()

    async def sync(self, data: bytes) -> bytes:
        """Take over the state of an ingress, a `Sync`, and answer with what is true now, a
        `SyncReply`; both in msgpack, which costs a tenth of pickle.
        """
        sync = msgspec.msgpack.decode(data, type=Sync)
        self._answers[sync.ingress] = _Answers(sync.answers, time.monotonic())
        reply = self._router.sync(sync)
        if not reply.lost:
            self._book.show(sync)
        self._tell(answered=sync.ingress)
        return msgspec.msgpack.encode(reply)

    async def watch(
        self, ingress: str, version: tuple[int, int], paused: frozenset[str] = frozenset()
    ) -> Hint:
        """Return when an ingress should sync, or has another than the present notice; after
        `WATCH_S` seconds in any case.

        paused: tenants that it was told of; maybe by an earlier Admission.
        """
        if version[0] not in (0, self._epoch) and self._book.learn(paused):
            self._publish()
        watcher = self._watchers[ingress] = asyncio.Event()
        if ingress not in self._news and version == self._notice_version:
            with anyio.move_on_after(WATCH_S):
                await watcher.wait()
        if self._watchers.get(ingress) is watcher:
            del self._watchers[ingress]
        news = ingress in self._news
        self._news.discard(ingress)
        return Hint(news, self._notice() if version != self._notice_version else None)

    async def report(self, report: ReplicaReport) -> ReportReply:
        """Take over what a replica offers, and tell it of its like.

        An ingress that has lost a replica may say in its place that it offers nothing.
        """
        self._router.report(report)
        was_offered = report.replica in self._offers
        if report.slots:
            self._offers[report.replica] = _Offer(report.model, time.monotonic())
        else:
            self._offers.pop(report.replica, None)
        if was_offered != bool(report.slots):
            self._publish()
        self._tell()
        others = any(
            offer.model == report.model and name != report.replica
            for name, offer in self._offers.items()
        )
        return ReportReply(self._waiting.get(report.model, 0) > 0, others)

    async def take_metrics(self, source: Source, ended: Sequence[Ended] = ()) -> int:
        """What a process tells of itself, every few seconds, and requests of its own that are over.
        Returns whom it has told: another epoch is another Admission."""
        self._sources.take(source)
        for place, each in enumerate(ended):
            self._recent.add(each)
            if place % PART == 0:
                await asyncio.sleep(0)
        return self._epoch

    async def metrics(self, ingress: str) -> list[Source]:
        """Of all processes but this ingress."""
        own = Source("", {}, self._metrics.instruments.gather())
        return [own, *self._sources.others(ingress)]

    def record_autoscaling_stats(self) -> dict[str, int | float]:
        """Serve calls this where the number of replicas follows the load."""
        pools = {deployment_of(name): one for name, one in self._router.workload().items()}
        return dict(record_workload(pools, *self._router.slo_counts()))

    async def tenant_states(self, only: str | None = None) -> list[dict[str, Any]]:
        """See `tenant_states`; of one alone, none if there is no such tenant."""
        tenants, paused = self._tenants.tenants, self._book.orders.paused
        counts = self._book.counts()
        return await tenant_states(tenants, self._router.snapshot, counts, paused, only)

    async def open_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        """What waits and runs; see `OrderBook.requests`."""
        return self._book.requests(tenant)

    async def find_request(self, name: str) -> tuple[list[Ended], list[dict[str, Any]]]:
        """What is over of that id, and what waits or runs."""
        return self._recent.find(name), self._book.find(name)

    async def pause_tenant(self, tenant: str, on: bool) -> bool:
        """Refuse what comes of a tenant and end what it has, or let it ask again. Returns whether
        there is such a tenant."""
        known = any(each.id == tenant for each in self._tenants.tenants)
        if known or tenant in self._book.counts() or tenant in self._book.orders.paused:
            self._book.pause(tenant, on)
            self._publish()
            logger.warning("An administrator %s tenant %r", "paused" if on else "resumed", tenant)
            return True
        return False

    async def stop_request(self, name: str) -> int:
        """End an answer, or one of its sequences. Returns how many sequences that ends."""
        if found := self._book.stop(name):
            self._publish()
            logger.warning("An administrator stopped %s", name)
        return found

    async def scaling(self) -> dict[str, Any]:
        """Why there are as many replicas as there are; see `read_decisions`."""
        application = serve.get_replica_context().app_name
        return await asyncio.to_thread(read_decisions, application)

    async def usage(self, start: float, end: float, tenant: str | None) -> UsageReport:
        """See `usage_report`; what ended last is in it."""
        await self._journal.flush()
        price = self._gpu_dollars_per_hour
        return await asyncio.to_thread(usage_report, self._store, start, end, tenant, price)

    async def close(self) -> int | None:
        """Let no ingress take another request. Returns how many answers clients still wait for,
        None if no ingress has told; once it is 0, all usage is written down. To be called again
        until then, since an Admission that starts anew does not know of it.
        """
        if not self._closed:
            self._closed = True
            self._publish()
        await self._journal.flush()
        oldest = time.monotonic() - ANSWER_S
        due = [told.due for told in self._answers.values() if told.told_at >= oldest]
        return sum(due) if due else None

    async def snapshot(self) -> Snapshot:
        """Counts of everything, for tests."""
        return self._router.snapshot()

    async def _take_journal(self) -> Journal:
        running = await self._checkpoints.take()
        return self._router.take_journal()._replace(running=running)

    async def _learn(self) -> None:
        """While all that was taken is written down."""
        await self._learn_spending()
        await self._checkpoints.settle_lost()

    async def _learn_spending(self) -> None:
        """Of other clusters that count against the same budgets, of some tenants each time; and,
        when the clock was set, of all, in windows that it may have come back to."""
        offset, names = _clock_offset(), list(self._router.accounts.quotas)
        was_set = abs(offset - self._clock_offset) > STEP_S
        if not (was_set or self._store.shared):
            return
        for begin in range(0, len(names), LEARNT) if was_set else (self._learn_from,):
            part = names[begin : begin + LEARNT]
            accounts = self._router.accounts.windows(part)
            spent = await asyncio.to_thread(self._store.spending, accounts)
            self._router.accounts.learn_spending(dict(zip(accounts, spent, strict=True)))
            self._learn_from = begin + LEARNT if begin + LEARNT < len(names) else 0
        self._clock_offset = offset

    async def _load(self) -> None:
        """Raises OSError or ValueError on tenants that cannot be used; nothing has changed then."""
        async with self._loading:
            assert self._source is not None
            self._stamp = await asyncio.to_thread(self._source.stamp)
            update = await asyncio.to_thread(
                read_update, self._source, self._tenants, self._prices, self._store
            )
            if not self._tenants.tenants:
                self._router.learn_booked(await asyncio.to_thread(self._store.recent))
            for part in update.parts:
                self._router.configure(*part)
                await asyncio.sleep(0)
            self._router.retire(update.gone)
            self._tenants, self._packed = update.tenants, update.packed
            self._publish()

    async def _watch_tenants(self) -> None:
        """Apart from the clock: a file may be long, or its disk slow."""
        while True:
            await asyncio.sleep(TICK_S)
            source = self._source
            if source is None or await asyncio.to_thread(source.stamp) == self._stamp:
                continue
            try:
                await self._load()
            except Exception as error:  # Nobody's file may stop this.
                logger.error("The tenants stay as they were: %s", error)
            else:
                logger.info("The tenants have changed")

    @property
    def _notice_version(self) -> tuple[int, int]:
        return self._epoch, self._version

    def _notice(self) -> Notice:
        replicas = {name: offer.model for name, offer in self._offers.items()}
        orders = self._book.orders
        return Notice(self._notice_version, replicas, self._packed, self._closed, orders)

    def _publish(self) -> None:
        self._version += 1
        for watcher in self._watchers.values():
            watcher.set()

    def _tell(self, answered: str = "") -> None:
        """Wake the watches of ingresses that have something to hear, other than by an answer."""
        self._news |= self._router.take_news()
        self._news.discard(answered)
        for ingress in self._news & self._watchers.keys():
            self._watchers[ingress].set()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._router.expire()
            state = self._router.snapshot(())
            self._waiting = state.waiting
            part = self._metrics.next_part(self._router.accounts.ledger.take_active)
            if part is not None:
                self._metrics.tell(self._router.snapshot(part))
            self._metrics.observe(self._router.latencies.take())
            self._news &= state.ingresses.keys()
            for name in self._answers.keys() - state.ingresses.keys():
                del self._answers[name]
            self._book.forget(state.ingresses)
            self._forget_silent()
            self._tell()

    def _forget_silent(self) -> None:
        oldest = time.monotonic() - OFFER_S
        silent = [name for name, offer in self._offers.items() if offer.made_at < oldest]
        for name in silent:
            del self._offers[name]
        if silent:
            self._publish()


def _clock_offset() -> float:
    """Changes only when somebody sets the clock."""
    return time.time() - time.monotonic()
