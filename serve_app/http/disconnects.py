"""Clients that hang up, as Serve tells of them.

A request whose client is gone is cancelled in Serve's proxy, and whoever reads its body then gets
Ray's error for that. ASGI has a message for it. The module knows nothing else of requests.
"""

from __future__ import annotations

from ray.exceptions import TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Disconnects:
    """ASGI middleware outside all others that read bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_disconnect, send)
