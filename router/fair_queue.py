"""Whose request is next: weighted virtual token counters over first-in-first-out queues.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with weights,
expected output and a monotone virtual time; docs/fairness.md states what is guaranteed. The
module knows neither replicas nor ingresses: where a request runs is another's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from router.lazy_heap import LazyHeap
from router.request import Request
from router.tenant import Tenant


@dataclass(frozen=True, kw_only=True)
class FairPolicy:
    """What service costs and how it is ordered. Raises ValueError on what cannot work."""

    # Read by pydantic where the application nests this class in its own settings.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    w_p: float = 1.0
    """Cost of a prompt token that is computed."""
    w_c: float = 0.25
    """Cost of a prompt token found in the prefix cache."""
    w_q: float = 2.0
    """Cost of an output token."""
    lam: float = 0.25
    """Share of the output still expected that counts in the order (λ), 0 to 1."""
    burst: float = 1000.0
    """Service that a tenant may bank while it is idle, as a cost."""
    expected_output: int = 256
    """Output tokens expected of a request before any has ended."""
    max_overtakes: int = 16
    """Grants to others before a request that lacks KV room has a replica kept for it."""

    def __post_init__(self) -> None:
        if min(self.w_p, self.w_c, self.burst, self.max_overtakes) < 0 or self.w_c > self.w_p:
            raise ValueError("fairness needs 0 <= w_c <= w_p, burst >= 0, max_overtakes >= 0")
        if self.w_q <= 0 or not 0 <= self.lam <= 1 or self.expected_output < 1:
            raise ValueError("fairness needs w_q > 0, 0 <= lam <= 1, expected_output >= 1")


@dataclass(slots=True)
class VirtualTokenCounter:
    """Service that one tenant had, in units of cost divided by weight."""

    weight: float
    value: float = 0.0
    """c: rises by what is served, and by a lift at activation."""
    outstanding: int = 0
    """O: output tokens expected of what runs now."""

    def charge(self, cost: float) -> None:
        self.value += cost / self.weight

    def lift(self, virtual_time: float, burst: float) -> None:
        """Forget the service missed while away, except for the burst."""
        self.value = max(self.value, virtual_time - burst / self.weight)


@dataclass(slots=True, eq=False)
class TenantQueue:
    """One tenant's requests and its counter."""

    max_concurrency: int
    counter: VirtualTokenCounter
    waiting: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    running: set[Request] = field(default_factory=set)

    def eligible(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_concurrency


class FairQueue:
    """Requests of all tenants in fair order. Every operation is amortised O(log tenants)."""

    def __init__(self, policy: FairPolicy) -> None:
        self.virtual_time = 0.0
        """V: the largest, over all dispatches, of the least counter among the eligible."""
        self._policy = policy
        self._order_weight = policy.lam * policy.w_q
        self._tenants: dict[str, TenantQueue] = {}
        self._by_key = LazyHeap(self._key, TenantQueue.eligible)
        self._by_counter = LazyHeap(_counter_value, TenantQueue.eligible)
        self._skipped: list[TenantQueue] = []

    def configure(self, tenants: Iterable[Tenant]) -> None:
        """Take over weights and limits. What waits of a tenant that is gone stays put."""
        named = {tenant.id: tenant for tenant in tenants}
        for name in self._tenants.keys() - named.keys():
            queue = self._tenants[name]
            queue.max_concurrency = 0
            if not queue.waiting and not queue.running:
                del self._tenants[name]
        for tenant in named.values():
            queue = self.tenant(tenant.id)
            was_eligible = queue.eligible()
            queue.max_concurrency = tenant.max_concurrency
            queue.counter.weight = tenant.weight
            self._refresh(queue, was_eligible)
            if queue.eligible():
                self._touch(queue)

    def tenants(self) -> Mapping[str, TenantQueue]:
        return self._tenants

    def tenant(self, name: str) -> TenantQueue:
        """The queue of a tenant; of one that is not configured nothing is dispatched."""
        queue = self._tenants.get(name)
        if queue is None:
            queue = TenantQueue(max_concurrency=0, counter=VirtualTokenCounter(weight=1.0))
            self._tenants[name] = queue
        return queue

    def push(self, request: Request, *, front: bool = False) -> None:
        """Queue a request behind those of its tenant, or before them."""
        queue = self.tenant(request.info.tenant)
        was_eligible = queue.eligible()
        queue.waiting[request] = None
        if front:
            queue.waiting.move_to_end(request, last=False)
        self._refresh(queue, was_eligible)

    def head(self) -> Request | None:
        """The request that comes next, skipped tenants apart."""
        queue = self._by_key.peek()
        return None if queue is None else next(iter(queue.waiting))

    def skip(self) -> None:
        """Put the head's tenant aside until `unskip`. It stays eligible."""
        self._skipped.append(self._by_key.pop())

    def unskip(self) -> None:
        while self._skipped:
            self._by_key.touch(self._skipped.pop())

    def advance(self) -> None:
        """Move the virtual time up to the least counter among the eligible, at a dispatch."""
        slowest = self._by_counter.peek()
        if slowest is not None:
            self.virtual_time = max(self.virtual_time, slowest.counter.value)

    def start(self, request: Request) -> None:
        """Count a request as running, whether or not it waited."""
        queue = self.tenant(request.info.tenant)
        queue.waiting.pop(request, None)
        queue.running.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request that waits or runs."""
        queue = self.tenant(request.info.tenant)
        was_eligible = queue.eligible()
        queue.waiting.pop(request, None)
        queue.running.discard(request)
        self._refresh(queue, was_eligible)

    def charge(self, tenant: str, cost: float, outstanding: int = 0) -> None:
        """Add to a tenant's service and to its expected output; either may be negative."""
        queue = self.tenant(tenant)
        queue.counter.charge(cost)
        queue.counter.outstanding += outstanding
        if (cost < 0 or cost + self._order_weight * outstanding < 0) and queue.eligible():
            self._touch(queue)

    def resume(self, virtual_times: Mapping[str, float]) -> None:
        """Raise counters to what an earlier router had told; the virtual time follows."""
        known = virtual_times.keys() & self._tenants.keys()
        if not known:
            return
        for name in known:
            counter = self._tenants[name].counter
            counter.value = max(counter.value, virtual_times[name])
        self.virtual_time = max(self.virtual_time, min(virtual_times[name] for name in known))
        for queue in self._tenants.values():
            if queue.eligible():
                queue.counter.lift(self.virtual_time, self._policy.burst)

    def _refresh(self, queue: TenantQueue, was_eligible: bool) -> None:
        """Becoming eligible activates."""
        if not was_eligible and queue.eligible():
            queue.counter.lift(self.virtual_time, self._policy.burst)
            self._touch(queue)

    def _touch(self, queue: TenantQueue) -> None:
        self._by_key.touch(queue)
        self._by_counter.touch(queue)

    def _key(self, queue: TenantQueue) -> float:
        counter = queue.counter
        return counter.value + self._order_weight * counter.outstanding / counter.weight


def _counter_value(queue: TenantQueue) -> float:
    return queue.counter.value
