"""Notices an engine that has work and schedules none of it, which only a fault can cause.

It is told how many steps were launched and knows nothing else of the engine. A step that takes
long, or a device that hangs, is seen from outside the process instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STALL_S = 5.0


class EngineStalled(RuntimeError):
    """There is work, and nothing was scheduled for `STALL_S`. The engine is to be replaced."""


class Watchdog:
    """Is asked after each turn of the step loop."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._steps = -1
        self._moved_at = time.monotonic()

    def check(self, steps: int, state: Callable[[], object], *, busy: bool) -> None:
        """Raises EngineStalled, with what `state` says of the engine."""
        now = time.monotonic()
        if steps != self._steps or not busy:
            self._steps, self._moved_at = steps, now
        elif now - self._moved_at > self._stall_s:
            raise EngineStalled(f"nothing was scheduled for {self._stall_s:.0f} s: {state()}")
