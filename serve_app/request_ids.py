"""X-Request-ID as it reaches Serve: short and plain, or Serve draws one.

Serve writes the header into its logs and back to the client, whatever it holds. It asks the
function that `VARIABLE` names in its environment for layers around its own, in proxies and behind
HAProxy. The module imports next to nothing: each proxy does it, too.
"""

from __future__ import annotations

import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.arrivals import NoteArrival

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
LAYERS = "serve_app.request_ids:layers"
HEADER = b"x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def is_sane(request_id: bytes) -> bool:
    """Up to 128 letters, digits and marks that mean nothing in a log or a page."""
    return _SANE.fullmatch(request_id) is not None


class CleanRequestId:
    """ASGI middleware: takes the header away unless there is one, and that is sane."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        given = [value for name, value in headers if name.lower() == HEADER]
        if given and not (len(given) == 1 and is_sane(given[0])):
            kept = [pair for pair in headers if pair[0].lower() != HEADER]
            scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)


def layers() -> list[Middleware]:
    """What Serve puts around its own layers."""
    return [Middleware(CleanRequestId), Middleware(NoteArrival)]
