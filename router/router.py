"""The router: takes over what each ingress shows, and answers with grants and refusals.

The conversation is level-triggered. A `Sync` is the truth about its ingress, so a lost,
repeated or late one does no harm. The router knows costs and ids; it sees neither prompts,
nor HTTP, nor time other than its clock, and does no input or output.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from router.accounts import Accounts, Spent
from router.dispatcher import Dispatcher
from router.gate import MIN_RETRY_S, Gate
from router.groups import for_all, groups
from router.ingress_state import IngressState
from router.latencies import Latencies
from router.ledger import Journal, Running
from router.messages import (
    Ending,
    LeaseInfo,
    Outcome,
    RateLimits,
    Refusal,
    ReplicaReport,
    RequestInfo,
    Sync,
    SyncReply,
)
from router.policy import FairPolicy
from router.pools import Pools
from router.pricing import PriceList
from router.request import Request, State
from router.snapshot import Snapshot, take_snapshot
from router.tenant import Tenant, Tenants
from router.workload import Workload, measure


class Router:
    """The pools of all models and everybody who wants to use them; what a tenant is limited in
    spans them.

    `epoch` differs at every start and is at least 1. For `grace_s` seconds nothing is granted,
    so that ingresses can show what they run. An ingress silent for `ingress_timeout_s` seconds
    loses its places and credits, after `forget_s` it is taken for dead and its requests for
    failed. A name stands for one process: a restarted ingress takes a new one. Request ids are
    unique among all ingresses.

    Not thread-safe. Raises ValueError for an epoch below 1.
    """

    def __init__(
        self,
        tenants: Tenants,
        *,
        epoch: int,
        policy: FairPolicy | None = None,
        prices: PriceList | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        grace_s: float = 0.5,
        ingress_timeout_s: float = 2.0,
        report_timeout_s: float = 2.0,
        forget_s: float = 60.0,
    ) -> None:
        if epoch < 1:
            raise ValueError("epoch must be at least 1: 0 means that an ingress knows none")
        self.epoch, self.latencies = epoch, Latencies()
        self._clock = clock
        self._grants_from = clock() + grace_s
        self._ingress_timeout_s = ingress_timeout_s
        self._forget_s = forget_s
        self._booked: Set[str] = frozenset()
        policy = policy or FairPolicy()
        self.accounts = Accounts(clock, wall, prices)
        self._pools = Pools(policy, clock, report_timeout_s, self.accounts)
        self._gate = Gate(self._pools, policy)
        self._ingresses: dict[str, IngressState] = {}
        self._news: set[str] = set()
        self._tenants: dict[str, Tenant] = {}
        self.update_tenants(tenants)

    def sync(self, sync: Sync) -> SyncReply:
        """Take over the state of an ingress and answer with what is true now."""
        ingress = self._ingresses.get(sync.ingress) or IngressState(sync.ingress)
        if sync.sequence < ingress.sequence:
            return self._reply(ingress)
        if not ingress.knows(sync, self.epoch):
            return SyncReply(self.epoch, lost=True)
        self._ingresses[sync.ingress], ingress.whole = ingress, True
        ingress.sequence, ingress.seen_at = sync.sequence, self._clock()
        ingress.sleepers = sync.sleepers
        resumed = sync.epoch not in (0, self.epoch)
        if resumed:
            for model, virtual_times in sync.virtual_times.items():
                self._pools.of(model).queue.resume(virtual_times)
        if sync.rates_epoch not in (0, self.epoch):
            self._learn_rates(sync.rates)
        self._settle(ingress, sync.endings, resumed)
        for lease in sync.leases:
            self._confirm(ingress, lease, resumed)
        newcomers = {
            info.request_id: info for info in sync.waiting if not self._still_waits(ingress, info)
        }
        for request in ingress.take_missing(sync):
            self._end(ingress, request, Outcome.CANCELLED)
        again = {
            info.request_id
            for place, info in enumerate(sync.waiting if resumed else ())
            if place < sync.admitted or info.attempt
        }
        refusals = self._admit(ingress, newcomers.values(), again)
        self._count_refusals(ingress, refusals, newcomers)
        refusals += ingress.dropped.values()
        self._news.discard(ingress.name)
        return self._reply(ingress, refusals, {info.tenant for info in sync.waiting})

    def report(self, report: ReplicaReport) -> None:
        """Take over the capacity of a replica, and where its time went."""
        self._pools.of(report.model).credits.report(report)
        if report.gpu is not None:
            self.accounts.ledger.observe(report.replica, report.gpu)
        self._dispatch()

    def update_tenants(self, tenants: Tenants, spent: Spent | None = None) -> None:
        """Take over all tenants at once, as `configure` and `retire` do in parts."""
        self.retire(self._tenants.keys() - {tenant.id for tenant in tenants.tenants})
        self.configure(tenants.tenants, spent)

    def configure(self, tenants: Collection[Tenant], spent: Spent | None = None) -> None:
        """Take over tenants that are new or have changed, and micro-dollars spent before, by
        account. Counters stay."""
        self._pools.configure(tenants)
        self._tenants |= {tenant.id: tenant for tenant in tenants}
        self.accounts.learn_spending(spent or {})
        self._dispatch()

    def retire(self, names: Collection[str]) -> None:
        """What waits of a tenant that is gone is refused at the next sync that shows it; what runs
        goes on to its end."""
        self._pools.retire(names)
        self._tenants = {name: one for name, one in self._tenants.items() if name not in names}
        for ingress in self._ingresses.values() if names else ():
            ingress.whole = False

    def expire(self) -> None:
        """Act on silence and on the end of the grace. To be called a few times a second."""
        now = self._clock()
        for ingress in list(self._ingresses.values()):
            silence = now - ingress.seen_at
            if silence > self._ingress_timeout_s:
                ingress.sleepers, ingress.whole = {}, False
                for request in ingress.requests.values():
                    self._pool(request).release(request)
            if silence > self._forget_s:
                for request in list(ingress.requests.values()):
                    self._end(ingress, request, Outcome.FAILED)
                del self._ingresses[ingress.name]
                self._news.discard(ingress.name)
        for request in self._pools.overdue():
            self._drop(request)
        self._pools.expire()
        self._dispatch()

    def learn_booked(self, request_ids: Set[str]) -> None:
        """Earlier routers have written down how these ended: to be acknowledged, and no more."""
        self._booked = request_ids

    def running(self, ingress: str) -> list[Running]:
        """The requests of an ingress that have begun."""
        known = self._ingresses.get(ingress)
        return known.running(self.accounts.ledger.used) if known is not None else []

    def take_journal(self) -> Journal:
        """What has happened since the last call, to be written down."""
        return self.accounts.ledger.take_journal()

    def take_news(self) -> set[str]:
        """Ingresses with something new to hear since the last call, replies aside."""
        news, self._news = self._news, set()
        return news

    def snapshot(self, tenants: Collection[str] | None = None) -> Snapshot:
        """Counts of everything, or of these tenants alone; O(tenants)."""
        ingresses = {name: len(entry.requests) for name, entry in self._ingresses.items()}
        return take_snapshot(self.epoch, self._pools, ingresses, tenants)

    def workload(self) -> dict[str, Workload]:
        """What waits, as GPU time, by model; O(tenants)."""
        sleepers: Counter[str] = Counter()
        for ingress in self._ingresses.values():
            sleepers.update(ingress.sleepers)
        for model in sleepers:
            self._pools.of(model)
        return {model: measure(pool, sleepers[model]) for model, pool in self._pools.items()}

    def slo_counts(self) -> tuple[int, int]:
        """Answers that broke their tenant's SLO, since the start, of so many that succeeded."""
        succeeded, met = self.accounts.ledger.slo_counts()
        return succeeded - met, succeeded

    def _learn_rates(self, rates: Mapping[str, RateLimits]) -> None:
        """Take over what an earlier router has counted."""
        quotas = self.accounts.quotas
        for name in rates.keys() & quotas.keys():
            quotas[name].learn_rates(rates[name])

    def _settle(self, ingress: IngressState, endings: Iterable[Ending], resumed: bool) -> None:
        """Book each ending when it is first shown."""
        settled = {}
        for ending in endings:
            info = ending.request
            settled[info.request_id] = info.tenant
            if info.request_id not in ingress.settled and info.request_id not in self._booked:
                request = ingress.requests.get(info.request_id)
                if request is None:
                    request = self._add(ingress, info)
                    self._open(request, ending.produced, ending.cached, resumed)
                self._pool(request).progress(request, ending.produced, ending.cached)
                request.gpu_s = ending.gpu_s
                self.latencies.add(ending)
                self._end(ingress, request, ending.outcome, slo_met=self._slo_met(ending))
        ingress.settled = settled

    def _confirm(self, ingress: IngressState, lease: LeaseInfo, resumed: bool) -> None:
        """A lease that is shown is a fact, whatever was known of it."""
        info = lease.request
        request = ingress.requests.get(info.request_id)
        if request is None:
            if info.request_id in ingress.settled:
                return
            request = self._add(ingress, info)
            self._open(request, lease.produced, lease.cached, resumed)
        if request.replica != lease.replica:
            self._pool(request).adopt(request, lease.replica)
        request.info = info
        request.state = State.LEASED
        request.taken_up = True
        request.gpu_s = lease.gpu_s
        self._pool(request).progress(request, lease.produced, lease.cached)

    def _still_waits(self, ingress: IngressState, info: RequestInfo) -> bool:
        """Whether a request shown as waiting was admitted before."""
        request = ingress.requests.get(info.request_id)
        if request is None:
            return info.request_id in ingress.settled or info.request_id in ingress.dropped
        again = info.attempt > request.info.attempt
        holds_credit = request.state in (State.GRANTED, State.LEASED)
        if info.tenant not in self._tenants and (again or not holds_credit):
            self._end(ingress, request, None)
            return False
        if again:
            request.info = info
        if again and holds_credit:
            self._pool(request).release(request)
        if request.state is State.PARKED:
            self._pool(request).enqueue(request, front=again)
        elif request.state is State.LEASED:
            request.state = State.GRANTED
            ingress.granted[info.request_id] = request
        return True

    def _admit(
        self, ingress: IngressState, newcomers: Iterable[RequestInfo], again: Set[str]
    ) -> list[Refusal]:
        """Queue what has room, then what starts at once; refuse the rest. A group is one or the
        other as a whole.

        An earlier router has admitted those of `again`: they are not refused for want of room.
        """
        refusals: list[Refusal] = []
        excess = []
        for group in groups(newcomers):
            tenant, known = group[0].tenant, group[0].request_id in again
            if tenant not in self._tenants:
                refusals += for_all(group, Refusal("", "unknown tenant", MIN_RETRY_S))
            elif known or self._gate.has_room(tenant, len(group)):
                refusals += self._enter(ingress, group, known)
            else:
                excess.append(group)
        self._dispatch()
        refused: Counter[str] = Counter()
        for group in excess:
            tenant = group[0].tenant
            if self._gate.has_room(tenant, len(group)) or self._starts_at_once(group[0]):
                denied = self._enter(ingress, group)
                refusals += denied
                self._dispatch()
                if denied or len(group) == 1 or self._gate.has_room(tenant, 0):
                    continue
                for info in group:
                    self._end(ingress, ingress.requests[info.request_id], None)
                self._dispatch()
            refused[tenant] += len(group)
            refusals += for_all(group, self._gate.full(group[0], refused[tenant]))
        return refusals

    def _count_refusals(
        self, ingress: IngressState, refusals: list[Refusal], infos: Mapping[str, RequestInfo]
    ) -> None:
        """Each one once, however often the ingress asks before it has heard."""
        ids = {refusal.request_id for refusal in refusals}
        for request_id in ids - ingress.refused:
            self._count_refusal(infos[request_id])
        ingress.refused = ids

    def _count_refusal(self, info: RequestInfo) -> None:
        if info.tenant in self._tenants:
            self.accounts.ledger.refuse(info)

    def _enter(
        self, ingress: IngressState, group: Sequence[RequestInfo], again: bool = False
    ) -> list[Refusal]:
        requests = [self._new(ingress.name, info) for info in group]
        refusal = self._gate.admit(*requests, again=again)
        if refusal is not None:
            return for_all(group, refusal)
        ingress.add(requests)
        return []

    def _starts_at_once(self, info: RequestInfo) -> bool:
        request = self._new("", info)
        return not self._in_grace() and self._pool(request).can_start(request)

    def _drop(self, request: Request) -> None:
        ingress = self._ingresses.get(request.ingress)
        if ingress is not None and ingress.requests.get(request.info.request_id) is request:
            self._end(ingress, request, None)
            self._count_refusal(request.info)
            ingress.dropped[request.info.request_id] = self._gate.overdue(request.info)
            self._news.add(ingress.name)

    def _pool(self, request: Request) -> Dispatcher:
        return self._pools.of(request.info.model)

    def _new(self, ingress: str, info: RequestInfo) -> Request:
        estimates = self._pools.of(info.model).estimates
        return Request(info, ingress, estimates.output(info.tenant, info.max_tokens))

    def _add(self, ingress: IngressState, info: RequestInfo) -> Request:
        request = self._new(ingress.name, info)
        ingress.add([request])
        return request

    def _open(self, request: Request, produced: int, cached: int | None, resumed: bool) -> None:
        """Account for work that this router did not grant; an earlier one has charged it."""
        request.taken_up = True
        self._pool(request).resume(request)
        if resumed:
            self.accounts.ledger.resume(request.info, produced, cached)
        else:
            self.accounts.ledger.open(request.info)

    def _end(
        self,
        ingress: IngressState,
        request: Request,
        outcome: Outcome | None,
        *,
        slo_met: bool = False,
    ) -> None:
        self._pool(request).end(request, outcome, slo_met=slo_met)
        ingress.remove(request)

    def _slo_met(self, ending: Ending) -> bool:
        tenant = self._tenants.get(ending.request.tenant)
        return (
            tenant is not None
            and ending.outcome is Outcome.SUCCEEDED
            and tenant.slo.met(ending.first_token_s, ending.last_token_s, ending.produced)
        )

    def _in_grace(self) -> bool:
        return self._clock() < self._grants_from

    def _dispatch(self) -> None:
        if not self._in_grace():
            for request in self._pools.dispatch():
                self._ingresses[request.ingress].granted[request.info.request_id] = request
                self._news.add(request.ingress)

    def _reply(
        self, ingress: IngressState, refusals: Iterable[Refusal] = (), asking: Iterable[str] = ()
    ) -> SyncReply:
        tenants = ingress.tenants.keys() | ingress.settled.values()
        quotas = self.accounts.quotas
        return SyncReply(
            epoch=self.epoch,
            grants=ingress.grants(),
            refusals=tuple(refusals),
            settled=tuple(ingress.settled),
            virtual_times=self._pools.virtual_times(tenants),
            rate_limits={
                name: quotas[name].rate_limits() for name in tenants.union(asking) & quotas.keys()
            },
            held_back=self._pools.held_back(ingress.tenants.keys()),
        )
