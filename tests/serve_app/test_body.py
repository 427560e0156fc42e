from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import httpx
import pytest

from tests.serve_app.conftest import LIMITS

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
