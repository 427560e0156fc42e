"""How long a client waits: the limit that a request sets itself, and signs of life meanwhile."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from tests.serve_app.conftest import Site
from tests.serve_app.sse import events, texts
from tests.serve_app.streams import chat
from tests.serve_app.text_backend import TextBackend


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_may_limit_its_own_time(
    http: httpx.Client, site: Site, backend: TextBackend, streamed: bool
) -> None:
    """Before the first byte it is a status, and nothing runs on."""
    backend.delay_s = 5
    reply = http.post(
        "/v1/chat/completions",
        json=chat("hello", stream=streamed),
        headers={"X-Request-Timeout": "0.05"},
    )
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "timeout"
    site.wait_until_idle(0.5)
    assert backend.outcomes == {"cancelled": 1}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_time_runs_while_a_model_is_waited_for(
    http: httpx.Client,
    backend: TextBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    streamed: bool,
) -> None:
    """Where none of its replicas runs, one has to start first."""

    async def never() -> None:
        await asyncio.sleep(30)

    monkeypatch.setattr(backend, "model", never)
    body = chat("hello", stream=streamed, prompt="hello")
    reply = http.post(path, json=body, headers={"X-Request-Timeout": "0.05"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")


def test_time_that_ends_within_a_stream_is_an_error_event(
    http: httpx.Client, site: Site, backend: TextBackend
) -> None:
    backend.delay_s = 0.03
    reply = http.post(
        "/v1/chat/completions",
        json=chat("a" * 50, stream=True),
        headers={"X-Request-Timeout": "0.3"},
    )
    assert reply.status_code == 200
    *chunks, last = events(reply.text)
    assert last["error"]["code"] == "timeout"
    assert 0 < len(texts(chunks)[0]) < 50
    site.wait_until_idle(0.5)


def test_a_request_that_is_in_time_is_not_disturbed(http: httpx.Client) -> None:
    headers = {"X-Request-Timeout": "30"}
    for streamed in (False, True):
        body = chat("hello", stream=streamed)
        assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "1e9"])
def test_a_time_must_be_a_number_of_seconds(http: httpx.Client, value: str) -> None:
    headers = {"X-Request-Timeout": value}
    reply = http.post("/v1/chat/completions", json=chat("hello"), headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("fails", [False, True])
def test_a_silent_stream_is_kept_alive(
    http: httpx.Client, backend: TextBackend, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """By comments, which clients skip. What fails after one is an error event."""
    monkeypatch.setattr("serve_app.http.answers.KEEP_ALIVE_S", 0.02)
    backend.delay_s = 0.11
    backend.fail_after = 0 if fails else None
    reply = http.post("/v1/chat/completions", json=chat("a", stream=True))
    assert reply.status_code == 200
    blocks = reply.text.split("\n\n")
    comments = [block for block in blocks if block == ": keep-alive"]
    assert 3 <= len(comments) <= 14
    assert blocks[0] == ": keep-alive"
    rest = events(reply.text.replace(": keep-alive\n\n", ""))
    assert rest[-1] == "[DONE]" if not fails else rest[-1]["error"]["code"] == "engine_failure"


def test_the_client_skips_comments(
    client: openai.OpenAI, backend: TextBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.http.answers.KEEP_ALIVE_S", 0.02)
    backend.delay_s = 0.05
    chunks = client.chat.completions.create(**chat("hello"), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "hello"
