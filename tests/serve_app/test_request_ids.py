"""Through Serve's own layers."""

from __future__ import annotations

import httpx
import pytest
from ray.serve._private import constants
from ray.serve._private.http_util import (
    _apply_middlewares,
    validate_http_proxy_callback_return,
)
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Receive, Scope, Send

from serve_app.request_ids import LAYERS, VARIABLE


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """As a replica reads it, for its log."""
    body = dict(scope["headers"])[b"x-request-id"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def ask(*given: bytes) -> httpx.Response:
    layers = validate_http_proxy_callback_return(call_function_from_import_path(LAYERS))
    app = _apply_middlewares(echo, layers)
    headers = [(b"X-Request-ID", value) for value in given]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        return await client.get("http://fairstream/", headers=headers)


def test_serve_knows_the_variable() -> None:
    assert hasattr(constants, VARIABLE)


async def test_a_sane_id_reaches_log_and_client() -> None:
    reply = await ask(b"trace-1:2.3_4")
    assert reply.text == reply.headers["x-request-id"] == "trace-1:2.3_4"


@pytest.mark.parametrize(
    "given",
    [
        (b"x" * 60_000,),
        (b"id POST /v1/chat/completions 200 1.0ms",),
        (b"\xc3\xa9",),
        (b"",),
        (b"one", b"two"),
    ],
    ids=["long", "spaces", "letters", "empty", "two"],
)
async def test_another_is_replaced_before_anybody_reads_it(given: tuple[bytes, ...]) -> None:
    reply = await ask(*given)
    assert reply.headers.get_list("x-request-id") == [reply.text]
    assert len(reply.text) == 36
    assert reply.text.encode() not in given
