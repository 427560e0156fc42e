from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import Request

from router.tenant import Tenant
from serve_app.http.body import LARGE_BYTES, MAX_WAITING, Bodies, parse
from serve_app.protocol.backend import Refused
from serve_app.protocol.errors import ApiError
from serve_app.protocol.requests import ChatRequest, CompletionRequest
from tests.serve_app.conftest import LIMITS, Site

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": "text", "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"str"',
        b"null",
        b"123",
        b"{}",
        b"",
        b"{",
        b"\xff",
        b'{"model": "\xff"}',
        b'{"model": "text", "messages": ' + b"[" * 100_000 + b"}",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b"\xef\xbb\xbf" + GOOD,
        GOOD + b"x",
        GOOD[:-1] + b', "n": 1' + b"0" * 10_000 + b"}",
        b"\x00",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    """C28."""
    for path in (CHAT, "/v1/completions"):
        reply = http.post(path, content=body, headers=JSON)
        assert reply.status_code == 400
        assert len(reply.content) <= 4096
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_of_a_repeated_key_the_last_counts(http: httpx.Client) -> None:
    """C28."""
    body = b'{"model": "nobody", ' + GOOD[1:]
    assert http.post(CHAT, content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_read_whatever_its_parameters(http: httpx.Client, kind: str) -> None:
    """C28."""
    assert http.post(CHAT, content=GOOD, headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_refused(http: httpx.Client, kind: str | None) -> None:
    """C28."""
    headers = {} if kind is None else {"Content-Type": kind}
    reply = http.post(CHAT, content=GOOD, headers=headers)
    assert reply.status_code == 415
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(http: httpx.Client, announced: bool) -> None:
    body = b" " * LIMITS.max_body_bytes + GOOD

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    reply = http.post(CHAT, content=body if announced else chunks(), headers=JSON)
    assert reply.status_code == 413
    assert (
        reply.json()["error"]["message"]
        == f"The body is larger than {LIMITS.max_body_bytes} bytes."
    )


def test_a_body_of_the_largest_size_is_read(http: httpx.Client) -> None:
    body = b" " * (LIMITS.max_body_bytes - len(GOOD)) + GOOD
    assert http.post(CHAT, content=body, headers=JSON).status_code == 200


def test_a_compressed_body_is_refused_in_these_words(http: httpx.Client) -> None:
    reply = http.post(
        CHAT, content=gzip.compress(GOOD), headers=JSON | {"Content-Encoding": "gzip"}
    )
    assert reply.status_code == 415
    assert "compressed" in reply.json()["error"]["message"]
    plain = http.post(CHAT, content=GOOD, headers=JSON | {"Content-Encoding": "identity"})
    assert plain.status_code == 200


def many(item: str, count: int) -> str:
    return ", ".join([item] * count)


MESSAGE = '"messages": [{"role": "user", "content": "hi"}]'
BACKSLASH = json.dumps("\\")
NAMES = ", ".join(f'"{number}": 1' for number in range(300_000))
HOSTILE = {
    "biases": MESSAGE + ', "logit_bias": {' + NAMES + "}",
    "unknown": MESSAGE + ", " + NAMES,
    "numbers": MESSAGE + ', "chat_template_kwargs": {"a": [' + many("1", 1_100_000) + "]}",
    "tools": MESSAGE + ', "tools": [' + many("{}", 400_000) + "]",
    "calls": '"messages": [{"role": "assistant", "tool_calls": [' + many("{}", 400_000) + "]}]",
    "lists": MESSAGE + ', "x": [' + many("[]", 400_000) + "]",
    "strings": MESSAGE + ', "x": [' + many('"a"', 400_000) + "]",
    "escaped": MESSAGE + f', "x": {BACKSLASH}, "y": [' + many(BACKSLASH, 300_000) + "]",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_nothing_is_built_of_a_body_that_holds_too_much(
    monkeypatch: pytest.MonkeyPatch, http: httpx.Client, body: str
) -> None:
    """It would hold the event loop for seconds, and everybody's streams with it."""
    built = []
    monkeypatch.setattr(ChatRequest, "model_validate_json", lambda *_, **__: built.append(1))
    reply = http.post(CHAT, content=f'{{"model": "text", {body}}}', headers=JSON)
    assert reply.status_code == 400
    assert "holds more than" in reply.json()["error"]["message"]
    assert not built


def arguments(text: str) -> str:
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    return json.dumps({"role": "assistant", "tool_calls": [call]})


def test_strings_that_are_json_again_have_one_allowance() -> None:
    """Arguments of calls, and a schema: each by itself is small."""
    turn = arguments(json.dumps({"a": [[]] * 60_000}))
    parse(ChatRequest, f'{{"model": "text", "messages": [{many(turn, 2)}]}}'.encode())
    with pytest.raises(ApiError, match="holds too many values"):
        parse(ChatRequest, f'{{"model": "text", "messages": [{many(turn, 3)}]}}'.encode())
    schema = json.dumps(json.dumps({"enum": [[]] * 160_000}))
    with pytest.raises(ApiError, match="guided_json: holds too many values"):
        parse(ChatRequest, f'{{"model": "text", {MESSAGE}, "guided_json": {schema}}}'.encode())


@pytest.mark.parametrize(
    "body",
    [
        MESSAGE + ', "tools": [' + many("1", 100) + "]",
        '"messages": [{"role": "assistant", "tool_calls": [' + many("1", 300_000) + "]}]",
        MESSAGE + ', "stop_token_ids": [' + many("1.5", 300_000) + "]",
    ],
    ids=["tools", "calls", "stops"],
)
def test_of_a_list_that_is_wrong_the_first_fault_is_told(http: httpx.Client, body: str) -> None:
    """Not one for each item, which took 6 s."""
    reply = http.post(CHAT, content=f'{{"model": "text", {body}}}', headers=JSON)
    assert reply.status_code == 400
    assert ";" not in reply.json()["error"]["message"]


def test_large_bodies_that_mean_something_are_read(http: httpx.Client) -> None:
    """As agents send them: long histories full of code, and many tools."""
    properties = {f"p{i}": {"type": "string", "description": "a, b: [c]"} for i in range(99)}
    function = {"parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function | {"name": f"f{i}"}} for i in range(128)]
    content = [{"type": "text", "text": '{"a": [1, 2]}' * 20}]
    messages = [{"role": "user", "content": content}] * 2048
    body = json.dumps({"model": "text", "messages": messages, "tools": tools})
    parse(ChatRequest, body.encode())
    ids = {"model": "text", "prompt": [[7] * 4096] * 128}
    parse(CompletionRequest, json.dumps(ids).encode())


async def test_one_tenants_large_bodies_keep_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def slow(kind: object, body: bytes) -> str:
        time.sleep(0.02)
        order.append(body[:1].decode())
        return ""

    monkeypatch.setattr("serve_app.http.body.parse", slow)
    bodies = Bodies(1 << 20)

    await asyncio.gather(*(read(bodies, "a") for _ in range(10)), read(bodies, "b"))
    assert order.index("b") <= 1


async def read(bodies: Bodies, tenant: str) -> None:
    """A large body of the tenant's."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": tenant.encode() * (LARGE_BYTES + 1)}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "headers": headers, "state": {"tenant": Tenant(id=tenant)}}
    await bodies.read(Request(scope, receive), ChatRequest)


async def test_too_many_large_bodies_of_one_tenant_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each lies in memory until it is read."""
    go_on = threading.Event()
    monkeypatch.setattr("serve_app.http.body.parse", lambda kind, body: go_on.wait(10))
    bodies = Bodies(1 << 20)
    many = [asyncio.create_task(read(bodies, "a")) for _ in range(MAX_WAITING + 3)]
    await asyncio.sleep(0.05)
    other = asyncio.create_task(read(bodies, "b"))
    go_on.set()
    results = await asyncio.gather(*many, other, return_exceptions=True)
    refused = [type(result) for result in results if result is not None]
    assert refused == [Refused, Refused]
    assert results[-1] is None


def test_a_flood_of_hostile_bodies_holds_up_nobody(site: Site, http: httpx.Client) -> None:
    """Behind one of these, /health took seconds."""
    body = f'{{"model": "text", {HOSTILE["biases"]}}}'.encode()

    def attack() -> int:
        return httpx.post(
            site.url + CHAT, content=body, headers=JSON | dict(http.headers), timeout=30
        ).status_code

    with ThreadPoolExecutor(8) as threads:
        attacks = [threads.submit(attack) for _ in range(8)]
        waits = []
        while not all(one.done() for one in attacks):
            started = time.monotonic()
            assert http.get("/health").status_code == 200
            waits.append(time.monotonic() - started)
        assert {one.result() for one in attacks} == {400}
    assert sorted(waits)[len(waits) // 2] < 0.2
