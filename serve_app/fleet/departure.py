"""How a process behaves once Serve removes it, or the whole service ends.

The module knows neither what the process does nor how Serve tells of a removal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.protocol.backend import ShuttingDown
from serve_app.protocol.errors import from_exception
from serve_app.ray_private import STRAGGLERS_S

LOOK_PERIOD_S = 0.5
"""How often a process should look whether it is late."""
LEAVE_EARLY_S = 3.0
"""Before the grace ends: that much earlier what still runs is given up. Serve's clock starts
earlier than ours, and word has to get out before it kills this process."""


class Departure:
    """Whether this process is being removed. Used from one event loop."""

    def __init__(self, name: str, grace_s: float) -> None:
        """`name` of the process, as Serve calls it.

        grace_s: how long Serve lets a process live that it has told to stop.
        """
        self.routed = False
        """Serve routes new work here: not before this process is up, nor while it leaves."""
        self.answers = 0
        """Answers that clients still wait for."""
        self._name = name
        self._stay_s = grace_s - min(LEAVE_EARLY_S, grace_s / 2)
        self._noticed_at: float | None = None
        self._dismissed = False

    @property
    def leaves(self) -> bool:
        """This process is being removed."""
        return self._noticed_at is not None

    @property
    def takes_stragglers(self) -> bool:
        """New requests are still served, since removal was not noticed or only a moment ago. False
        when the whole service ends."""
        if self._noticed_at is None:
            return True
        return self._passed_s < STRAGGLERS_S and not self._dismissed

    @property
    def late(self) -> bool:
        """What has not ended by now will be killed soon."""
        return self._noticed_at is not None and self._passed_s > self._stay_s

    def dismiss(self) -> None:
        """The whole service ends, so this process leaves, for good, although Serve does not say so.
        May be called again."""
        self._dismissed = True
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A client waits for an answer meanwhile."""
        self.answers += 1
        try:
            yield
        finally:
            self.answers -= 1

    def learn(self, members: Collection[str]) -> None:
        """These are the processes that Serve routes new work to."""
        routed = self._name in members
        if routed and not self._dismissed:
            self._noticed_at = None
        elif self.routed and self._noticed_at is None:
            self._noticed_at = time.monotonic()
        self.routed = routed

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - (self._noticed_at or 0.0)


class TurnAway:
    """ASGI middleware: while the process leaves, it is not ready, and new requests get a 503.

    What came before goes on, and so does /health: nobody is to restart it.
    """

    def __init__(self, app: ASGIApp, departure: Departure) -> None:
        self._app, self._departure = app, departure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._refuses(scope["path"]):
            await from_exception(ShuttingDown()).response()(scope, receive, send)
        else:
            with self._departure.answering():
                await self._app(scope, receive, send)

    def _refuses(self, path: str) -> bool:
        if path == "/ready":
            return self._departure.leaves
        return path != "/health" and not self._departure.takes_stragglers
