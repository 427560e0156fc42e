"""`GET /metrics`: what Prometheus reads, for administrators and the addresses that they allow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.http.auth import bearer_key, unauthorized
from serve_app.protocol.errors import ApiError, from_exception

PATH = "/metrics"


class MetricsPage:
    """ASGI middleware that answers for one path."""

    def __init__(
        self,
        app: ASGIApp,
        is_admin: Callable[[str], bool],
        allowed: Sequence[IPv4Network | IPv6Network],
        text: Callable[[], Awaitable[bytes]],
    ) -> None:
        """allowed: who needs no key. text: what is answered."""
        self._app, self._is_admin, self._allowed, self._text = app, is_admin, allowed, text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path != PATH:
            await self._app(scope, receive, send)
            return
        try:
            if not self._may_read(scope):
                raise unauthorized()
            if scope["method"] not in ("GET", "HEAD"):
                allow = {"Allow": "GET"}
                raise ApiError(405, "This URL does not allow the method.", headers=allow)
            response = Response(await self._text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        except Exception as error:
            response = from_exception(error).response()
        await response(scope, receive, send)

    def _may_read(self, scope: Scope) -> bool:
        if self._is_admin(bearer_key(Headers(scope=scope)) or ""):
            return True
        host, _ = scope.get("client") or ("", 0)
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._allowed)
