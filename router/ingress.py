"""What the router remembers of one ingress between its syncs. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.ledger import Running, Used
from router.messages import Grant, Refusal
from router.request import Request, State


@dataclass(slots=True)
class Ingress:
    """The requests of one ingress. Mappings are by request id, unless noted."""

    name: str
    sequence: int = -1
    seen_at: float = 0.0
    sleepers: dict[str, int] = field(default_factory=dict)
    """Requests that wait for a first replica, by model."""
    requests: dict[str, Request] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    """Tenant of each request whose ending the last sync showed; all are booked."""
    dropped: dict[str, Refusal] = field(default_factory=dict)
    """Of requests that waited for too long; told until they are no longer shown as waiting."""
    refused: set[str] = field(default_factory=set)
    """Requests that the last reply refused."""

    def grants(self) -> tuple[Grant, ...]:
        """The grants that the ingress has not taken up yet."""
        return tuple(
            Grant(request_id, request.info.attempt, request.replica, request.max_tokens)
            for request_id, request in self.requests.items()
            if request.state is State.GRANTED
        )

    def running(self, used: Callable[[str], Used]) -> list[Running]:
        """The requests that have begun; `used` gives what a request has to pay for."""
        return [
            Running(name, request.info.tenant, request.info.model, used(name), request.gpu_s)
            for name, request in self.requests.items()
            if request.taken_up
        ]
