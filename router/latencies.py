"""How long clients waited for tokens, request by request, until it is read.

Knows neither tenants' promises nor what becomes of the numbers.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from router.messages import Ending

MOST_KEPT = 100_000
"""Where nobody takes them."""


class Latency(NamedTuple):
    """The waits of one request that had a first token, however it ended. In seconds."""

    model: str
    tenant: str
    first_token_s: float
    """From its arrival, the wait for a place included."""
    token_s: float | None
    """Mean time between later tokens; None where there is one only."""


class Latencies:
    """The latencies since the last `take`."""

    def __init__(self) -> None:
        self._new: deque[Latency] = deque(maxlen=MOST_KEPT)

    def add(self, ending: Ending) -> None:
        first, last = ending.first_token_s, ending.last_token_s
        if first is None or last is None:
            return
        gaps = ending.produced - 1
        mean = (last - first) / gaps if gaps > 0 else None
        self._new.append(Latency(ending.request.model, ending.request.tenant, first, mean))

    def take(self) -> list[Latency]:
        latencies = list(self._new)
        self._new.clear()
        return latencies
