"""Holds back refusals of a sender who is refused many times a second.

To refuse costs little, but a client that asks again at once, on many connections, makes it a large
part of a core that others need. So beyond a rate the answers take turns, and each waits for a
second at most: such a client gets no more of them than the rate allows, or one a second on each of
its connections. The module knows neither keys nor routes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

PER_S, BURST = 50, 50
"""Refusals of one sender that are answered as soon as may be, in a second and together."""
MAX_WAIT_S = 1.0
MAX_HELD = 500
"""Of all senders. What comes beyond is answered at once."""
MAX_SENDERS = 10_000
"""Who has not been refused for the longest time is forgotten."""


class Tarpit:
    """A virtual queue for each sender: the generic cell rate algorithm (ITU-T I.371)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: OrderedDict[Hashable, float] = OrderedDict()
        """When the next refusal would be answered if none could come early."""
        self._held = 0

    async def hold(self, sender: Hashable) -> None:
        """Return when a refusal may be sent."""
        wait_s = self._wait_s(sender)
        if wait_s <= 0 or self._held >= MAX_HELD:
            return
        self._held += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._held -= 1

    def _wait_s(self, sender: Hashable) -> float:
        now = self._clock()
        due = max(self._due.pop(sender, now), now)
        wait_s = min(due - now - BURST / PER_S, MAX_WAIT_S)
        self._due[sender] = min(due, now + BURST / PER_S + MAX_WAIT_S) + 1 / PER_S
        if len(self._due) > MAX_SENDERS:
            self._due.popitem(last=False)
        return wait_s
