"""The tenants of one priority class in fair order: weighted virtual token counters.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with weights,
expected output and a monotone virtual time; docs/fairness.md states what is guaranteed. Knows
neither replicas nor other bands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from router.concurrency import Concurrency
from router.lazy_sorted_list import LazySortedList
from router.policy import FairPolicy
from router.request import Request


@dataclass(slots=True)
class VirtualTokenCounter:
    """Service that one tenant had, in units of cost divided by weight, and its place in the
    order. Changed by its methods only."""

    order_weight: float
    """λ·w_q: what an expected token counts in the order."""
    weight: float = 1.0
    value: float = 0.0
    """c: rises by what is served, and by a lift at activation."""
    outstanding: int = 0
    """O: output tokens expected of what runs now."""
    key: float = 0.0
    """The order: c + λ·w_q·O / w."""

    def charge(self, cost: float, outstanding: int) -> None:
        """Add service and expected output; either may be negative."""
        self.value += cost / self.weight
        self.outstanding += outstanding
        self.key = self.value + self.order_weight * self.outstanding / self.weight

    def set(self, value: float) -> None:
        self.value = value
        self.charge(0.0, 0)

    def weigh(self, weight: float) -> None:
        """Count by another weight from now on."""
        self.weight = weight
        self.charge(0.0, 0)


@dataclass(slots=True, eq=False)
class TenantQueue:
    """One tenant's requests in one pool, and its counter there."""

    band: PriorityBand
    concurrency: Concurrency
    """The tenant's, in all pools together."""
    counter: VirtualTokenCounter
    burst: float = 0.0
    eligible: bool = False
    """Something waits, and one more may run."""
    waiting: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    """Requests that come first, in order, all of one priority. Empty only if nothing waits."""
    priority: int = 0
    """The priority of the requests in `waiting`."""
    later: dict[int, OrderedDict[Request, None]] = field(default_factory=dict)
    """The others, by priority; no line is empty. Most tenants never have any."""
    running: set[Request] = field(default_factory=set)

    @property
    def head(self) -> Request:
        return next(iter(self.waiting))

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.waiting) + sum(map(len, self.later.values()))

    def activate(self) -> None:
        """Take part in the order, if anything waits: one more may run."""
        if self.waiting:
            self.band.activate(self)

    def add(self, request: Request, *, front: bool = False) -> None:
        """Let a request wait behind those of its priority, or before them."""
        priority = request.info.priority
        line = self.waiting if priority == self.priority else self._line(priority)
        line[request] = None
        if front:
            line.move_to_end(request, last=False)

    def discard(self, request: Request) -> bool:
        """Take a request out of its line. Returns whether it waited."""
        if request in self.waiting:
            del self.waiting[request]
            if not self.waiting:
                self._next_line()
            return True
        line = self.later.get(request.info.priority)
        if line is None or request not in line:
            return False
        del line[request]
        if not line:
            del self.later[request.info.priority]
        return True

    def lines(self) -> Iterator[Request]:
        """All that waits, in no order."""
        return chain(self.waiting, *self.later.values())

    def _next_line(self) -> None:
        if self.later:
            self.priority = min(self.later)
            self.waiting = self.later.pop(self.priority)
        else:
            self.eligible = False

    def _line(self, priority: int) -> OrderedDict[Request, None]:
        """Where requests of another priority wait."""
        if priority > self.priority and self.waiting:
            return self.later.setdefault(priority, OrderedDict())
        if self.waiting:
            self.later[self.priority], self.waiting = self.waiting, OrderedDict()
        self.priority = priority
        return self.waiting


class PriorityBand:
    """Every operation is amortised O(log tenants)."""

    def __init__(self, index: int, policy: FairPolicy) -> None:
        self.index = index
        self.virtual_time = 0.0
        """V: the largest, over all dispatches, of the least counter among the eligible, before
        each grant and after the last."""
        self.prefixed = 0
        """Waiting requests that name prefixes."""
        self._policy = policy
        # All of C: these are asked at every step of every decision.
        live = attrgetter("eligible")
        self._by_key: LazySortedList[TenantQueue] = LazySortedList(attrgetter("counter.key"), live)
        self._by_counter: LazySortedList[TenantQueue] = LazySortedList(
            attrgetter("counter.value"), live
        )
        self._aside: list[TenantQueue] = []

    def is_newcomer(self, queue: TenantQueue) -> bool:
        """Whether a tenant is below its fair share: rows that are kept are for such."""
        level = queue.counter.value
        return level < self.virtual_time or (level == self.virtual_time and not queue.running)

    def newcomer(self) -> TenantQueue | None:
        """The eligible tenant that had the least service, if it is a newcomer, or would still
        have had the least after its next request."""
        least = self._by_counter.first(2)
        if not least or self.is_newcomer(least[0]):
            return least[0] if least else None
        queue, *others = least
        still = any(queue.counter.value + self._cost(queue) <= x.counter.value for x in others)
        return queue if still else None

    def _cost(self, queue: TenantQueue) -> float:
        """What its next request will probably add to its counter."""
        request = queue.head
        cost = self._policy.w_p * request.info.prompt_tokens + self._policy.w_q * request.expected
        return cost / queue.counter.weight

    def first(self) -> TenantQueue | None:
        """The tenant whose head comes next, those set aside apart."""
        return self._by_key.peek()

    def near(self, span: float, limit: int) -> list[TenantQueue]:
        """The tenants that come next, with keys at most `span` above the first; `limit` of them
        at most."""
        return self._by_key.first(limit, span)

    def set_aside(self) -> None:
        """Pass the first tenant over until `restore`. It stays eligible."""
        self._aside.append(self._by_key.pop())

    def restore(self) -> None:
        while self._aside:
            self._by_key.touch(self._aside.pop())

    def advance(self) -> None:
        """Move the virtual time up to the least counter among the eligible."""
        slowest = self._by_counter.peek()
        if slowest is not None and slowest.counter.value > self.virtual_time:
            self.virtual_time = slowest.counter.value

    def activate(self, queue: TenantQueue) -> None:
        """A tenant becomes eligible: it comes back level with the others, but for its burst."""
        queue.eligible = True
        level = self.virtual_time - queue.burst / queue.counter.weight
        if level > queue.counter.value:
            queue.counter.set(level)
        self.touch(queue)

    def drop(self, queue: TenantQueue) -> None:
        """A tenant leaves for another band."""
        self._by_key.drop(queue)
        self._by_counter.drop(queue)

    def touch(self, queue: TenantQueue) -> None:
        """An eligible tenant is new here, or its key may have fallen."""
        self._by_key.touch(queue)
        self._by_counter.touch(queue)
