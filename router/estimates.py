"""What is likely, from what happened lately: how much a request produces, how long it runs.

Nothing is decided by these alone: they order the queue, size KV room and fill Retry-After.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

_GAIN = 1 / 16
_KEPT = 32


@dataclass(slots=True)
class RunningMean:
    """Exponentially weighted mean of about the last 16 values; None before the first."""

    value: float | None = None

    def add(self, sample: float) -> None:
        if self.value is None:
            self.value = sample
        else:
            self.value += (sample - self.value) * _GAIN


@dataclass(slots=True)
class _Recent:
    output_tokens: RunningMean = field(default_factory=RunningMean)
    duration_s: RunningMean = field(default_factory=RunningMean)
    outputs: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Lengths of the last answers."""


class Estimates:
    """Means per tenant, with those of the whole pool for tenants that are new."""

    def __init__(self, expected_output: int) -> None:
        self._pool = _Recent(output_tokens=RunningMean(expected_output))
        self._tenants: dict[str, _Recent] = {}

    def finished(self, tenant: str, output_tokens: int, duration_s: float) -> None:
        """A request ran to its end, `duration_s` after it was granted."""
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Recent()
        for recent in (own, self._pool):
            recent.output_tokens.add(output_tokens)
            recent.duration_s.add(duration_s)
            recent.outputs.append(output_tokens)

    def output(self, tenant: str, max_tokens: int) -> int:
        """Output tokens to expect of a request, at least 1 and at most `max_tokens`."""
        mean = self._tenants.get(tenant, self._pool).output_tokens.value or 0.0
        return max(min(max_tokens, ceil(mean)), 1)

    def high_output(self, tenant: str, max_tokens: int) -> int:
        """Output that nine of ten requests stay within, at least 1 and at most `max_tokens`."""
        outputs = sorted(self._tenants.get(tenant, self._pool).outputs)
        if not outputs:
            return self.output(tenant, max_tokens)
        return max(min(max_tokens, outputs[len(outputs) * 9 // 10]), 1)

    def duration(self, tenant: str) -> float:
        """Seconds that a request of the tenant runs; 0 before any has ended."""
        return self._tenants.get(tenant, self._pool).duration_s.value or 0.0
