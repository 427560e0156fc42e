"""The time limit that a request sets for itself, waiting included.

The module does not know what is done in that time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from starlette.datastructures import Headers

from serve_app.protocol.errors import ApiError, invalid

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400


def timeout_of(headers: Headers) -> float | None:
    """Seconds that a request gives itself. Raises ApiError for what is no such number."""
    value = headers.get(TIMEOUT_HEADER)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        message = f"{TIMEOUT_HEADER} must be seconds, more than 0 and at most {MAX_TIMEOUT_S}"
        raise invalid(message, TIMEOUT_HEADER)
    return seconds


class TimeLimit:
    """What a request has left of its time, which runs from now on. Raises as `timeout_of`."""

    def __init__(self, headers: Headers) -> None:
        timeout_s = timeout_of(headers)
        self._ends = None if timeout_s is None else anyio.current_time() + timeout_s

    @property
    def left_s(self) -> float | None:
        """None for no limit; negative once it is over."""
        return None if self._ends is None else self._ends - anyio.current_time()


@contextmanager
def within(timeout_s: float | None) -> Iterator[None]:
    """Raises ApiError if the block takes longer, and cancels what it awaits."""
    with anyio.move_on_after(timeout_s) as scope:
        yield
    if scope.cancelled_caught:
        message = "The time that the request has given itself is over."
        raise ApiError(504, message, param=TIMEOUT_HEADER, code="timeout")
