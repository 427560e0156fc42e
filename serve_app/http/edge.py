"""The outermost layer: each answer carries a request id, and none is a bare traceback.

ASGI middleware that knows neither routes nor tenants.
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.protocol.errors import from_exception
from serve_app.request_ids import is_sane


class Edge:
    """Last resort for exceptions, and the header X-Request-ID.

    The client's id is echoed if it is short and plain, and replaced otherwise. Behind a proxy
    that adds the header by itself, as Ray Serve's does, pass `tag=False`; `serve_app.request_ids`
    does the same there.
    """

    def __init__(self, app: ASGIApp, tag: bool = True) -> None:
        self._app = app
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sender = _Sender(send, _request_id(scope) if self._tag else None)
        try:
            await self._app(scope, receive, sender)
        except ClientDisconnect:
            return
        except Exception as error:
            if sender.started:
                raise
            await from_exception(error).response()(scope, receive, sender)


class _Sender:
    """`send` that adds the header and remembers whether the answer has begun."""

    def __init__(self, send: Send, request_id: str | None) -> None:
        self._send = send
        self._request_id = request_id
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if self._request_id is not None:
                MutableHeaders(scope=message)["X-Request-ID"] = self._request_id
        await self._send(message)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "").encode("latin-1")
    return given.decode() if is_sane(given) else uuid.uuid4().hex
