"""A rate limit: so many units a minute, as a token bucket that holds a minute's worth.

A unit that is taken and given back costs nothing, although a full bucket takes no refill: the
level is never below what it would be without.
"""

from __future__ import annotations


class Bucket:
    """`limit` units a minute. All times come from one clock, in seconds."""

    __slots__ = ("_at", "_full", "_level", "_rate", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._rate = limit / 60
        self._full = self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        """Units there are; negative when more was used than was taken."""
        if now > self._at:
            level = self._level + (now - self._at) * self._rate
            self._level = level if level < self._full else self._full
            self._at = now
        return self._level

    def wait_s(self, need: float, now: float) -> float:
        """Seconds until `need` units are there, 0 when they are. Nothing above `limit` ever is."""
        deficit = need - (self.level(now) if now > self._at else self._level)
        return deficit / self._rate if deficit > 1e-6 else 0.0

    def take(self, units: float) -> None:
        """Take units, or give them back; call `level` first."""
        level = self._level - units
        self._level = level if level < self._full else self._full

    def lower(self, limit: int, reset_s: float, now: float) -> None:
        """Have no more than a bucket of `limit` units has that is full in `reset_s` seconds."""
        level = self.limit - reset_s * limit / 60
        self._level = min(self.level(now), level)

    def resize(self, limit: int, now: float) -> None:
        """Change the limit and keep what has been used."""
        used = self.limit - self.level(now)
        self.limit, self._rate, self._full = limit, limit / 60, float(limit)
        self._level = limit - used
