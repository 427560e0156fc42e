"""Which web pages may call this API from a browser, and what their scripts may read.

The module knows no routes; what it adds to an answer does not depend on who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

EXPOSED = (
    "X-Request-ID",
    "Retry-After",
    *(
        f"x-ratelimit-{kind}-{unit}"
        for unit in ("refusals", "requests", "tokens")
        for kind in ("limit", "remaining", "reset")
    ),
)
"""Headers of answers that scripts may read beside the few that any may."""


def cross_origin(origins: Sequence[str]) -> tuple[Middleware, ...]:
    """The outermost layer, where there are such pages: what a browser asks before a call carries
    no key, and a refusal, too, has to be readable. No cookies are at stake: who calls has a key."""
    if not origins:
        return ()
    layer = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),  # clients send several of their own
        expose_headers=EXPOSED,
    )
    return (layer,)
