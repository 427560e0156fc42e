"""What is left of a tenant's rates, on every answer that it gets.

ASGI middleware outside all others. It knows no routes, and whose answer it is only from what
authentication and `serve_app.throttling.refusal_limit` have left in the scope.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.messages import RateLimit, RateLimits
from router.tenant import Tenant

LimitsOf = Callable[[Tenant], RateLimits]


class RateHeaders:
    """Adds `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, as OpenAI names them, and the
    same for refusals, to whoever has had any; a rate without a limit has none."""

    def __init__(self, app: ASGIApp, limits_of: LimitsOf) -> None:
        self._app, self._limits_of = app, limits_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            state = scope.get("state", {})
            if message["type"] == "http.response.start":
                headers, refusals = MutableHeaders(scope=message), state.get("refusals")
                _add(headers, "refusals", refusals)
                if "tenant" in state:
                    limits = self._limits_of(state["tenant"])
                    _add(headers, "requests", _least(limits.requests, refusals))
                    _add(headers, "tokens", limits.tokens)
            await send(message)

        await self._app(scope, receive, tell)


def _least(rate: RateLimit | None, refusals: RateLimit | None) -> RateLimit | None:
    """What is left whatever becomes of the requests: none after too many refusals."""
    if rate is None or refusals is None or refusals.remaining >= rate.remaining:
        return rate
    return RateLimit(rate.limit, refusals.remaining, max(rate.reset_s, refusals.reset_s))


def _add(headers: MutableHeaders, unit: str, rate: RateLimit | None) -> None:
    if rate is not None:
        headers[f"x-ratelimit-limit-{unit}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(rate.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = duration(rate.reset_s)


def duration(seconds: float) -> str:
    """As OpenAI writes one: "0s", "20ms", "7s", "1m30s"; rounded up."""
    if seconds < 1:
        milliseconds = math.ceil(seconds * 1000)
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
