"""Through Serve's own layers."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter

from ray.serve._private.http_util import _apply_middlewares, validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import arrivals
from serve_app.arrivals import arrived_at
from serve_app.request_ids import LAYERS
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase
from serve_app.telemetry.records import Records, RequestRecord

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}


async def nothing() -> Message:
    await asyncio.sleep(10)
    return {}


async def ignore(message: Message) -> None:
    await asyncio.sleep(0)


def layered(app: ASGIApp) -> ASGIApp:
    layers = validate_http_proxy_callback_return(call_function_from_import_path(LAYERS))
    made: ASGIApp = _apply_middlewares(app, layers)
    return made


async def test_what_serve_does_before_it_calls_the_application_is_in_the_requests_time() -> None:
    noted: list[RequestRecord] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with records.current().sequence(prompt_tokens=1):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.05)
        across = pickle.loads(pickle.dumps(scope))  # to another process of this machine
        await Records(app, Counter(), observe=noted.append)(across, receive, send)

    began = time.perf_counter()
    await layered(serve)(dict(SCOPE), nothing, ignore)
    wall_s = time.perf_counter() - began
    [record] = noted
    assert record.breakdown.seconds[Phase.READ] >= 0.05
    assert 0 <= wall_s - sum(record.breakdown.seconds.values()) < 0.01


async def test_what_is_done_behind_the_last_word_is_not() -> None:
    noted: list[RequestRecord] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with records.current().sequence(prompt_tokens=1):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            await asyncio.sleep(0.05)

    await Records(app, Counter(), observe=noted.append)(dict(SCOPE), nothing, ignore)
    assert sum(noted[0].breakdown.so_far().values()) < 0.05


async def test_another_machines_clock_is_not_believed() -> None:
    """Nor a client's, who cannot write into the scope."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    await layered(app)(dict(SCOPE), nothing, ignore)
    [scope] = seen
    assert arrived_at(scope) is not None
    _, at = scope[arrivals.KEY]
    assert arrived_at({arrivals.KEY: ("another", at)}) is None
    assert arrived_at(SCOPE) is None
    assert arrived_at({arrivals.KEY: (arrivals.CLOCK, at + 1000)}) is None  # as in a container
