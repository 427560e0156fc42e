"""Who is asking: a bearer key per tenant, and no way in without one.

Default deny: the check stands before routing and lets nothing through but an explicit list of
paths, so a route added later is closed until somebody opens it. The module does not know what
the routes do, nor where keys are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.tenant import Tenant
from serve_app.protocol.errors import ApiError
from serve_app.throttling.refusal_limit import Payer, RefusalLimit

FindTenant: TypeAlias = Callable[[str | None], Tenant | None]
"""The tenant whose key this is, or the anonymous one where there is no key at all. It takes the
same time for any key that is not known."""

PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key: probes have none."""


class BearerAuth:
    """ASGI middleware that puts the tenant into `request.state.tenant`, or answers 401. What is
    refused costs `refusal_limit`: the tenant, or the address of who shows no key of one."""

    def __init__(self, app: ASGIApp, find_tenant: FindTenant, refusal_limit: RefusalLimit) -> None:
        self._app = app
        self._find_tenant = find_tenant
        self._refusal_limit = refusal_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_public(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        key = bearer_key(Headers(scope=scope))
        tenant = self._find_tenant(key) if key != "" else None
        app: ASGIApp = unauthorized().response()
        if tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
            app = self._app
        payer = _payer(scope, tenant if key else None)
        await self._refusal_limit.serve(payer, app, scope, receive, send)


def _payer(scope: Scope, tenant: Tenant | None) -> Payer:
    """Tenants who show no key are many clients, told apart by where they are."""
    if tenant is not None:
        return "tenant", tenant.id
    host, _ = scope.get("client") or ("", 0)
    return "address", host


def _is_public(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["type"] == "http" and path in PUBLIC_PATHS


def bearer_key(headers: Headers) -> str | None:
    """The presented key; None without the header, "" when there is no key in it, or several."""
    values = headers.getlist("authorization")
    if not values:
        return None
    if len(values) != 1:
        return ""
    scheme, _, key = values[0].partition(" ")
    return key.strip(" ") if scheme.lower() == "bearer" else ""


def unauthorized() -> ApiError:
    """One answer for a missing, malformed, unknown or expired key: it says nothing more."""
    return ApiError(
        401,
        "A valid API key is required.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
