"""Gives free credits to waiting requests in fair order, and books what becomes of them.

It joins queue, credits, ledger and estimates; it knows neither ingresses nor what they say,
nor when to dispatch.
"""

from __future__ import annotations

from collections.abc import Callable

from router.credits import Credits
from router.estimates import Estimates
from router.fair_queue import FairPolicy, FairQueue
from router.ledger import Charge, Ledger
from router.messages import Outcome, RequestInfo
from router.request import Request, State

_LOOKAHEAD = 16
"""Heads without KV room that one dispatch passes over before it gives up."""


class Dispatcher:
    """All requests of one pool of replicas, whichever ingress they came by."""

    def __init__(
        self, policy: FairPolicy, clock: Callable[[], float], report_timeout_s: float
    ) -> None:
        self.queue = FairQueue(policy)
        self.credits = Credits(clock=clock, report_timeout_s=report_timeout_s)
        self.ledger = Ledger()
        self.estimates = Estimates(policy.expected_output)
        self._policy = policy
        self._clock = clock
        self._reserved: str | None = None
        """Replica kept, at the last dispatch, for a head that was overtaken too often."""

    def enqueue(self, request: Request, *, front: bool = False) -> None:
        """Let a parked request wait. It is charged nothing before it is granted."""
        self.ledger.open(request.info)
        request.state = State.QUEUED
        request.since = self._clock()
        request.overtaken = 0
        self.queue.push(request, front=front)

    def dispatch(self) -> list[Request]:
        """Grant until no free credit suits a waiting request. Returns what was granted.

        A head that fits nowhere is passed over; once it was overtaken `max_overtakes` times
        the roomiest replica takes nothing else until the head fits.
        """
        granted: list[Request] = []
        passed: list[Request] = []
        self._reserved = None
        while len(passed) < _LOOKAHEAD and self.credits.any_slot(self._reserved):
            request = self.queue.head()
            if request is None:
                break
            replica = self.credits.find(request.kv_need, self._reserved)
            if replica is not None:
                self._grant(request, replica)
                granted.append(request)
                for other in passed:
                    other.overtaken += 1
            else:
                self.queue.skip()
                passed.append(request)
            if passed and self._reserved is None and any(map(self._is_starved, passed)):
                self._reserved = self.credits.roomiest()
        self.queue.unskip()
        return granted

    def can_start(self, info: RequestInfo) -> bool:
        """Whether a new request would be granted at once if it were queued."""
        tenant = self.queue.tenant(info.tenant)
        kv_need = info.prompt_tokens + self.estimates.output(info.tenant, info.max_tokens)
        return (
            not tenant.waiting
            and len(tenant.running) < tenant.max_concurrency
            and self.credits.find(kv_need, self._reserved) is not None
        )

    def place_interval(self, name: str) -> float:
        """Seconds in which a tenant's queue moves by one place: by Little's law, or as long
        as its head has waited if that is more."""
        tenant = self.queue.tenant(name)
        head = next(iter(tenant.waiting), None)
        waited = self._clock() - head.since if head else 0.0
        return max(self.estimates.duration(name) / max(len(tenant.running), 1), waited)

    def adopt(self, request: Request, replica: str) -> None:
        """Accept that a request runs on a replica, whatever it held before."""
        self.release(request)
        self._run(request, replica)

    def progress(self, request: Request, produced: int, cached: int | None) -> None:
        """Book what a running request has done so far."""
        charge = self.ledger.progress(request.info.request_id, produced, cached)
        if any(charge):
            done = min(charge.output, request.outstanding)
            request.outstanding -= done
            self._charge(request, charge, -done)

    def end(self, request: Request, outcome: Outcome | None) -> None:
        """Settle a request: what it holds is freed, what it did stays booked.

        Without an outcome it is refused after all.
        """
        request_id = request.info.request_id
        if not request.taken_up:
            self._charge(request, self.ledger.refund(request_id))
        if outcome is Outcome.SUCCEEDED:
            duration_s = self._clock() - request.since
            produced = self.ledger.produced(request_id)
            self.estimates.finished(request.info.tenant, produced, duration_s)
        self.release(request)
        self.ledger.close(request_id, outcome)

    def release(self, request: Request) -> None:
        """Take a request out of the queue, or its credit from it. It stays open and charged."""
        if request.state is State.PARKED:
            return
        self.queue.remove(request)
        if request.state is not State.QUEUED:
            self.credits.release(request)
            self.queue.charge(request.info.tenant, 0.0, -request.outstanding)
            request.outstanding = 0
        request.state = State.PARKED

    def expire(self) -> None:
        """Withdraw the credits of silent replicas: grants not taken up wait again, first."""
        for replica in self.credits.expire():
            untaken = [lease for lease in replica.leases if lease.state is State.GRANTED]
            for request in reversed(untaken):
                self.release(request)
                self.enqueue(request, front=True)

    def _grant(self, request: Request, replica: str) -> None:
        self.queue.advance()
        self._run(request, replica)

    def _run(self, request: Request, replica: str) -> None:
        """Only the first run of a request is charged for its prompt."""
        request_id = request.info.request_id
        request.state = State.GRANTED
        request.since = self._clock()
        request.outstanding = max(request.expected - self.ledger.produced(request_id), 0)
        self.queue.start(request)
        self.credits.take(request, replica)
        self._charge(request, self.ledger.dispatch(request_id), request.outstanding)

    def _charge(self, request: Request, charge: Charge, outstanding: int = 0) -> None:
        policy = self._policy
        cost = (
            policy.w_p * charge.uncached + policy.w_c * charge.cached + policy.w_q * charge.output
        )
        if cost or outstanding:
            self.queue.charge(request.info.tenant, cost, outstanding)

    def _is_starved(self, request: Request) -> bool:
        return request.overtaken >= self._policy.max_overtakes
