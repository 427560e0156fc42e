"""`POST /admin/trace`: a timeline of the next steps of one engine. `fairstream-trace` calls it.

The module knows neither engines nor how a timeline is made.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.datastructures import QueryParams
from starlette.responses import Response

from replica.messages import MAX_TRACED_S, MAX_TRACED_STEPS
from serve_app.protocol.errors import ApiError, invalid

STEPS, SECONDS = 200, 10.0
"""By default."""
Trace: TypeAlias = Callable[[str | None, str | None, int, float], Awaitable[tuple[str, bytes]]]
"""Of a model, or any; of a replica, or the busiest; so many steps; for so many seconds at most."""
ERRORS = {
    "busy": (409, "This replica is being traced already."),
    "unknown": (404, "There is no such replica."),
    "failed": (500, "The engine could not be traced. Its log says why."),
}


async def answer(trace: Trace, query: QueryParams) -> Response:
    """Raises ApiError."""
    steps, seconds = _steps(query), _seconds(query)
    outcome, compressed = await trace(query.get("model"), query.get("replica"), steps, seconds)
    if outcome in ERRORS:
        raise ApiError(*ERRORS[outcome], code=f"trace_{outcome}")
    headers = {"Content-Encoding": "gzip"}
    return Response(compressed, headers=headers, media_type="application/json")


def _steps(query: QueryParams) -> int:
    text = query.get("steps", str(STEPS))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= MAX_TRACED_STEPS:
        raise invalid(f"steps must be a whole number from 1 to {MAX_TRACED_STEPS}", "steps")
    return int(text)


def _seconds(query: QueryParams) -> float:
    try:
        seconds = float(query.get("seconds", SECONDS))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TRACED_S:
        raise invalid(f"seconds must be a number up to {MAX_TRACED_S:g}", "seconds")
    return seconds
