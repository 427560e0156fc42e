"""What becomes of a rate limit while nothing is used: it refills evenly within a minute."""

from __future__ import annotations

from router.messages import RateLimit


def after(passed_s: float, told: RateLimit | None, limit: int | None) -> RateLimit | None:
    """What a rate of `limit` has come to since it was told; unused if it never was."""
    if limit is None:
        return None
    if told is None or told.limit != limit:
        return RateLimit(limit, limit, 0.0)
    return left(passed_s, told)


def left(passed_s: float, told: RateLimit | None) -> RateLimit | None:
    """What a rate has come to since it was told."""
    if told is None:
        return None
    limit, reset_s = told.limit, max(told.reset_s - passed_s, 0.0)
    return RateLimit(limit, max(min(int(limit - reset_s * limit / 60), limit), 0), reset_s)
