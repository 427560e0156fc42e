"""Why requests wait for a place, second by second: as Admission told of their tenant last.

What is told of a tenant holds for all that waits of it here, so a wait costs the same however many
there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from router.messages import HeldBack

ASKING = "asking"
"""Admission has not said why: it has not heard of the request yet, or does not answer."""


class Wait:
    """Of one tenant for one model, from when something of it waits here until nothing does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = 0
        self._clock, self._since, self._why = clock, clock(), ASKING
        self._seconds: dict[str, float] = {}

    def learn(self, why: HeldBack | None) -> None:
        """It is held back for that from now on."""
        self._count()
        self._why = ASKING if why is None else why.value

    def so_far(self) -> dict[str, float]:
        """Seconds by why."""
        self._count()
        return dict(self._seconds)

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Seconds by why, after `so_far` was that."""
        passed = {why: s - before.get(why, 0.0) for why, s in self.so_far().items()}
        return {why: seconds for why, seconds in passed.items() if seconds > 0}

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._why] = self._seconds.get(self._why, 0.0) + now - self._since
        self._since = now


class Waits:
    """Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self._clock = clock
        self._waits: dict[tuple[str, str], Wait] = {}
        """By model and tenant."""

    def learn(self, reasons: Mapping[str, Mapping[str, HeldBack]]) -> None:
        """By model and tenant; of whom nothing is said, nothing is known."""
        for (model, tenant), wait in self._waits.items():
            wait.learn(reasons.get(model, {}).get(tenant))

    @contextmanager
    def waiting(self, model: str, tenant: str) -> Iterator[Callable[[], dict[str, float]]]:
        """A request waits in this context. Gives a function: seconds until now, by why."""
        key = model, tenant
        wait = self._waits.setdefault(key, Wait(self._clock))
        wait.requests += 1
        before = wait.so_far()
        try:
            yield lambda: wait.since(before)
        finally:
            wait.requests -= 1
            if not wait.requests:
                del self._waits[key]
