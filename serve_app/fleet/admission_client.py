"""The ingress side of the conversation with Admission.

Level-triggered: every sync carries all that this ingress holds and has ended, and what it waits for
or how that has changed since an answer. A lost, late or repeated one does no harm, and an Admission
that restarts asks for everything. The module knows neither Ray nor HTTP nor tokens: Admission is
two callables.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import anyio

from router.messages import (
    Ending,
    Grant,
    LeaseInfo,
    Outcome,
    RateLimits,
    RequestInfo,
    Sync,
    SyncReply,
)
from router.tenant import Tenant
from serve_app.fleet import background
from serve_app.fleet.calls import answered
from serve_app.fleet.orders import NO_ORDERS, Orders
from serve_app.fleet.refill import after, left
from serve_app.fleet.request_state import Lease, Sleeper, Waiting
from serve_app.fleet.waiting_set import WaitingSet
from serve_app.fleet.waits import Waits
from serve_app.protocol.backend import Stopped
from serve_app.throttling.early_refusals import EarlyRefusals

logger = logging.getLogger(__name__)

SYNC_PERIOD_S = 0.25
SYNC_TIMEOUT_S = 0.4
"""A call to a deployment blocks while it has no replica."""
RETRY_S = 0.05
FULL_S = 10.0
"""So often everything is shown, although changes would do."""
AWAY_S = 1.0
"""Admission answers several times a second; after this silence it is away."""
WATCH_TIMEOUT_S = 10.0
"""Well above the time after which Admission answers although it has no news."""
BILL_S = 0.3
"""So long the bill of a request that was stopped is waited for: it comes behind a step."""


@dataclass(frozen=True, slots=True)
class Notice:
    """News for every ingress."""

    version: tuple[int, int]
    """Another one stands for another notice."""
    replicas: dict[str, str]
    """Replicas that offer slots, and the model of each."""
    tenants: bytes
    """`Tenants`, pickled: there may be thousands, and they seldom change."""
    closed: bool = False
    """The whole service ends."""
    orders: Orders = NO_ORDERS


@dataclass(frozen=True, slots=True)
class Hint:
    """What a watch returns: a reason to sync early, never a state to rely on."""

    news: bool = False
    """The next sync of this ingress will be answered with something new."""
    notice: Notice | None = None
    """The present one, if the ingress has another."""


_Told: TypeAlias = tuple[float, RateLimits]
"""When, and what."""


class AdmissionClient:
    """Asks for grants and accounts for what becomes of them. Used from one event loop.

    Whoever calls `acquire` calls `end` for the same request id afterwards, whatever happened:
    that is what makes each request end exactly once.
    """

    def __init__(
        self,
        ingress: str,
        sync: Callable[[Sync], Awaitable[SyncReply]],
        watch: Callable[[], Awaitable[Hint]],
        on_notice: Callable[[Notice], None] = lambda notice: None,
        answers: Callable[[], int] = lambda: 0,
    ) -> None:
        """answers: how many answers clients still wait for here, whatever was asked."""
        self.ingress = ingress
        self.epoch = 0
        """Epoch of the Admission that answered last; 0 before the first answer."""
        self.orders = NO_ORDERS
        """What administrators want, as told last."""
        self._sleepers: list[Sleeper] = []
        self._sync, self._watch, self._on_notice = sync, watch, on_notice
        self._answers = answers
        self._sequence = 0
        self._full_at = float("-inf")
        self._answered_at = float("-inf")
        self._waiting = WaitingSet()
        self._leases: dict[str, Lease] = {}
        self._endings: dict[str, Ending] = {}
        self._returned: dict[str, Lease] = {}
        """Leases behind the endings that Admission has not heard of; their credits are unused."""
        self._virtual_times: dict[str, dict[str, float]] = {}
        self.early_refusals, self.waits = EarlyRefusals(), Waits()
        self._rate_limits: dict[str, _Told] = {}
        """What was told last of each tenant."""
        self._rates_to_repeat: tuple[int, dict[str, _Told]] = (0, {})
        """What the next sync repeats, and the epoch that told it."""
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to sync. Needs a running event loop."""
        self._tasks = [
            background.start(self._sync_forever(), "admission-sync"),
            background.start(self._watch_forever(), "admission-watch"),
        ]

    async def close(self) -> None:
        """Stop. What was not acknowledged stays unsaid: Admission lets it expire."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def raise_if_dead(self) -> None:
        """Raises RuntimeError when this client has stopped to sync."""
        if any(task.done() for task in self._tasks):
            raise RuntimeError("the conversation with Admission has stopped")

    @property
    def silence_s(self) -> float:
        """Seconds since Admission last answered; infinite before its first answer."""
        return time.monotonic() - self._answered_at

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is still to be acknowledged."""
        return not (self._waiting or self._leases or self._endings)

    async def acquire(self, request: RequestInfo) -> Grant:
        """Wait for the permission to run one attempt of a request on one replica.

        A later attempt of a request that holds a lease gives that lease back. Raises Refused,
        Stopped, or what `fail` is given.
        """
        if (stopped := self.orders.against(request)) is not None:
            raise stopped
        earlier = self._leases.pop(request.request_id, None)
        granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        waiting = Waiting(request, granted, time.monotonic(), earlier)
        self._waiting.add(waiting)
        self._changed.set()
        return await granted

    @contextmanager
    def sleeping(self, model: str) -> Iterator[Sleeper]:
        """A request waits for a first replica: let Admission know that one is wanted."""
        sleeper = Sleeper(model)
        self._sleepers.append(sleeper)
        self._changed.set()
        try:
            yield sleeper
        finally:
            self._sleepers.remove(sleeper)

    def fail(self, error: Exception) -> None:
        """Raise `error` in all that wait; those that sleep are told."""
        for sleeper in self._sleepers:
            sleeper.error = error
        for waiting in self._waiting.values():
            if not waiting.granted.done():
                waiting.granted.set_exception(error)

    def obey(self, orders: Orders) -> dict[str, Stopped]:
        """End what waits against `orders`. Returns what runs against them, by request id."""
        self.orders, self.early_refusals.stopped = orders, orders.against_all_of
        for waiting in self._waiting.values():
            stopped = orders.against(waiting.request)
            if stopped is not None and not waiting.granted.done():
                waiting.granted.set_exception(stopped)
        found = {name: orders.against(lease.request) for name, lease in self._leases.items()}
        return {name: stopped for name, stopped in found.items() if stopped is not None}

    def progress(
        self, request_id: str, produced: int, cached: int | None, gpu_s: float = 0.0
    ) -> None:
        """Note the output tokens received so far, and the GPU time of this attempt; the next sync
        tells."""
        lease = self._leases[request_id]
        if produced > lease.produced:
            lease.last_token_s = time.monotonic() - lease.asked_at
            if lease.first_token_s is None:
                lease.first_token_s = lease.last_token_s
        lease.produced = produced
        if lease.cached is None:
            lease.cached = cached
        lease.gpu_s = lease.earlier_gpu_s + gpu_s

    def trim(self, request_id: str, tokens: int) -> None:
        """No more of its output counts than this: what has come beyond is nobody's."""
        if (lease := self._leases.get(request_id)) is not None:
            lease.produced = min(lease.produced, tokens)

    def stopping(self, request_id: str) -> None:
        """Its engine is told to stop it, and will say once more what it took."""
        if (lease := self._leases.get(request_id)) is not None:
            lease.bill_by = time.monotonic() + BILL_S

    def bill(self, request_id: str, gpu_s: float) -> None:
        """The GPU time of an attempt that was stopped: the request ends with it."""
        lease = self._leases.get(request_id)
        if lease is not None and lease.is_left:
            lease.gpu_s = max(lease.gpu_s, lease.earlier_gpu_s + gpu_s)
            self._settle(request_id, Outcome.CANCELLED)

    def rate_limits(self, tenant: Tenant) -> RateLimits:
        """What is left of a tenant's rates, as Admission said last; a rate that it was never told
        of is unused."""
        told_at, told = self._rate_limits.get(tenant.id, (0.0, RateLimits()))
        passed_s = time.monotonic() - told_at
        return RateLimits(
            after(passed_s, told.requests, tenant.requests_per_minute),
            after(passed_s, told.tokens, tenant.tokens_per_minute),
        )

    def end(self, request_id: str, outcome: Outcome) -> None:
        """Give the request up or account for it. A second call does nothing.

        One that still waits for its first attempt just leaves the set of the waiting: it cost
        nothing. One that is cancelled while it runs keeps its place until its engine has let go
        of it and told what it took.
        """
        waiting, lease = self._waiting.leave(request_id), self._leases.get(request_id)
        if waiting is not None and waiting.earlier is not None:
            self._endings[request_id] = waiting.earlier.ending(outcome)
        elif lease is not None and lease.bill_by and outcome is Outcome.CANCELLED:
            lease.is_left = True
        else:
            self._settle(request_id, outcome)
        self._changed.set()

    def _settle(self, request_id: str, outcome: Outcome) -> None:
        """Account for what runs, and give its place back."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.early_refusals.moved(lease.request.tenant)
            self._endings[request_id] = lease.ending(outcome)
            if outcome is not Outcome.FAILED:
                self._returned[request_id] = lease
        self._changed.set()

    def _settle_unbilled(self) -> None:
        now = time.monotonic()
        late = [
            request_id
            for request_id, lease in self._leases.items()
            if lease.is_left and lease.bill_by and lease.bill_by < now
        ]
        for request_id in late:
            self._settle(request_id, Outcome.CANCELLED)

    async def _sync_forever(self) -> None:
        while True:
            with anyio.move_on_after(SYNC_PERIOD_S):
                await self._changed.wait()
            self._changed.clear()
            self._settle_unbilled()
            try:
                reply = await answered(self._sync(self._state()), SYNC_TIMEOUT_S)
            except Exception as error:  # Whatever it was, the next sync says it all again.
                logger.debug("Admission did not answer: %r", error)
                if self.silence_s > AWAY_S:
                    self._reuse_credits()
                    self.waits.learn({})
                self._changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                self._apply(reply)

    async def _watch_forever(self) -> None:
        while True:
            try:
                hint = await answered(self._watch(), WATCH_TIMEOUT_S)
            except Exception as error:
                logger.debug("Admission cannot be watched: %r", error)
                await asyncio.sleep(SYNC_PERIOD_S)
                continue
            if hint.notice is not None:
                self._on_notice(hint.notice)
            if hint.news:
                self._changed.set()

    def _state(self) -> Sync:
        self._sequence += 1
        if (now := time.monotonic()) >= self._full_at:
            self._full_at = now + FULL_S
            self._waiting.show_all()
        shown = self._waiting.show(self._sequence)
        return Sync(
            ingress=self.ingress,
            sequence=self._sequence,
            epoch=self.epoch,
            **shown._asdict(),
            leases=tuple(
                LeaseInfo(lease.request, lease.replica, lease.produced, lease.cached, lease.gpu_s)
                for lease in self._leases.values()
            ),
            endings=tuple(self._endings.values()),
            virtual_times=self._virtual_times,
            rates=self._used_rates(),
            rates_epoch=self._rates_to_repeat[0],
            sleepers=dict(Counter(sleeper.model for sleeper in self._sleepers)),
            answers=self._answers(),
        )

    def _used_rates(self) -> dict[str, RateLimits]:
        """What is left by now of the rates to be repeated, where that is not everything."""
        rates = {}
        for name, (told_at, told) in self._rates_to_repeat[1].items():
            passed_s = time.monotonic() - told_at
            kinds = [left(passed_s, rate) for rate in (told.requests, told.tokens)]
            if any(rate is not None and rate.reset_s for rate in kinds):
                rates[name] = RateLimits(*kinds)
        return rates

    def _apply(self, reply: SyncReply) -> None:
        self._answered_at = time.monotonic()
        if reply.lost:
            self._waiting.show_all()
            self._changed.set()
            return
        told = {name: (self._answered_at, rates) for name, rates in reply.rate_limits.items()}
        if reply.epoch == self.epoch:
            self._rates_to_repeat = self.epoch, told
        else:  # Another Admission: it is to hear all that the one before it told.
            repeated = self._rates_to_repeat[1]
            rest = {name: old for name, old in self._rate_limits.items() if name not in repeated}
            self._rates_to_repeat = self.epoch, rest
        self._rate_limits |= told
        self.epoch = reply.epoch
        self._virtual_times = reply.virtual_times
        self.waits.learn(reply.held_back)
        for request_id in reply.settled:
            self._endings.pop(request_id, None)
            self._returned.pop(request_id, None)
        refusals = [(self._waiting.leave(each.request_id), each) for each in reply.refusals]
        for waiting in self._waiting.heard(self._sequence):
            self.early_refusals.answer(waiting.request.tenant, None)
        for refused, refusal in refusals:
            if refused is not None:
                refused.refuse(refusal)
                self.early_refusals.answer(refused.request.tenant, refusal)
        for grant in reply.grants:
            self._take(grant)

    def _reuse_credits(self) -> None:
        """While Admission is away, a credit that comes back goes to the next request of the same
        tenant for the same model, so that no tenant holds more than Admission gave it.
        """
        for ended, lease in list(self._returned.items()):
            heirs = (
                waiting.request
                for waiting in self._waiting.values()
                if waiting.request.tenant == lease.request.tenant
                and waiting.request.model == lease.request.model
            )
            if heir := min(heirs, key=lambda request: request.priority, default=None):
                del self._returned[ended]
                self._take(Grant(heir.request_id, heir.attempt, lease.replica, heir.max_tokens))

    def _take(self, grant: Grant) -> None:
        """Turn a waiting request into a leased one. A repeated or outdated grant is nothing."""
        waiting = self._waiting.get(grant.request_id)
        if waiting is None or waiting.request.attempt != grant.attempt:
            return
        if not waiting.granted.done():
            self._waiting.leave(grant.request_id)
            self.early_refusals.moved(waiting.request.tenant)
            self._leases[grant.request_id] = waiting.lease(grant)
            waiting.granted.set_result(grant)
