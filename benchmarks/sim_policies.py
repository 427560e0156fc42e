"""Who goes next in the simulation: our router's own code, and what others do.

FCFS; a limit of requests a minute and tenant; the shortest counter first without a lift; VTC as in
Sheng et al. (OSDI 2024); the longest prefix match. They know rows, not time steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from benchmarks.sim_engine import Job
from router.accounts import Accounts
from router.dispatcher import Dispatcher
from router.messages import (
    Ending,
    LeaseInfo,
    Outcome,
    ReplicaReport,
    RequestInfo,
    Sync,
)
from router.policy import FairPolicy
from router.prefixes import FIRST
from router.request import Request
from router.router import Router
from router.tenant import Tenant, Tenants

MANY = 1_000_000
Weights = Mapping[str, float]


def info_of(job: Job) -> RequestInfo:
    """As an ingress would show it: prefixes of 64, 128, ... tokens, shared or its own."""
    prefixes: list[int] = []
    length, number = FIRST, hash(job.id)
    while length <= job.prompt:
        shared = job.prefix if length <= job.prefix_tokens else number
        prefixes.append(shared * 64 + len(prefixes))
        length *= 2
    named = tuple(prefixes) if job.prefix else ()
    return RequestInfo(job.id, job.tenant, job.prompt, job.limit, prefixes=named)


def tenants_of(weights: Weights) -> list[Tenant]:
    return [
        Tenant(id=name, weight=float(weight), max_concurrency=MANY, max_queued=MANY)
        for name, weight in weights.items()
    ]


class Ours:
    """The router's dispatcher, told of each event at once."""

    def __init__(self, weights: Weights, rows: int, policy: FairPolicy, kv_tokens: int = 0) -> None:
        self._now = 0.0
        accounts, tenants = Accounts(lambda: self._now), tenants_of(weights)
        self._dispatcher = Dispatcher(policy, lambda: self._now, 1e12, accounts)
        accounts.configure(tenants)
        self._dispatcher.configure(tenants)
        self._dispatcher.credits.report(ReplicaReport("r", rows, kv_tokens or 10**9))
        self._jobs: dict[Request, Job] = {}
        self._requests: dict[Job, Request] = {}

    def add(self, job: Job, now: float) -> bool:
        self._now = now
        expected = self._dispatcher.estimates.output(job.tenant, job.limit)
        request = Request(info_of(job), "i", expected)
        self._jobs[request], self._requests[job] = job, request
        return self._dispatcher.admit(request) is None

    def fill(self, now: float) -> list[Job]:
        self._now = now
        granted = self._dispatcher.dispatch()
        for request in granted:
            request.taken_up = True
        return [self._jobs[request] for request in granted]

    def produced(self, job: Job) -> None:
        self._dispatcher.progress(self._requests[job], job.produced, job.cached)

    def end(self, job: Job) -> None:
        request = self._requests.pop(job)
        del self._jobs[request]
        self._dispatcher.progress(request, job.output, job.cached)
        self._dispatcher.end(request, Outcome.SUCCEEDED)
        self._dispatcher.ledger.take_journal()


class OursByIngress:
    """The whole router and its conversation with several ingresses, which sync at each event."""

    def __init__(self, weights: Weights, rows: int, policy: FairPolicy, ingresses: int) -> None:
        self._now = 0.0
        tenants = Tenants(tenants=tenants_of(weights))
        self._router = Router(
            tenants, epoch=1, policy=policy, clock=lambda: self._now, grace_s=0.0,
            ingress_timeout_s=1e12, report_timeout_s=1e12,
        )  # fmt: skip
        self._router.report(ReplicaReport("r", rows, 10**9))
        self._ingresses = [_Ingress(f"ingress-{number}") for number in range(ingresses)]
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job, now: float) -> bool:
        self._now = now
        self._jobs[job.id] = job
        self._ingresses[job.ingress].waiting[job.id] = info_of(job)
        return True

    def fill(self, now: float) -> list[Job]:
        self._now = now
        granted: list[Job] = []
        # What one ingress ends is granted at another: ask until nobody hears anything new.
        while names := [self._jobs[name] for each in self._ingresses for name in self._sync(each)]:
            granted += names
        return granted

    def produced(self, job: Job) -> None:
        leases = self._ingresses[job.ingress].leases
        lease = leases[job.id]
        leases[job.id] = LeaseInfo(lease.request, "r", job.produced, job.cached)

    def end(self, job: Job) -> None:
        ingress = self._ingresses[job.ingress]
        info = ingress.leases.pop(job.id).request
        ingress.endings[job.id] = Ending(info, Outcome.SUCCEEDED, job.output, job.cached)
        del self._jobs[job.id]

    def _sync(self, ingress: _Ingress) -> list[str]:
        reply = self._router.sync(ingress.next())
        for name in reply.settled:
            ingress.endings.pop(name, None)
        fresh = [grant.request_id for grant in reply.grants if grant.request_id in ingress.waiting]
        for name in fresh:
            ingress.leases[name] = LeaseInfo(ingress.waiting.pop(name), "r")
        return fresh


