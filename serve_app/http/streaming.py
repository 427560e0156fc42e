"""HTTP answers that end when the client hangs up.

Starlette stops a streaming answer when its client is gone, and no other: a plain call would
run to its end for nobody. Here both are watched, from before the first token on. The module
does not know what the answers say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.http.deadline import within
from serve_app.http.replies import error_event
from serve_app.protocol.errors import from_exception
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import timing_comment

T = TypeVar("T")


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
        with within(self._timeout_s):
            return await self._compute()


class EventStream(Response):
    """Server-sent events.

    The status is sent with the first event, so what fails before it is answered by a status of
    its own. A later failure becomes an error event, after which the stream ends: without [DONE],
    since clients take its absence, and nothing else, for an incomplete answer.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._send(send, event)
        except Exception as error:
            if not self._begun:
                raise
            told = records.current().error = from_exception(error)
            await self._send(send, error_event(told.body()))
        record = records.current()
        timing = timing_comment(record.breakdown.so_far()) if record.wants_timing else b""
        await send({"type": "http.response.body", "body": timing, "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": data, "more_body": True})


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
