"""`/dashboard`, a page that shows what the server does now, `GET /admin/live`, which it reads, and
`GET /admin/doctor?seconds=10`, which says what limits the server.

The page and what belongs to it are files that hold no data, so anybody may have them. The figures
are for administrators: the page asks for the key and shows it to nobody but this server. The module
does not know which figures there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.http.auth import bearer_key, unauthorized
from serve_app.http.streaming import EventStream, unless_disconnected
from serve_app.protocol.errors import ApiError, from_exception, invalid, retry_after
from serve_app.telemetry.live import LiveFigures, NoFigures, TooManyViewers

PAGE, LIVE, DOCTOR = "/dashboard", "/admin/live", "/admin/doctor"
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""No script but ours runs on the page, and it calls no other server."""
RETRY_S = 10.0
SECONDS, LEAST_S, MOST_S = 10.0, 9.0, 30.0
"""How long the doctor watches."""


class _File(NamedTuple):
    content: bytes
    type: str
    tag: str

    def response(self, known: str | None) -> Response:
        """known: tag of what the browser has."""
        headers = HEADERS | {"ETag": self.tag}
        if known == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.type)


class LivePage:
    """ASGI middleware: exactly these paths are its own."""

    def __init__(self, app: ASGIApp, is_admin: Callable[[str], bool], figures: LiveFigures) -> None:
        self._app, self._is_admin, self._figures = app, is_admin, figures
        self._files = _load()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_ours = path in (LIVE, DOCTOR) or path == f"{PAGE}/" or path in self._files
        if scope["type"] != "http" or not is_ours:
            await self._app(scope, receive, send)
            return
        try:
            if path in (LIVE, DOCTOR):
                await self._show(path, scope, receive, send)
            else:
                await self._file(path, scope)(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            await from_exception(error).response()(scope, receive, send)

    def _file(self, path: str, scope: Scope) -> Response:
        _allow(scope, "GET", "HEAD")
        if path not in self._files:
            return RedirectResponse(f"..{PAGE}")  # what it names lies beside it
        return self._files[path].response(Headers(scope=scope).get("if-none-match"))

    async def _show(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before anything is sent."""
        if not self._is_admin(bearer_key(Headers(scope=scope)) or ""):
            raise unauthorized()
        _allow(scope, "GET")
        try:
            if path == DOCTOR:
                await self._diagnose(scope, receive, send)
                return
            with self._figures.viewing() as events:
                await EventStream(events)(scope, receive, send)
        except TooManyViewers:
            message = "As many as may look at once do."
            raise ApiError(
                503, message, code="too_many_viewers", headers=retry_after(RETRY_S)
            ) from None
        except NoFigures:
            message = "Nothing can be read of what the server does now."
            raise ApiError(503, message, headers=retry_after(RETRY_S)) from None

    async def _diagnose(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = _seconds(QueryParams(scope["query_string"]).get("seconds"))
        found = await unless_disconnected(receive, self._figures.diagnosis(seconds))
        response = Response(msgspec.json.encode(found), media_type="application/json")
        await response(scope, receive, send)


def _seconds(text: str | None) -> float:
    """Raises ApiError."""
    try:
        seconds = SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_S <= seconds <= MOST_S:
        message = f"'seconds' must be a number from {LEAST_S:g} to {MOST_S:g}."
        raise invalid(message, "seconds")
    return seconds


def _allow(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        allow = {"Allow": methods[0]}
        raise ApiError(405, "This URL does not allow the method.", headers=allow)


def _load() -> dict[str, _File]:
    """By path."""
    found = {}
    for file in files(__package__).joinpath("dashboard").iterdir():
        content = file.read_bytes()
        path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        found[path] = _File(content, TYPES[file.name.rpartition(".")[2]], tag)
    return found
