"""Whose request is next: a queue for each tenant, in fair order within each band.

It knows neither replicas nor ingresses: where a request runs is another's business, and so is
which band goes next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from router.concurrency import Concurrency
from router.policy import BANDS, FairPolicy
from router.priority_band import PriorityBand, TenantQueue, VirtualTokenCounter
from router.request import Request
from router.tenant import Tenant


class FairQueue:
    """Requests of all tenants for one pool. Every operation is amortised O(log tenants)."""

    def __init__(
        self, policy: FairPolicy, concurrencies: dict[str, Concurrency] | None = None
    ) -> None:
        """`concurrencies`: by tenant, shared with the queues of other pools."""
        self.bands = tuple(PriorityBand(index, policy) for index in range(BANDS))
        self.waiting = 0
        """Requests of all tenants that wait."""
        self.served = defaultdict[str, float](float)
        """Service of every tenant since the start, as a cost: counters are lifted, this is not."""
        self._policy = policy
        self._order_weight = policy.lam * policy.w_q
        self._concurrencies = {} if concurrencies is None else concurrencies
        self._tenants: dict[str, TenantQueue] = {}

    @property
    def virtual_time(self) -> float:
        """The highest virtual time of all bands."""
        return max(band.virtual_time for band in self.bands)

    def configure(self, tenants: Iterable[Tenant]) -> None:
        """Take over weights and limits of tenants that are new or have changed."""
        for tenant in tenants:
            queue = self.tenant(tenant.id)
            self._move(queue, self.bands[tenant.band])
            queue.counter.weigh(tenant.weight)
            queue.burst = self._policy.burst if tenant.burst is None else tenant.burst
            queue.concurrency.resize(tenant.max_concurrency)
            if queue.eligible:
                queue.band.touch(queue)

    def retire(self, names: Iterable[str]) -> None:
        """These tenants are gone. What waits of them stays put."""
        for name in self._tenants.keys() & set(names):
            queue = self._tenants[name]
            queue.concurrency.resize(0)
            if not queue.waiting and not queue.running:
                self._forget(name)

    def tenants(self) -> Mapping[str, TenantQueue]:
        return self._tenants

    def tenant(self, name: str) -> TenantQueue:
        """The queue of a tenant; of one that is not configured nothing is dispatched."""
        queue = self._tenants.get(name)
        if queue is None:
            concurrency = self._concurrencies.setdefault(name, Concurrency())
            counter = VirtualTokenCounter(self._order_weight)
            queue = TenantQueue(self.bands[0], concurrency, counter)
            concurrency.queues.append(queue)
            self._tenants[name] = queue
        return queue

    def push(self, request: Request, *, front: bool = False) -> None:
        """Queue a request behind those of its tenant and priority, or before them."""
        queue = self._tenants.get(request.info.tenant) or self.tenant(request.info.tenant)
        queue.add(request, front=front)
        self._count(queue.band, request, 1)
        concurrency = queue.concurrency
        if not queue.eligible and concurrency.running < concurrency.limit:
            queue.band.activate(queue)

    def start(self, request: Request) -> None:
        """Count a request as running that waited, or did neither."""
        queue = self._tenants.get(request.info.tenant) or self.tenant(request.info.tenant)
        if queue.discard(request):
            self._count(queue.band, request, -1)
        queue.running.add(request)
        concurrency = queue.concurrency
        concurrency.running += 1
        if concurrency.running >= concurrency.limit:
            concurrency.suspend()

    def remove(self, request: Request) -> None:
        """Forget a request that waits or runs."""
        queue = self._tenants.get(request.info.tenant) or self.tenant(request.info.tenant)
        if request in queue.running:
            queue.running.remove(request)
            concurrency = queue.concurrency
            concurrency.running -= 1
            if concurrency.running == concurrency.limit - 1:
                concurrency.activate()
        elif queue.discard(request):
            self._count(queue.band, request, -1)

    def charge(self, tenant: str, cost: float, outstanding: int = 0) -> None:
        """Add to a tenant's service and to its expected output; either may be negative."""
        queue = self._tenants.get(tenant) or self.tenant(tenant)
        queue.counter.charge(cost, outstanding)
        self.served[tenant] += cost
        if queue.eligible and (cost < 0 or cost + self._order_weight * outstanding < 0):
            queue.band.touch(queue)

    def resume(self, virtual_times: Mapping[str, float]) -> None:
        """Raise counters to those that an earlier router had reported; virtual times follow."""
        least: dict[PriorityBand, float] = {}
        for name in virtual_times.keys() & self._tenants.keys():
            queue, told = self._tenants[name], virtual_times[name]
            queue.counter.set(max(queue.counter.value, told))
            least[queue.band] = min(least.get(queue.band, told), told)
        for band, value in least.items():
            band.virtual_time = max(band.virtual_time, value)
        for queue in self._tenants.values():
            if queue.eligible and queue.band in least:
                queue.band.activate(queue)

    def _forget(self, name: str) -> None:
        queue = self._tenants.pop(name)
        queue.concurrency.queues.remove(queue)
        if not queue.concurrency.queues:
            del self._concurrencies[name]

    def _move(self, queue: TenantQueue, band: PriorityBand) -> None:
        """To another band, where it begins level with the others: counters do not compare."""
        if queue.band is band:
            return
        old, queue.band = queue.band, band
        for request in queue.lines():
            prefixed = bool(request.info.prefixes)
            old.prefixed -= prefixed
            band.prefixed += prefixed
        old.drop(queue)
        queue.counter.set(band.virtual_time)
        if queue.eligible:
            band.touch(queue)

    def _count(self, band: PriorityBand, request: Request, change: int) -> None:
        self.waiting += change
        if request.info.prefixes:
            band.prefixed += change
