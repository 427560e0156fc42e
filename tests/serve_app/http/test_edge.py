from __future__ import annotations

import logging
import re

import httpx
import pytest
import ray.exceptions
from fastapi import FastAPI
from starlette.testclient import TestClient

from serve_app.http.disconnects import Disconnects
from serve_app.http.edge import Edge
from tests.serve_app.conftest import KEY, Site
from tests.serve_app.text_backend import TextBackend

CALL = {"model": "text", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("given", ["abc", "0f8fad5b-d9cb-469f-a165-70867728950e", "a" * 128])
def test_a_sane_request_id_is_echoed(http: httpx.Client, given: str) -> None:
    for path in ("/health", "/nowhere", "/v1/models"):
        assert http.get(path, headers={"X-Request-ID": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a b", "a" * 129, "<script>", "é", 'a"b'])
def test_another_request_id_is_replaced(http: httpx.Client, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given.encode()}
    got = {http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(got) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", value) for value in got)


@pytest.mark.parametrize("streamed", [True, False])
def test_every_answer_carries_one_id(
    http: httpx.Client, backend: TextBackend, streamed: bool
) -> None:
    headers = {"X-Request-ID": "mine"}
    unauthorized = http.get("/v1/models", headers=headers | {"Authorization": "x"})
    good = http.post("/v1/chat/completions", json=CALL | {"stream": streamed}, headers=headers)
    backend.crash_after = 0
    bad = http.post("/v1/chat/completions", json=CALL | {"stream": streamed}, headers=headers)
    assert [reply.status_code for reply in (unauthorized, good, bad)] == [401, 200, 500]
    for reply in (unauthorized, good, bad):
        assert reply.headers.get_list("x-request-id") == ["mine"]


def test_a_request_id_is_never_an_engine_id(http: httpx.Client, backend: TextBackend) -> None:
    http.post("/v1/chat/completions", json=CALL, headers={"X-Request-ID": "mine"})
    assert "mine" not in backend.generations[0].request_id


def test_an_unplanned_failure_is_logged_and_not_told(
    http: httpx.Client, backend: TextBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.crash_after = 0
    with caplog.at_level(logging.ERROR, "serve_app"):
        reply = http.post("/v1/chat/completions", json=CALL)
    assert reply.json()["error"] == {
        "message": "The server failed while it processed the request.",
        "type": "server_error",
        "param": None,
        "code": "server_error",
    }
    assert "secret internals" in caplog.text


def test_the_tag_can_be_left_to_a_proxy() -> None:
    app = FastAPI()
    app.add_middleware(Edge, tag=False)
    reply = TestClient(app).get("/", headers={"X-Request-ID": "mine"})
    assert "x-request-id" not in reply.headers


def test_a_failure_in_the_middle_of_a_body_cuts_the_connection() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        raise KeyError

    with pytest.raises(KeyError):
        TestClient(Edge(broken)).get("/")


async def test_a_client_that_leaves_while_it_sends_its_body_is_no_failure(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve cancels what reads the body."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {KEY}".encode()),
        ],
    }
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent = []

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        raise ray.exceptions.TaskCancelledError

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await Disconnects(site.app)(scope, receive, send)  # type: ignore[arg-type]
    assert sent == []
    assert caplog.records == []
