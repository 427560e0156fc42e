"""How a process learns that it is to go, and how an ingress behaves from then on.

Serve tells nobody but those who call: a process that drains can be called by its name no more.
So it calls itself. The module knows neither what the process does nor Ray's handles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
from ray.serve.exceptions import ReplicaUnavailableError
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.backend import ShuttingDown
from serve_app.errors import from_exception

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.5
"""How often a process should look."""
CALL_TIMEOUT_S = 0.4
LEAVE_EARLY_S = 3.0
"""Before the grace ends: that much earlier what still runs is given up. Serve's clock starts
earlier than ours, and word has to get out before it kills this process."""
STRAGGLERS_S = 1.0
"""Proxies learn of a removal at slightly different times: so long a new request is welcome."""


class Departure:
    """Whether this process is being removed. Used from one event loop."""

    def __init__(self, call_self: Callable[[], Awaitable[object]], grace_s: float) -> None:
        """`call_self` raises ReplicaUnavailableError where Serve does not route to this process.

        grace_s: how long Serve lets a process live that it has told to stop.
        """
        self.routed = False
        """Serve routes new work here: not before this process is up, nor while it leaves."""
        self.answers = 0
        """That clients still wait for."""
        self._call_self = call_self
        self._stay_s = grace_s - min(LEAVE_EARLY_S, grace_s / 2)
        self._noticed_at: float | None = None
        self._dismissed = False

    @property
    def leaves(self) -> bool:
        """It is being removed."""
        return self._noticed_at is not None

    @property
    def takes_stragglers(self) -> bool:
        """It is not, or not for long. Where the whole service ends, nobody takes them."""
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

    async def look(self) -> None:
        """Find out; to be called every `LOOK_PERIOD_S`."""
        routed = await self._is_routed()
        if routed and not self._dismissed:
            self._noticed_at = None
        elif self.routed and self._noticed_at is None:
            self._noticed_at = time.monotonic()
        self.routed = routed

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - (self._noticed_at or 0.0)

    async def _is_routed(self) -> bool:
        try:
            with anyio.fail_after(CALL_TIMEOUT_S):
                await self._call_self()
        except ReplicaUnavailableError:
            return False
        except TimeoutError:  # Serve does not know this process yet, or the machine is busy.
            return self.routed
        except Exception as error:
            logger.warning("This process cannot call itself: %r", error)
            return self.routed
        return True


def log_no_call_to_self(method: str) -> None:
    """Serve logs each call of a method: twice a second, that would bury what matters."""
    logs = logging.getLogger("ray.serve")
    logs.addFilter(lambda record: not record.getMessage().startswith(f"CALL {method} OK"))


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
