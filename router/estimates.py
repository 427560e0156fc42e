"""What is likely, from what happened lately: how much a request produces, how long it runs.

Nothing is decided by these alone: they order the queue, size KV room and fill Retry-After.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

_GAIN = 1 / 16
_KEPT = 32
_GUESSED_S = 1.0
"""GPU time of a request before any has told its own."""


@dataclass(slots=True)
class _Recent:
    """Exponentially weighted means of about the last 16 requests, and their outputs."""

    output_tokens: float = 0.0
    """Begins with a guess, or with the first request."""
    duration_s: float = 0.0
    gpu_s: float = 0.0
    outputs: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Lengths of the last answers."""

    def add(self, output_tokens: int, duration_s: float, gpu_s: float) -> None:
        if not self.outputs:
            self.duration_s, self.gpu_s = duration_s, gpu_s
            self.output_tokens = self.output_tokens or output_tokens
        self.output_tokens += (output_tokens - self.output_tokens) * _GAIN
        self.duration_s += (duration_s - self.duration_s) * _GAIN
        self.gpu_s += (gpu_s - self.gpu_s) * _GAIN
        self.outputs.append(output_tokens)


class Estimates:
    """Means per tenant, with those of the whole pool for tenants that are new."""

    def __init__(self, expected_output: int) -> None:
        self._pool = _Recent(expected_output)
        self._tenants: dict[str, _Recent] = {}

    def finished(
        self, tenant: str, output_tokens: int, duration_s: float, gpu_s: float = 0.0
    ) -> None:
        """A request ran to its end, `duration_s` after it was granted; its share of GPUs' time
        was `gpu_s`."""
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Recent()
        own.add(output_tokens, duration_s, gpu_s)
        self._pool.add(output_tokens, duration_s, gpu_s)

    def output(self, tenant: str, max_tokens: int) -> int:
        """Output tokens to expect of a request, at least 1 and at most `max_tokens`."""
        mean = self._tenants.get(tenant, self._pool).output_tokens
        return max(min(max_tokens, ceil(mean)), 1)

    def high_output(self, tenant: str, max_tokens: int) -> int:
        """Output that nine of ten requests stay within, at least 1 and at most `max_tokens`."""
        outputs = sorted(self._tenants.get(tenant, self._pool).outputs)
        if not outputs:
            return self.output(tenant, max_tokens)
        return max(min(max_tokens, outputs[len(outputs) * 9 // 10]), 1)

    def duration(self, tenant: str) -> float:
        """Seconds that a request of the tenant runs; 0 before any has ended."""
        return self._tenants.get(tenant, self._pool).duration_s

    def gpu_s(self, tenant: str, expected: int) -> float:
        """GPU time, in seconds, that a request of so many output tokens takes."""
        recent = self._tenants.get(tenant, self._pool)
        if not recent.gpu_s:
            return _GUESSED_S
        return recent.gpu_s * expected / max(recent.output_tokens, 1.0)
