from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

from serve_app.protocol.backend import Refused, Unavailable
from tests.serve_app.conftest import KEY, Site
from tests.serve_app.sse import events, texts
from tests.serve_app.streams import chat, completion, stream
from tests.serve_app.text_backend import TextBackend

ENDPOINTS = [("/v1/chat/completions", chat), ("/v1/completions", completion)]
TRICKY = ("A 日ab", "é́👩\u200d👩\u200d👧 한국어", "real \ufffd\ufffd here", "plain")


@pytest.mark.parametrize("per_delta", [1, 3])
@pytest.mark.parametrize("text", TRICKY)
def test_streamed_text_equals_plain_text(
    http: httpx.Client, backend: TextBackend, text: str, per_delta: int
) -> None:
    """C13, C14, R08."""
    backend.per_delta = per_delta
    for path, body in (("/v1/chat/completions", chat(text)), ("/v1/completions", completion(text))):
        plain = http.post(path, json=body).json()["choices"][0]
        assert (plain.get("text") or plain["message"]["content"]) == text
        assert texts(stream(http, path, body)) == {0: text}


@pytest.mark.parametrize("include", [True, False, None])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"max_tokens": 1}, {"max_tokens": 3, "n": 2}])
@pytest.mark.parametrize(("path", "make"), ENDPOINTS)
def test_usage_comes_once_and_last_if_asked_for(
    http: httpx.Client, path: str, make: Any, include: bool | None, more: dict[str, Any]
) -> None:
    """C17."""
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    body = make("hello") | more
    plain = http.post(path, json=body).json()
    *chunks, done = stream(http, path, body | options)
    assert done == "[DONE]"
    if include:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == plain["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


def test_usage_counts_each_prompt_once_and_every_token(
    http: httpx.Client, backend: TextBackend
) -> None:
    """C17. The stop token counts, though its text is not shown."""
    backend.cached_tokens = 2
    body = completion(["abc", "defgh"], n=2)
    assert http.post("/v1/completions", json=body).json()["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 2 * (4 + 6),
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("limit", "ending"), [(50, "stop"), (3, "length")])
def test_every_chunk_fits_the_schema(http: httpx.Client, n: int, limit: int, ending: str) -> None:
    """R11. One finish reason per choice, in its last chunk, alone; the role in its first only."""
    *chunks, _ = stream(http, "/v1/chat/completions", chat("hello", n=n, max_tokens=limit))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for index in range(n):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [ending]
        assert own[-1]["delta"] == {}
    assert texts(chunks) == dict.fromkeys(range(n), "hello"[:limit])
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def test_every_chunk_of_a_completion_fits_the_schema(http: httpx.Client) -> None:
    """R11."""
    *chunks, _ = stream(http, "/v1/completions", completion("hello", n=2, echo=True))
    reasons: dict[int, list[str | None]] = {0: [], 1: []}
    for chunk in chunks:
        choice = chunk["choices"][0]
        reasons[choice["index"]].append(choice["finish_reason"])
        # The SDK has one type for whole answers and chunks; only its reason may be null.
        whole = choice | {"finish_reason": choice["finish_reason"] or "stop"}
        Completion.model_validate(chunk | {"choices": [whole]}, strict=True)
    assert all(own == [None] * (len(own) - 1) + ["stop"] for own in reasons.values())
    assert texts(chunks) == {0: "hellohello", 1: "hellohello"}


def test_the_role_comes_with_the_first_token_and_not_before(
    http: httpx.Client, backend: TextBackend
) -> None:
    backend.delay_s = 0.1
    start = time.monotonic()
    with http.stream("POST", "/v1/chat/completions", json=chat("ab", stream=True)) as reply:
        assert time.monotonic() - start >= 0.1
        first = next(reply.iter_text())
    assert len(events(first)) == 2


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_stop_token_over_http(client: openai.OpenAI, skip: bool, include: bool) -> None:
    """C16."""
    flags = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    ids = [*b"injury.", 257]  # <pad>, which is no end of sequence by itself
    reply = client.completions.create(
        model="text",
        prompt=ids,
        max_tokens=50,
        extra_body={"stop_token_ids": [257], **flags},
    )
    assert reply.choices[0].text == ("injury.<pad>" if include and not skip else "injury.")
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_over_http(http: httpx.Client, streamed: bool, include: bool) -> None:
    body = chat("one END two", stop=["END", "zzz"], include_stop_str_in_output=include)
    if streamed:
        *chunks, _ = stream(http, "/v1/chat/completions", body)
        text, reason = texts(chunks)[0], chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("one END" if include else "one ", "stop")


@pytest.mark.parametrize("fault", ["fail_after", "end_silently_after", "crash_after"])
@pytest.mark.parametrize("deltas", range(1, len("hello") + 1))
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_after_the_first_byte_is_an_error_event(
    http: httpx.Client, client: openai.OpenAI, backend: TextBackend, fault: str, deltas: int, n: int
) -> None:
    """C19, R13, R20: no [DONE], no finish reason, nothing of the cause; behind any delta."""
    setattr(backend, fault, deltas)
    backend.delay_s = 0.001
    *chunks, error = stream(http, "/v1/chat/completions", chat("hello", n=n))
    assert error["error"]["type"] == "server_error"
    assert error["error"].keys() == {"message", "type", "param", "code"}
    assert not {"CUDA", "secret"} & set(json.dumps(error).replace('"', " ").split())
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert backend.running == 0
    assert backend.outcomes["succeeded"] == 0
    with pytest.raises(openai.APIError):
        for _ in client.chat.completions.create(**chat("hello", n=n), stream=True):
            pass


@pytest.mark.parametrize("streamed", [True, False])
def test_a_failure_before_the_first_byte_has_a_status(
    http: httpx.Client, backend: TextBackend, streamed: bool
) -> None:
    """R13, R23."""
    backend.fail_after = 0
    reply = http.post("/v1/chat/completions", json=chat("hello", stream=streamed))
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "CUDA" not in reply.text


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_refusal_has_a_status_and_retry_after(
    http: httpx.Client, backend: TextBackend, streamed: bool, n: int
) -> None:
    """R23, R40."""
    backend.refusal = Refused("Too many requests of this tenant.", 1.2)
    reply = http.post("/v1/chat/completions", json=chat("hello", stream=streamed, n=n))
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "2"
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"


def test_nothing_is_served_while_no_replica_is_ready(
    http: httpx.Client, backend: TextBackend
) -> None:
    """C35: 503 with Retry-After."""
    backend.unavailable = Unavailable(0.1)
    replies = [http.post("/v1/chat/completions", json=chat("x", stream=s)) for s in (True, False)]
    replies += [http.get("/ready"), http.get("/v1/models")]
    for reply in replies:
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "unavailable"
    assert http.get("/health").status_code == 200


def test_a_client_that_leaves_at_done_was_served(
    client: openai.OpenAI, backend: TextBackend
) -> None:
    """C20: the accounting is over before [DONE] is sent."""
    backend.settle_s = 0.3

    def read_ten_in_turn(_: int) -> None:
        for _ in range(10):
            for _ in client.chat.completions.create(**chat("hi"), stream=True):
                pass

    with ThreadPoolExecutor(10) as readers:
        list(readers.map(read_ten_in_turn, range(10)))
    assert backend.outcomes == {"succeeded": 100}


async def test_the_async_client_reads_many_streams_at_once(site: Site) -> None:
    site.backend.per_delta = 2

    async def read(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(**chat(text), stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=KEY) as client:
        wanted = [f"{index} 日本" for index in range(32)]
        assert await asyncio.gather(*(read(client, text) for text in wanted)) == wanted


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_hangs_up_ends_its_sequences(
    site: Site, streamed: bool, n: int
) -> None:
    """C32, C34, X2: at any moment, plain calls included; sequences that ended stay ended."""
    site.backend.delay_s = 0.01  # half a second for each sequence
    draw = random.Random(n)
    body = json.dumps(chat("a" * 30, stream=streamed, n=n, ignore_eos=True)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, port = site.url.removeprefix("http://").split(":")

    async def call_and_leave() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await asyncio.sleep(draw.uniform(0, 0.3))
        writer.close()

    await asyncio.gather(*(call_and_leave() for _ in range(100)))
    await asyncio.to_thread(site.wait_until_idle, 1.0)
    assert site.backend.outcomes.total() == len(site.backend.generations)
    assert site.backend.outcomes["cancelled"] > 10
    assert site.backend.outcomes["failed"] == 0


async def test_a_client_that_leaves_before_the_first_token_is_noticed(site: Site) -> None:
    """C32: a request may wait in the queue for long."""
    site.backend.delay_s = 30
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
        for streamed in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(
                    f"{site.url}/v1/chat/completions",
                    json=chat("x", stream=streamed),
                    timeout=0.1,
                )
    await asyncio.to_thread(site.wait_until_idle, 1.0)
    assert site.backend.outcomes == {"cancelled": 2}
