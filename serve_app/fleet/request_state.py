"""What an ingress remembers of a request that waits for a grant or has one. Decides nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from router.messages import Ending, Grant, Outcome, Refusal, RequestInfo
from serve_app.protocol.backend import Refused


@dataclass(slots=True)
class Lease:
    """A request that was granted, and its output so far."""

    request: RequestInfo
    replica: str
    asked_at: float
    """When its first attempt was asked for. All below counts earlier attempts in."""
    earlier_gpu_s: float = 0.0
    """What those took of GPUs' time ..."""
    gpu_s: float = 0.0
    """... and this one with them."""
    produced: int = 0
    cached: int | None = None
    """Cached tokens of the attempt that reported first: they are what was charged."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    bill_by: float | None = None
    """Its engine was told to stop it, and tells by then what it took of its time."""
    is_left: bool = False
    """Nobody waits for it any more but for its bill."""

    def ending(self, outcome: Outcome) -> Ending:
        return Ending(
            self.request,
            outcome,
            produced=self.produced,
            cached=self.cached,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            gpu_s=self.gpu_s,
        )


@dataclass(slots=True)
class Waiting:
    """A request without a grant: it is new, or waits for its next attempt."""

    request: RequestInfo
    granted: asyncio.Future[Grant]
    asked_at: float
    earlier: Lease | None
    """What its earlier attempts have come to."""
    shown_in: int = 0
    """The first sync that it was in."""

    def refuse(self, refusal: Refusal) -> None:
        if not self.granted.done():
            error = Refused(refusal.reason, refusal.retry_after_s, refusal.kind)
            self.granted.set_exception(error)

    def lease(self, grant: Grant) -> Lease:
        request = replace(self.request, max_tokens=grant.max_tokens)
        if self.earlier is None:
            return Lease(request, grant.replica, self.asked_at)
        earlier_gpu_s = self.earlier.gpu_s
        return replace(
            self.earlier, request=request, replica=grant.replica, earlier_gpu_s=earlier_gpu_s
        )


@dataclass(eq=False, slots=True)
class Sleeper:
    """A request that waits for a first replica."""

    model: str
    error: Exception | None = None
    """Why it had better not wait any longer."""
