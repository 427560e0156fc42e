"""Turns requests away before they are read, where nothing of their tenant would be let in, whatever
it asks for: an administrator has paused it, or Admission has just said so.

What Admission said holds for a moment. Then, or as soon as something of the tenant's begins or ends
here, one request asks anew, and the others are told the same until it is answered. The module knows
neither quotas nor bodies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from router.messages import Refusal
from serve_app.protocol.backend import Refused, Stopped
from serve_app.protocol.errors import from_exception

ANSWER_S = 0.1
"""So long one that asks anew is waited for before the next may."""
STALE_S = 0.5
"""What was said is forgotten if nobody has asked anew for so long: whoever comes then, however many
at once, comes to something else."""
QUEUED = frozenset({"/v1/chat/completions", "/v1/completions"})
"""What Admission has a say in."""

RefusedNow: TypeAlias = Callable[[str, bool], Refused | Stopped | None]
"""Why nothing of a tenant would be let in, by its id and whether it is to be queued; None if
something may."""


@dataclass(slots=True)
class _Shut:
    refusal: Refusal
    at: float
    until: float
    """Then one may ask."""


class EarlyRefusals:
    """The latest refusal of each tenant. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shut: dict[str, _Shut] = {}
        self.stopped: Callable[[str], Stopped | None] = lambda tenant: None
        """Why an administrator lets in nothing of a tenant, by its id."""

    def refused(self, tenant: str, queued: bool = True) -> Refused | Stopped | None:
        """See `RefusedNow`. Where it is time to ask anew, the caller is expected to."""
        return self.stopped(tenant) or (self._full(tenant) if queued else None)

    def _full(self, tenant: str) -> Refused | None:
        shut = self._shut.get(tenant)
        if shut is None:
            return None
        now = self._clock()
        if now >= shut.until + STALE_S:
            del self._shut[tenant]
            return None
        if now >= shut.until:
            shut.until = now + ANSWER_S
            return None
        refusal = shut.refusal
        return Refused(refusal.reason, refusal.retry_after_s - (now - shut.at), refusal.kind)

    def answer(self, tenant: str, refusal: Refusal | None) -> None:
        """What a request was told that asked; None if it was let in."""
        if refusal is None or not refusal.closed_s:
            self._shut.pop(tenant, None)
        else:
            now = self._clock()
            self._shut[tenant] = _Shut(refusal, now, now + refusal.closed_s)

    def moved(self, tenant: str) -> None:
        """Something of the tenant's has begun or ended."""
        if shut := self._shut.get(tenant):
            shut.until = min(shut.until, self._clock())


class RefuseEarly:
    """ASGI middleware behind authentication."""

    def __init__(self, app: ASGIApp, refused: RefusedNow) -> None:
        self._app, self._refused = app, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            tenant = scope.get("state", {}).get("tenant")  # what is public has none
            refused = tenant and self._refused(tenant.id, path in QUEUED)
            if refused:
                await from_exception(refused).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
