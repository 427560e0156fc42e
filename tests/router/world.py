"""A small world around a real `Router`: ingresses that keep their side of the conversation,
replicas that produce a token per step, and a clock that moves when told to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from router.messages import (
    Ending,
    Grant,
    LeaseInfo,
    Outcome,
    RateLimits,
    ReplicaReport,
    RequestInfo,
    Sync,
    SyncReply,
)
from router.policy import FairPolicy
from router.pricing import PriceList
from router.request import State
from router.router import Router
from router.tenant import Tenant, Tenants


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tenants_of(**options: dict[str, object]) -> Tenants:
    """`tenants_of(a={"weight": 2.0}, b={})`."""
    return Tenants(tenants=[Tenant(id=name, **values) for name, values in options.items()])


@dataclass
class Job:
    """A sequence on a replica."""

    info: RequestInfo
    ingress: Ingress
    produced: int = 0


@dataclass
class Replica:
    name: str
    slots: int
    kv_tokens: int
    jobs: dict[str, Job] = field(default_factory=dict)
    talks: bool = True
    """Whether it sends reports."""
    model: str = "m"


@dataclass
class Ingress:
    """Keeps full sets of what waits, runs and ended; each sync carries all of them."""

    name: str
    sequence: int = 0
    epoch: int = 0
    waiting: dict[str, RequestInfo] = field(default_factory=dict)
    leases: dict[str, LeaseInfo] = field(default_factory=dict)
    endings: dict[str, Ending] = field(default_factory=dict)
    virtual_times: dict[str, dict[str, float]] = field(default_factory=dict)
    rates: dict[str, RateLimits] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)
    """Of `waiting`, what the last reply did not refuse."""

    def next_sync(self) -> Sync:
        self.sequence += 1
        return Sync(
            ingress=self.name,
            sequence=self.sequence,
            epoch=self.epoch,
            waiting=tuple(self.waiting.values()),
            leases=tuple(self.leases.values()),
            endings=tuple(self.endings.values()),
            virtual_times=dict(self.virtual_times),
            rates=dict(self.rates),
            rates_epoch=self.epoch,
            admitted=sum(1 for _ in takewhile(self.admitted.__contains__, self.waiting)),
        )


class World:
    """Every id ends once at most: `ended` is written through `_end` alone."""

    ingress_of, router_of = Ingress, Router

    def __init__(
        self,
        tenants: Tenants,
        *,
        policy: FairPolicy | None = None,
        grace_s: float = 0.0,
        cached_share: float = 0.0,
        prices: PriceList | None = None,
    ) -> None:
        self.clock, self.wall = Clock(), Clock()
        self.tenants = tenants
        self.policy = policy or FairPolicy()
        self.grace_s = grace_s
        self.prices = prices
        self.cached_share = cached_share
        self.lengths: dict[str, int] = {}
        """Output tokens that each request will produce."""
        self.ended: dict[str, str] = {}
        self.lost: set[str] = set()
        """Requests whose ingress died."""
        self.booked: set[str] = set()
        """Ids that the present router has admitted or seen ending."""
        self.ingresses: dict[str, Ingress] = {}
        self.replicas: dict[str, Replica] = {}
        self._ids = count()
        self._names = count()
        self._epochs = count(1)
        self.restart_router()

    def restart_router(self) -> None:
        self.router = self.router_of(
            self.tenants,
            epoch=next(self._epochs),
            policy=self.policy,
            prices=self.prices,
            clock=self.clock,
            wall=self.wall,
            grace_s=self.grace_s,
        )
        self.booked = set()

    def add_ingress(self) -> Ingress:
        ingress = self.ingress_of(f"ingress-{next(self._names)}")
        self.ingresses[ingress.name] = ingress
        return ingress

    def add_replica(self, slots: int, kv_tokens: int = 10**9, model: str = "m") -> Replica:
        replica = Replica(f"replica-{next(self._names)}", slots, kv_tokens, model=model)
        self.replicas[replica.name] = replica
        self.report(replica)
        return replica

    def report(self, replica: Replica) -> None:
        self.router.report(
            ReplicaReport(replica.name, replica.slots, replica.kv_tokens, model=replica.model)
        )

    def submit(
        self,
        ingress: Ingress,
        tenant: str,
        prompt: int = 10,
        output: int = 5,
        limit: int = 0,
        prefixes: tuple[int, ...] = (),
        model: str = "m",
        group: str = "",
    ) -> str:
        request_id = f"request-{next(self._ids)}"
        self.lengths[request_id] = output
        ingress.waiting[request_id] = RequestInfo(
            request_id,
            tenant,
            prompt,
            limit or output,
            model=model,
            prefixes=prefixes,
            group=group,
        )
        return request_id

    def cancel(self, ingress: Ingress, request_id: str) -> None:
        lease = ingress.leases.get(request_id)
        if lease is None:
            lease = LeaseInfo(ingress.waiting[request_id], "")
        self._end(ingress, lease, Outcome.CANCELLED)

    def deliver(self, sync: Sync) -> SyncReply:
        """The sync reaches the router; its reply goes nowhere yet."""
        stale = sync.sequence < self._last_sequence(sync.ingress)
        reply = self.router.sync(sync)
        if not stale and not reply.lost:
            refused = {refusal.request_id for refusal in reply.refusals}
            shown = [
                *sync.waiting,
                *(x.request for x in sync.leases),
                *(x.request for x in sync.endings),
            ]
            self.booked.update(info.request_id for info in shown)
            self.booked -= refused
        return reply

    def hear(self, ingress: Ingress, reply: SyncReply) -> None:
        ingress.epoch = reply.epoch
        ingress.virtual_times = dict(reply.virtual_times)
        ingress.rates = dict(reply.rate_limits)
        for request_id in reply.settled:
            ingress.endings.pop(request_id, None)
        for refusal in reply.refusals:
            if ingress.waiting.pop(refusal.request_id, None):
                self._record(refusal.request_id, "refused")
        for grant in reply.grants:
            self._take_up(ingress, grant)

    def exchange(self, ingress: Ingress) -> SyncReply:
        reply = self.deliver(ingress.next_sync())
        self.hear(ingress, reply)
        ingress.admitted = set(ingress.waiting)
        return reply

    def exchange_all(self) -> None:
        for ingress in list(self.ingresses.values()):
            self.exchange(ingress)

    def step(self) -> None:
        """Every sequence on every replica gains a token, which its ingress receives."""
        for replica in list(self.replicas.values()):
            for job in list(replica.jobs.values()):
                self._produce(job)

    def kill_replica(self, replica: Replica) -> None:
        """What sent nothing yet starts again elsewhere, the rest has failed."""
        del self.replicas[replica.name]
        for job in list(replica.jobs.values()):
            request_id = job.info.request_id
            lease = job.ingress.leases.get(request_id)
            if lease is None or lease.request.attempt != job.info.attempt:
                continue
            if lease.produced:
                self._end(job.ingress, lease, Outcome.FAILED)
            else:
                self._again(job.ingress, lease.request)

    def kill_ingress(self, ingress: Ingress) -> None:
        del self.ingresses[ingress.name]
        self.lost.update(ingress.waiting, ingress.leases)
        for replica in self.replicas.values():
            for request_id in ingress.leases:
                replica.jobs.pop(request_id, None)

    def _take_up(self, ingress: Ingress, grant: Grant) -> None:
        info = ingress.waiting.get(grant.request_id)
        if info is None or info.attempt != grant.attempt:
            return
        replica = self.replicas.get(grant.replica)
        if replica is None:
            self._again(ingress, info)
            return
        del ingress.waiting[grant.request_id]
        info = replace(info, max_tokens=grant.max_tokens)
        self.lengths[info.request_id] = min(self.lengths[info.request_id], grant.max_tokens)
        ingress.leases[grant.request_id] = LeaseInfo(info, grant.replica)
        replica.jobs[grant.request_id] = Job(info, ingress)

    def _again(self, ingress: Ingress, info: RequestInfo) -> None:
        ingress.leases.pop(info.request_id, None)
        ingress.waiting[info.request_id] = replace(info, attempt=info.attempt + 1)

    def _produce(self, job: Job) -> None:
        job.produced += 1
        info, leases = job.info, job.ingress.leases
        lease = leases[info.request_id]
        cached = int(info.prompt_tokens * self.cached_share)
        lease = replace(lease, produced=lease.produced + 1, cached=cached)
        leases[info.request_id] = lease
        if lease.produced >= self.lengths[info.request_id]:
            self._end(job.ingress, lease, Outcome.SUCCEEDED)

    def _end(self, ingress: Ingress, lease: LeaseInfo, outcome: Outcome) -> None:
        request_id = lease.request.request_id
        ingress.waiting.pop(request_id, None)
        ingress.leases.pop(request_id, None)
        replica = self.replicas.get(lease.replica)
        if replica is not None:
            replica.jobs.pop(request_id, None)
        ingress.endings[request_id] = Ending(lease.request, outcome, lease.produced, lease.cached)
        self._record(request_id, outcome.value)

    def _record(self, request_id: str, end: str) -> None:
        assert request_id not in self.ended, f"{request_id} ended twice"
        self.ended[request_id] = end

    def _last_sequence(self, name: str) -> int:
        ingress = self.router._ingresses.get(name)
        return -1 if ingress is None else ingress.sequence


def assert_work_conserving(router: Router) -> None:
    """No free credit suits the first waiting request of any eligible tenant."""
    for pool in router._pools:
        for tenant in pool.queue.tenants().values():
            assert not tenant.eligible or pool.place(tenant.head) is None


def assert_drained(router: Router) -> None:
    """Nothing waits, runs, holds or is owed."""
    snapshot = router.snapshot()
    assert snapshot.queued == 0
    assert all(tenant.running == 0 for tenant in snapshot.tenants.values())
    assert all(not replica.leases and not replica.kv_held for replica in snapshot.replicas.values())
    assert not any(snapshot.ingresses.values())
    accounts = router.accounts
    assert len(accounts.ledger) == 0
    assert all(not quota.reserved() for quota in accounts.quotas.values())
    assert all(not each.running and not each.queued for each in accounts.concurrencies.values())
    for pool in router._pools:
        queues = pool.queue.tenants().values()
        assert all(not tenant.counter.outstanding for tenant in queues)
        assert not any(band.prefixed for band in pool.queue.bands)


def held_credits(router: Router) -> dict[str, tuple[RequestInfo, str]]:
    """(request, replica) of each request that holds a credit not taken up yet."""
    return {
        request_id: (request.info, request.replica)
        for ingress in router._ingresses.values()
        for request_id, request in ingress.requests.items()
        if request.state is State.GRANTED
    }
