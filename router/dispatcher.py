"""Gives free credits to waiting requests in fair order, and books what becomes of them.

It joins queue, credits, quotas, ledger and estimates; it knows neither ingresses nor what they
say, nor when to dispatch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Set
from itertools import count, islice

from router.accounts import Accounts
from router.band_order import BandOrder
from router.credits import Credits, Replica
from router.estimates import Estimates
from router.fair_queue import FairQueue
from router.ledger import NOTHING, Used
from router.messages import HeldBack, Outcome, RequestInfo
from router.policy import FairPolicy
from router.prefixes import longest_of
from router.priority_band import PriorityBand, TenantQueue
from router.quota import Denial
from router.request import GRANTED, PARKED, QUEUED, Group, Request
from router.tenant import Tenant

_HEADS = 16
"""Requests that one decision looks at: those almost first, those passed over."""
_SUCCEEDED = Outcome.SUCCEEDED


class Dispatcher:
    """All requests of one pool of replicas, whichever ingress they came by. `accounts` are shared
    with other pools."""

    def __init__(
        self,
        policy: FairPolicy,
        clock: Callable[[], float],
        report_timeout_s: float,
        accounts: Accounts,
    ) -> None:
        self.queue = FairQueue(policy, accounts.concurrencies)
        self.credits = Credits(policy, clock=clock, report_timeout_s=report_timeout_s)
        self.ledger, self.quotas = accounts.ledger, accounts.quotas
        self.estimates = Estimates(policy.expected_output)
        self._policy = policy
        self._order = BandOrder(policy)
        self._prices = accounts.prices
        self._clock = clock
        self._max_wait_s: dict[str, float] = {}
        """By tenant; only for tenants that have such a limit."""
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ticks = count()
        self._passed: list[Request] = []
        """Heads that found no KV room in this dispatch."""
        self._reserved: str | None = None
        """Replica kept, at the last dispatch, for a head that was overtaken too often."""

    def configure(self, tenants: Collection[Tenant]) -> None:
        """Take over weights and limits other than quotas of tenants that are new or have changed;
        counters stay."""
        for tenant in tenants:
            self._max_wait_s.pop(tenant.id, None)
            if tenant.max_wait_s:
                self._max_wait_s[tenant.id] = tenant.max_wait_s
        self.queue.configure(tenants)

    def retire(self, names: Collection[str]) -> None:
        """These tenants are gone. What waits of them stays put."""
        for name in names:
            self._max_wait_s.pop(name, None)
        self.queue.retire(names)

    def admit(self, *requests: Request, again: bool = False) -> Denial | None:
        """Let the new requests that a client made of one wait, with reservations on all that their
        tenant is limited in; or nothing of it happens, for the reason that is returned.

        again: an earlier router has admitted them, so no rate refuses them.
        """
        request = requests[0]
        quota = self.quotas[request.info.tenant]
        if len(requests) == 1 and not again:  # as nearly always
            reservation = quota.reserve(request.info, self._likely_output(request.info))
            if isinstance(reservation, Denial):
                return reservation
            request.reservation = reservation
            self.enqueue(request)
            return None
        asked = [(request.info, self._likely_output(request.info)) for request in requests]
        reservations = quota.reserve_all(asked, again=again)
        if isinstance(reservations, Denial):
            return reservations
        group = Group()
        for request, reservation in zip(requests, reservations, strict=True):
            request.reservation, request.group = reservation, group
            self.enqueue(request)
        return None

    def resume(self, request: Request) -> None:
        """Account for work that an earlier router admitted, or nobody did."""
        quota = self.quotas.get(request.info.tenant)
        if quota is not None:
            request.reservation = quota.resume(request.info, self._likely_output(request.info))

    def enqueue(self, request: Request, *, front: bool = False) -> None:
        """Let a parked request wait. It is charged nothing before it is granted."""
        self.ledger.open(request.info)
        request.state, request.since = QUEUED, self._clock()
        request.overtaken = 0
        if self._max_wait_s:
            self._limit_wait(request)
        self.queue.push(request, front=front)

    def dispatch(self) -> list[Request]:
        """Grant until no free credit suits a waiting request. Returns what was granted.

        A head that fits nowhere is passed over; once it was overtaken `max_overtakes` times
        the roomiest replica takes nothing else until the head fits.
        """
        granted: list[Request] = []
        self._passed, self._reserved = [], None
        bands = [band for band in self.queue.bands if band.first() is not None]
        now = self._clock()
        self._order.observe([band.index for band in bands], now)
        while bands:
            for band in self._order.sort(bands, now):
                choice = self._choose(band)
                if choice is not None:
                    break
            else:
                break
            self._grant(band, *choice, now)
            granted.append(choice[0])
            for other in self._passed:
                other.overtaken += 1
        for band in bands:
            band.restore()
            band.advance()
        return granted

    def overdue(self) -> list[Request]:
        """Requests that wait and have passed their deadlines, and whose group has not begun."""
        now, found = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            begun = request.taken_up or (request.group is not None and request.group.begun)
            waits = request.state is QUEUED and not begun
            if waits and request.deadline <= now:
                found.append(request)
        return found

    def can_start(self, request: Request) -> bool:
        """Whether a new request would be granted at once if it were queued."""
        tenant = self.queue.tenant(request.info.tenant)
        return not tenant.waiting and tenant.concurrency.free and self.place(request) is not None

    def place(self, request: Request) -> Replica | None:
        """The replica that would take a waiting request now."""
        queue = self.queue.tenant(request.info.tenant)
        newcomer = queue.band.is_newcomer(queue)
        return self.credits.find(request, self._reserved, newcomer=newcomer)

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
        self._run(request, replica, self._clock())

    def progress(self, request: Request, produced: int, cached: int | None) -> None:
        """Book what a running request has done so far."""
        charge = self.ledger.progress(request.info.request_id, produced, cached)
        if charge is not NOTHING:
            uncached, cached, output = charge
            done = min(output, request.outstanding)
            request.outstanding -= done
            policy = self._policy
            cost = policy.w_p * uncached + policy.w_c * cached + policy.w_q * output
            self.queue.charge(request.info.tenant, cost, -done)

    def end(self, request: Request, outcome: Outcome | None, *, slo_met: bool = False) -> None:
        """Settle a request: what it holds is freed, what it did stays booked.

        Without an outcome it is refused after all, and costs nothing.
        """
        info = request.info
        if not request.taken_up:
            prompt_tokens = self.ledger.refund(info.request_id)
            self.queue.charge(info.tenant, -self._policy.w_p * prompt_tokens)
        used = self.ledger.used(info.request_id)
        if outcome is _SUCCEEDED:
            duration_s = self._clock() - request.since
            self.estimates.finished(info.tenant, used.output, duration_s, request.gpu_s)
        self.release(request)
        windows, price = self._settle(request, used if outcome else Used())
        self.ledger.close(info, outcome, used, price, windows, slo_met, request.gpu_s)

    def release(self, request: Request) -> None:
        """Take a request out of the queue, or its credit from it. It stays open and charged."""
        if request.state is PARKED:
            return
        self.queue.remove(request)
        if request.state is not QUEUED:
            self.credits.release(request)
            if request.outstanding:
                self.queue.charge(request.info.tenant, 0.0, -request.outstanding)
                request.outstanding = 0
        request.state = PARKED

    def held_back(self, tenants: Set[str]) -> dict[str, HeldBack]:
        """Why the next request of each of the tenants waits, where one does."""
        queues = self.queue.tenants()
        firsts = {band.first() for band in self.queue.bands}
        serves = any(replica.slots for replica in self.credits.replicas().values())
        found = {}
        for name in tenants & queues.keys():
            if not (queue := queues[name]).waiting:
                continue
            if not queue.eligible:
                found[name] = HeldBack.CONCURRENCY
            elif not serves:
                found[name] = HeldBack.NO_REPLICA
            else:
                found[name] = HeldBack.CAPACITY if queue in firsts else HeldBack.FAIR_SHARE
        return found

    def expire(self) -> None:
        """Withdraw the credits of silent replicas: grants not taken up wait again, first."""
        for replica in self.credits.expire():
            untaken = [lease for lease in replica.leases if lease.state is GRANTED]
            for request in reversed(untaken):
                self.release(request)
                self.enqueue(request, front=True)

    def _choose(self, band: PriorityBand) -> tuple[Request, Replica] | None:
        """The next request of a band that fits somewhere, and where."""
        if not self.credits.any_slot(self._reserved, newcomer=False):
            return self._choose_newcomer(band)
        while len(self._passed) < _HEADS and (queue := band.first()) is not None:
            request, newcomer = queue.head, band.is_newcomer(queue)
            replica = self.credits.find(request, self._reserved, newcomer=newcomer)
            if replica is not None:
                if band.prefixed and self._policy.locality and not self._is_starved(request):
                    return self._most_local(band, request, replica)
                return request, replica
            band.set_aside()
            self._pass_over(request)
        return None

    def _choose_newcomer(self, band: PriorityBand) -> tuple[Request, Replica] | None:
        """The same where all rows that are free are kept ones."""
        queue = band.newcomer()
        if queue is None:
            return None
        replica = self.credits.find(queue.head, self._reserved)
        return None if replica is None else (queue.head, replica)

    def _pass_over(self, request: Request) -> None:
        self._passed.append(request)
        if self._reserved is None and self._is_starved(request):
            self._reserved = self.credits.roomiest()

    def _most_local(
        self, band: PriorityBand, first: Request, replica: Replica
    ) -> tuple[Request, Replica]:
        """Among the requests that come almost first, the one with most of its prompt cached; the
        earlier ones are overtaken by it, and none too often."""
        best, longest, rank = (first, replica), replica.prefixes.match(first.info.prefixes), 0
        candidates = self._almost_first(band)
        for index, (request, queue) in enumerate(candidates[1:], 1):  # `first` leads them
            starved = self._is_starved(request)
            if not starved and longest_of(request.info.prefixes) <= longest:
                continue
            place = self.credits.find(
                request,
                self._reserved,
                newcomer=band.is_newcomer(queue),
                beyond=-1 if starved else longest,
            )
            if place is not None:
                best, rank = (request, place), index
                longest = place.prefixes.match(request.info.prefixes)
                if starved:
                    break
        for request, _ in candidates[:rank]:
            request.overtaken += 1
        return best

    def _almost_first(self, band: PriorityBand) -> list[tuple[Request, TenantQueue]]:
        """The heads of the tenants within the quantum, and behind each as many of the same
        tenant as there is room for."""
        queues = band.near(self._policy.locality, _HEADS)
        each = _HEADS // max(len(queues), 1)
        return [(request, queue) for queue in queues for request in islice(queue.waiting, each)]

    def _grant(self, band: PriorityBand, request: Request, replica: Replica, now: float) -> None:
        band.advance()
        policy = self._policy
        cost = policy.w_p * request.info.prompt_tokens + policy.w_q * request.expected
        self._order.granted(band.index, cost, now)
        self._run(request, replica.name, now)

    def _run(self, request: Request, replica: str, now: float) -> None:
        """Only the first run of a request is charged for its prompt."""
        request_id = request.info.request_id
        request.state, request.since = GRANTED, now
        if request.group is not None:
            request.group.begun = True
        produced = self.ledger.produced(request_id) if request.taken_up else 0
        request.outstanding = max(request.expected - produced, 0)
        self.queue.start(request)
        self.credits.take(request, replica)
        cost = self._policy.w_p * self.ledger.dispatch(request_id)
        self.queue.charge(request.info.tenant, cost, request.outstanding)

    def _settle(self, request: Request, used: Used) -> tuple[tuple[str, ...], int]:
        """Replace what a request holds by what it used. Returns the windows that pay for it, and
        its price in micro-dollars."""
        info, reservation = request.info, request.reservation
        prompt, cached, output = used
        price = self._prices.cost(info.model, prompt, cached, output)
        quota = self.quotas.get(info.tenant)
        if reservation is None or quota is None:
            return (), price
        request.reservation = None
        if prompt or output:
            quota.settle(reservation, prompt + output, price)
        else:
            quota.refund(reservation)
        return reservation.windows, price

    def _likely_output(self, info: RequestInfo) -> int:
        if info.open_ended:
            return self.estimates.high_output(info.tenant, info.max_tokens)
        return info.max_tokens

    def _limit_wait(self, request: Request) -> None:
        max_wait_s = self._max_wait_s.get(request.info.tenant)
        if max_wait_s is not None:
            request.deadline = request.since + max_wait_s
            heapq.heappush(self._deadlines, (request.deadline, next(self._ticks), request))

    def _is_starved(self, request: Request) -> bool:
        return request.overtaken >= self._policy.max_overtakes