class _Ingress:
    def __init__(self, name: str) -> None:
        self.name, self.sequence = name, 0
        self.waiting: dict[str, RequestInfo] = {}
        self.leases: dict[str, LeaseInfo] = {}
        self.endings: dict[str, Ending] = {}

    def next(self) -> Sync:
        self.sequence += 1
        return Sync(
            self.name,
            self.sequence,
            1,
            tuple(self.waiting.values()),
            tuple(self.leases.values()),
            tuple(self.endings.values()),
        )


class Fcfs:
    """First come, first served."""

    def __init__(self, rows: int) -> None:
        self._free = rows
        self._waiting: deque[Job] = deque()

    def add(self, job: Job, now: float) -> bool:
        self._waiting.append(job)
        return True

    def fill(self, now: float) -> list[Job]:
        granted = []
        while self._free and self._waiting:
            granted.append(self._pop())
            self._free -= 1
        return granted

    def produced(self, job: Job) -> None:
        pass

    def end(self, job: Job) -> None:
        self._free += 1

    def _pop(self) -> Job:
        return self._waiting.popleft()


class RequestRate(Fcfs):
    """First come, first served, of so many requests a minute of each tenant; others are refused."""

    def __init__(self, rows: int, per_minute: int) -> None:
        super().__init__(rows)
        self._per_minute = per_minute
        self._used: dict[tuple[str, int], int] = {}

    def add(self, job: Job, now: float) -> bool:
        window = job.tenant, int(now // 60)
        self._used[window] = self._used.get(window, 0) + 1
        return self._used[window] <= self._per_minute and super().add(job, now)


class LongestPrefix(Fcfs):
    """Whoever waits and has most of the prompt cached, first come among equals. It is told what
    the cache holds."""

    def __init__(self, rows: int, is_cached: Callable[[Job], bool]) -> None:
        super().__init__(rows)
        self._is_cached = is_cached

    def _pop(self) -> Job:
        best = next(filter(self._is_cached, self._waiting), self._waiting[0])
        self._waiting.remove(best)
        return best


class ShortestCounter:
    """The tenant that had the least service goes next; who comes anew starts at zero."""

    W_P, W_Q = 1.0, 2.0

    def __init__(self, weights: Weights, rows: int) -> None:
        self._weights, self._free = weights, rows
        self._counters = dict.fromkeys(weights, 0.0)
        self._waiting: dict[str, deque[Job]] = {name: deque() for name in weights}
        self._charged: dict[Job, int] = {}

    def add(self, job: Job, now: float) -> bool:
        if not self._waiting[job.tenant]:
            self._arrive(job.tenant)
        self._waiting[job.tenant].append(job)
        return True

    def fill(self, now: float) -> list[Job]:
        granted = []
        while self._free and (names := [name for name, jobs in self._waiting.items() if jobs]):
            name = min(names, key=self._counters.__getitem__)
            job = self._waiting[name].popleft()
            self._charge(name, self.W_P * job.prompt)
            self._charged[job] = 0
            self._leave(name)
            self._free -= 1
            granted.append(job)
        return granted

    def produced(self, job: Job) -> None:
        self._charge(job.tenant, self.W_Q * (job.produced - self._charged[job]))
        self._charged[job] = job.produced

    def end(self, job: Job) -> None:
        self.produced(job)
        del self._charged[job]
        self._free += 1

    def _charge(self, name: str, cost: float) -> None:
        self._counters[name] += cost / self._weights[name]

    def _arrive(self, name: str) -> None:
        """No lift: service that was missed is made up for."""

    def _leave(self, name: str) -> None:
        pass


class Vtc(ShortestCounter):
    """Who comes anew is lifted to the least of those that wait, or to who waited last."""

    def __init__(self, weights: Weights, rows: int) -> None:
        super().__init__(weights, rows)
        self._last = next(iter(weights))

    def _arrive(self, name: str) -> None:
        waiting = [self._counters[other] for other, jobs in self._waiting.items() if jobs]
        level = min(waiting) if waiting else self._counters[self._last]
        self._counters[name] = max(self._counters[name], level)

    def _leave(self, name: str) -> None:
        if not any(self._waiting.values()):
            self._last = name
