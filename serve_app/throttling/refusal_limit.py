"""Limits how many refused requests one sender may cause, by a token bucket beside all quotas.

A request that ends with a 4xx has taken time that everybody shares, and no quota counts it. Once
a bucket is empty nothing more is read of who it belongs to. Buckets are those of this process. The
module knows neither keys nor routes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.messages import RateLimit
from router.rate import Bucket
from serve_app.protocol.errors import ApiError, retry_after
from serve_app.throttling.tarpit import Tarpit

BYTES_PER_UNIT = 16 * 1024
"""Of a body that was read; a refusal costs one unit besides."""
NOT_THEIR_FAULT = frozenset({403, 429})
"""These do not: a quota has counted already what a client tries too early, and a tenant that an
administrator has paused can do nothing about it."""
MAX_PAYERS = 10_000
"""Who has not been refused for the longest time is forgotten."""

Payer = tuple[str, str]
"""A kind, and a name: tenants and addresses do not mix."""


class RefusalLimit:
    """One token bucket for each payer (a tenant or an address)."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._buckets: OrderedDict[Payer, Bucket] = OrderedDict()
        self._tarpit = Tarpit(clock)

    async def serve(
        self, payer: Payer, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run `app`, and charge `payer` if it refuses; or refuse at once.

        `scope["state"]["refusals"]` holds what is left, a `RateLimit`, once there are any. An app
        that sets `scope["state"]["checked"]` has found nothing to refuse: a client that is gone
        then pays nothing.
        """
        state = scope.setdefault("state", {})
        if bucket := self._buckets.get(payer):
            state["refusals"] = left = _left(bucket, self._clock())
            if left.remaining < 1:
                await self._tarpit.hold(payer)
                wait_s = bucket.wait_s(1.0, self._clock())
                await _too_many(wait_s).response()(scope, receive, send)
                return
        meter = _Meter(receive)

        async def charged(message: Message) -> None:
            if message["type"] == "http.response.start":
                meter.answered = True
                if 400 <= message["status"] < 500:
                    self._charge(
                        payer, meter.units + (message["status"] not in NOT_THEIR_FAULT), state
                    )
                    await self._tarpit.hold(payer)
            await send(message)

        try:
            await app(scope, meter.receive, charged)
        except (asyncio.CancelledError, ClientDisconnect):
            if not meter.answered and not state.get("checked"):
                self._charge(payer, meter.units + 1, state)
            raise

    def _charge(self, payer: Payer, units: int, state: dict[str, object]) -> None:
        """What many do at once becomes a debt, of one minute at most."""
        if units:
            bucket, now = self._bucket(payer), self._clock()
            bucket.take(min(units, bucket.level(now) + bucket.limit))
            state["refusals"] = _left(bucket, now)

    def _bucket(self, payer: Payer) -> Bucket:
        bucket = self._buckets.pop(payer, None) or Bucket(self._limit, self._clock())
        self._buckets[payer] = bucket
        if len(self._buckets) > MAX_PAYERS:
            self._buckets.popitem(last=False)
        return bucket


class _Meter:
    """How much of a body was read, and whether an answer began."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._bytes = receive, 0
        self.answered = False

    @property
    def units(self) -> int:
        return self._bytes // BYTES_PER_UNIT

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        return message


def _left(bucket: Bucket, now: float) -> RateLimit:
    level = max(int(bucket.level(now)), 0)
    return RateLimit(bucket.limit, level, bucket.wait_s(bucket.limit, now))


def _too_many(wait_s: float) -> ApiError:
    message = "Too many requests were refused. Nothing more is read until some time has passed."
    return ApiError(429, message, code="too_many_refusals", headers=retry_after(wait_s))
