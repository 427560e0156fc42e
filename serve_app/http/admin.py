"""What administrators may read: `GET /admin/tenants`, `/admin/requests`, each of both by its id,
`/admin/usage`, `/admin/scaling`; and do: `POST /admin/tenants/ID/pause` and `.../resume`,
`DELETE /admin/requests/ID`, `POST /admin/trace`.

ASGI middleware around the application: exactly these paths are its own, and only a key for
administrators opens them. Where there is no such key, they do not exist. It shows no API key
and no digest.
"""

from __future__ import annotations

import csv
import io
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.cost import Cost, UsageReport, gpu_dollars, gpu_seconds
from router.messages import Outcome
from router.pricing import MICRO
from router.store import SUMS, UsageRow, gpu_micros
from serve_app.http import timeline
from serve_app.http.auth import bearer_key, unauthorized
from serve_app.protocol.errors import ApiError, from_exception, invalid

DAY_S = 86_400
NO_TENANT = "There is no such tenant."

Handler = Callable[..., Awaitable[Response]]

TenantStates = Callable[[str | None], Awaitable[list[dict[str, Any]]]]
Scaling = Callable[[], Awaitable[dict[str, Any]]]
Requests = Callable[[str | None], Awaitable[list[dict[str, Any]]]]
Request = Callable[[str], Awaitable[list[dict[str, Any]]]]
Pause = Callable[[str, bool], Awaitable[bool]]
Stop = Callable[[str], Awaitable[int]]
Usage = Callable[[float, float, str | None], Awaitable[UsageReport]]

COUNTS = [
    name for name in SUMS if name not in ("micro_dollars", *(gpu_micros(each) for each in Outcome))
]
COLUMNS = ["hour", "tenant", "model", *COUNTS, "dollars", "gpu_seconds", "gpu_dollars"]


class AdminApi:
    """Answers for its own paths, and lets everything else through."""

    def __init__(
        self,
        app: ASGIApp,
        is_admin: Callable[[str], bool],
        tenants: TenantStates,
        usage: Usage,
        scaling: Scaling,
        requests: Requests,
        request: Request,
        pause: Pause,
        stop: Stop,
        trace: timeline.Trace,
    ) -> None:
        """tenants: of all, or one. requests: what waits and runs. request: what is known of an id,
        whether it is over or not. pause: a tenant, or with False resumes it; False if there is
        none. stop: a request; returns how many sequences that ends."""
        self._app, self._is_admin = app, is_admin
        self._tenants, self._usage, self._scaling = tenants, usage, scaling
        self._requests, self._request, self._pause, self._stop = requests, request, pause, stop
        self._routes: list[tuple[str, dict[str, Handler]]] = [
            ("/admin/tenants", {"GET": self._list_tenants}),
            ("/admin/tenants/(.+)/(pause|resume)", {"POST": self._pause_tenant}),
            ("/admin/tenants/(.+)", {"GET": self._show_tenant}),
            ("/admin/requests", {"GET": self._list_requests}),
            (
                "/admin/requests/(.+)",
                {"GET": self._show_request, "DELETE": self._stop_request},
            ),
            ("/admin/usage", {"GET": self._list_usage}),
            ("/admin/scaling", {"GET": self._list_scaling}),
            ("/admin/trace", {"POST": partial(timeline.answer, trace)}),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        found = self._find(path) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        handlers, parts = found
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            if not self._is_admin(bearer_key(Headers(scope=scope)) or ""):
                raise unauthorized()
            if method not in handlers:
                allow = {"Allow": ", ".join(handlers)}
                raise ApiError(405, "This URL does not allow the method.", headers=allow)
            response = await handlers[method](QueryParams(scope["query_string"]), *parts)
        except Exception as error:
            response = from_exception(error).response()
        await response(scope, receive, send)

    def _find(self, path: str) -> tuple[dict[str, Handler], tuple[str, ...]] | None:
        """Who handles which method, and what of the path it is about."""
        for pattern, handlers in self._routes:
            if (match := re.fullmatch(pattern, path)) is not None:
                return handlers, match.groups()
        return None

    async def _list_tenants(self, query: QueryParams) -> Response:
        return _json({"data": await self._tenants(None)})

    async def _show_tenant(self, query: QueryParams, tenant: str) -> Response:
        for state in await self._tenants(tenant):
            return _json(state)
        raise ApiError(404, NO_TENANT)

    async def _show_request(self, query: QueryParams, name: str) -> Response:
        if found := await self._request(name):
            return _json({"data": found})
        raise ApiError(404, "No request of that id waits, runs, or is among those that ended last.")

    async def _list_requests(self, query: QueryParams) -> Response:
        return _json({"data": await self._requests(query.get("tenant"))})

    async def _pause_tenant(self, query: QueryParams, tenant: str, verb: str) -> Response:
        if not await self._pause(tenant, verb == "pause"):
            raise ApiError(404, NO_TENANT)
        return _json({"id": tenant, "paused": verb == "pause"})

    async def _stop_request(self, query: QueryParams, name: str) -> Response:
        sequences = await self._stop(name)
        if not sequences:
            raise ApiError(404, "No such request waits or runs.")
        return _json({"id": name, "sequences": sequences})

    async def _list_scaling(self, query: QueryParams) -> Response:
        return _json(await self._scaling())

    async def _list_usage(self, query: QueryParams) -> Response:
        now = time.time()
        end = _moment(query, "to", now)
        start = _moment(query, "from", end - DAY_S)
        report = await self._usage(start, end, query.get("tenant"))
        rows = [_told(row, report.dollars_per_hour) for row in report.rows]
        match query.get("format", "json"):
            case "json":
                told: dict[str, Any] = {"from": start, "to": end, "data": rows}
                if "tenant" not in query:  # the cost is that of all together
                    told["cost"] = _told_cost(report.cost)
                return _json(told)
            case "csv":
                return _csv(rows)
        raise invalid("format must be json or csv", "format")


def _moment(query: QueryParams, name: str, default: float) -> float:
    """Unix seconds, or a date or time of ISO 8601, in UTC unless it says otherwise."""
    text = query.get(name)
    if text is None:
        return default
    try:
        try:
            seconds = float(text)
        except ValueError:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
            aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
            seconds = aware.timestamp()
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise invalid(f"{name} must be a Unix time, or a date or time of ISO 8601", name)
    return seconds


def _told(row: UsageRow, dollars_per_hour: float | None) -> dict[str, Any]:
    """By the names in `COLUMNS`: what the tenant pays, then what it cost us."""
    hour = datetime.fromtimestamp(row.hour, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    seconds = gpu_seconds(row)
    return {
        "hour": hour,
        "tenant": row.tenant,
        "model": row.model,
        **{name: row.sums[name] for name in COUNTS},
        "dollars": row.sums["micro_dollars"] / MICRO,
        "gpu_seconds": seconds,
        "gpu_dollars": gpu_dollars(seconds, dollars_per_hour),
    }


def _told_cost(cost: Cost) -> dict[str, Any]:
    """The cost of all tenants together, even if one was asked about: idle GPUs belong to nobody."""
    return {
        "gpu_seconds": cost.gpu_seconds,
        "gpu_dollars": cost.dollars,
        "good_responses": cost.good_responses,
        "gpu_dollars_per_good_response": cost.dollars_per_good_response,
    }


def _csv(rows: Sequence[dict[str, Any]]) -> Response:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return Response(text.getvalue(), media_type="text/csv")


def _plain(value: Any) -> Any:
    """A name that a spreadsheet would take for a formula is quoted."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" else value


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
