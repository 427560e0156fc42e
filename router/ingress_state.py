"""What the router remembers of one ingress between its syncs. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.ledger import Running, Used
from router.messages import Grant, Refusal, Sync
from router.request import Request, State


@dataclass(slots=True)
class IngressState:
    """The requests of one ingress. Mappings are by request id, unless noted."""

    name: str
    sequence: int = -1
    seen_at: float = 0.0
    sleepers: dict[str, int] = field(default_factory=dict)
    """Requests that wait for a first replica, by model."""
    requests: dict[str, Request] = field(default_factory=dict)
    """Changed by `add` and `remove` only."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Of `requests`."""
    granted: dict[str, Request] = field(default_factory=dict)
    """Those among them that it may not have taken up yet."""
    leased: set[str] = field(default_factory=set)
    """What the last sync showed as leased."""
    whole: bool = False
    """All that waited at the last sync is in `requests`, and its state is as it should be."""
    settled: dict[str, str] = field(default_factory=dict)
    """Tenant of each request whose ending the last sync showed; all are booked."""
    dropped: dict[str, Refusal] = field(default_factory=dict)
    """Of requests that waited for too long; told until they are no longer shown as waiting."""
    refused: set[str] = field(default_factory=set)
    """Requests that the last reply refused."""

    def knows(self, sync: Sync, epoch: int) -> bool:
        """Whether what a sync shows can be understood."""
        if sync.base is None:
            return True
        return self.whole and sync.epoch == epoch and sync.base <= self.sequence

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.requests[request.info.request_id] = request
            self.tenants[request.info.tenant] += 1

    def remove(self, request: Request) -> None:
        request_id, tenant = request.info.request_id, request.info.tenant
        del self.requests[request_id]
        self.granted.pop(request_id, None)
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def take_missing(self, sync: Sync) -> list[Request]:
        """What it had, and has no more. What was dropped and has left is forgotten."""
        waiting = {info.request_id for info in sync.waiting}
        leased = {lease.request.request_id for lease in sync.leases}
        known, dropped = self.requests.keys() - waiting - leased, self.dropped.keys() - waiting
        if sync.base is not None:
            known &= self.leased.union(sync.gone)
            dropped &= set(sync.gone)
        self.leased = leased
        for request_id in dropped:
            del self.dropped[request_id]
        return [self.requests[request_id] for request_id in known]

    def grants(self) -> tuple[Grant, ...]:
        """The grants that the ingress has not taken up yet."""
        self.granted = {
            name: request
            for name, request in self.granted.items()
            if request.state is State.GRANTED
        }
        return tuple(
            Grant(name, request.info.attempt, request.replica, request.max_tokens)
            for name, request in self.granted.items()
        )

    def running(self, used: Callable[[str], Used]) -> list[Running]:
        """The requests that have begun; `used` gives what a request has to pay for."""
        return [
            Running(name, request.info.tenant, request.info.model, used(name), request.gpu_s)
            for name, request in self.requests.items()
            if request.taken_up
        ]
