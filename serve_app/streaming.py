"""HTTP answers that end when the client hangs up, or when the time is over that it has given.

Starlette stops a streaming answer when its client is gone, and no other: a plain call would
run to its end for nobody. Here both are watched, from before the first token on. The module
does not know what the answers say.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.errors import ApiError, from_exception, invalid
from serve_app.replies import error_event

T = TypeVar("T")

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400
KEEP_ALIVE_S = 10.0
"""A stream that has nothing to tell for this long sends a comment: proxies give silent ones up."""
KEEP_ALIVE = b": keep-alive\n\n"


class PlainAnswer(Response):
    """One JSON body, computed when the answer is sent, within `timeout_s` if that is given."""

    def __init__(
        self, compute: Callable[[], Awaitable[bytes]], timeout_s: float | None = None
    ) -> None:
        super().__init__()
        self._compute = compute
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await unless_disconnected(receive, self._run())
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _run(self) -> bytes:
        with _within(self._timeout_s):
            return await self._compute()


class EventStream(Response):
    """Server-sent events, all of them within `timeout_s` if that is given.

    The status is sent with the first event, so what fails before it is answered by a status of
    its own, unless that takes so long that a comment was sent. A later failure becomes an error
    event, after which the stream ends: without [DONE], since clients take its absence, and
    nothing else, for an incomplete answer.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], timeout_s: float | None = None) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._timeout_s = timeout_s
        self._sending = asyncio.Lock()
        self._sent_at: float | None = None
        """When the last bytes were sent; None before the status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        comments = asyncio.create_task(self._send_comments(send))
        try:
            with _within(self._timeout_s):
                async with aclosing(self._events) as events:
                    async for event in events:
                        await self._send(send, event)
        except Exception as error:
            if self._sent_at is None:
                raise
            await self._send(send, error_event(from_exception(error).body()))
        finally:
            comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        began = time.monotonic()
        while True:
            silent_s = time.monotonic() - (self._sent_at or began)
            if silent_s >= KEEP_ALIVE_S:
                await self._send(send, KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(KEEP_ALIVE_S - silent_s)

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._sending:
            if self._sent_at is None:
                self._sent_at = time.monotonic()
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
            self._sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})


@contextmanager
def _within(timeout_s: float | None) -> Iterator[None]:
    """Raises ApiError if the block takes longer, and cancels what it awaits."""
    with anyio.move_on_after(timeout_s) as scope:
        yield
    if scope.cancelled_caught:
        message = "The time that the request has given itself is over."
        raise ApiError(504, message, param=TIMEOUT_HEADER, code="timeout")


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


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and awaited if the client hangs up first.

    Raises ClientDisconnect then. The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait((task, watch))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
