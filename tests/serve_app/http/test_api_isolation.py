"""What one tenant has prepared holds up nobody else, and is bounded. Over real HTTP."""

from __future__ import annotations

import asyncio
import random
import string
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from router.tenant import Tenant, Tenants, digest
from serve_app.http.models import Offer
from serve_app.http.parameters import MAX_PROMPT_LOGPROBS
from serve_app.http.replies import EventWriter, Reply
from serve_app.protocol.errors import ApiError
from serve_app.protocol.limits import Limits
from serve_app.text import chat
from tests.serve_app.asking import CHAT, TEXT, refused, text
from tests.serve_app.conftest import Site, serve_offers
from tests.serve_app.text_backend import TextBackend, byte_tokenizer

VICTIM, ATTACKER, METERED = "sk-victim", "sk-attacker", "sk-metered"
TENANTS = Tenants(
    tenants=[
        Tenant(id="victim", keys=[digest(VICTIM)]),
        Tenant(id="attacker", keys=[digest(ATTACKER)]),
        Tenant(id="metered", keys=[digest(METERED)], requests_per_minute=2),
    ]
)
LIMITS = Limits(max_body_bytes=2_000_000)
CONTEXT = 1_000_000
LONG = "".join(random.Random(1).choices(string.ascii_letters + " .,;0123", k=700_000))


def site_of(tokenizer: PreTrainedTokenizerFast, context: int) -> Iterator[Site]:
    backend = TextBackend(delay_s=0.005)
    backend.model_ = replace(backend.model_, max_model_len=context, vocab_size=50_000)
    with serve_offers([Offer("text", backend, tokenizer)], LIMITS, TENANTS) as site:
        yield site


@pytest.fixture(scope="module")
def large_site(smollm2: PreTrainedTokenizerFast) -> Iterator[Site]:
    yield from site_of(smollm2, CONTEXT)


@pytest.fixture(scope="module")
def small_site() -> Iterator[Site]:
    yield from site_of(byte_tokenizer(), 2000)


def calls(site: Site, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=site.url, headers=headers, timeout=60)


class Watch:
    """A victim: a stream, and somebody who asks /health. Their longest waits, in seconds."""

    def __init__(self, site: Site) -> None:
        self.gap = self.health = 0.0
        self._site, self._over = site, False

    async def __aenter__(self) -> Watch:
        self._client = calls(self._site, VICTIM)
        self._begun = asyncio.Event()
        self._tasks = [asyncio.create_task(self._stream()), asyncio.create_task(self._probe())]
        await self._begun.wait()
        await asyncio.sleep(0.1)
        self.gap = self.health = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _stream(self) -> None:
        body = text(max_tokens=5_000, ignore_eos=True, stream=True)
        async with self._client.stream("POST", TEXT, json=body) as events:
            last = None
            async for _ in events.aiter_bytes():
                now = time.monotonic()
                self.gap, last = max(self.gap, now - (last or now)), now
                self._begun.set()
                if self._over:
                    return

    async def _probe(self) -> None:
        while not self._over:
            began = time.monotonic()
            assert (await self._client.get("/health")).status_code == 200
            self.health = max(self.health, time.monotonic() - began)
            await asyncio.sleep(0.02)


def held_by(tokenizer: PreTrainedTokenizerFast) -> float:
    """Seconds for which the long text stops everything if the lock is not released: on this
    machine, as busy as it is."""
    began = time.monotonic()
    tokenizer.backend_tokenizer.encode(LONG, add_special_tokens=False)
    return time.monotonic() - began


async def test_streams_and_probes_go_on_while_long_texts_are_tokenised(
    large_site: Site, smollm2: PreTrainedTokenizerFast
) -> None:
    turns = {"model": "text", "messages": [{"role": "user", "content": LONG}]}
    async with calls(large_site, ATTACKER) as attacker, Watch(large_site) as watch:
        bodies: list[dict[str, Any]] = [text(prompt=LONG), turns] * 2
        replies = await asyncio.gather(*(attacker.post("/tokenize", json=b) for b in bodies))
        counts = [reply.text.rpartition('"count":')[2].partition(",")[0] for reply in replies]
    assert counts[0] == counts[2]
    assert counts[1] == counts[3]
    bound = held_by(smollm2) / 2
    assert watch.gap < bound
    assert watch.health < bound


async def test_a_text_that_cannot_fit_is_refused_for_less_than_its_tokens_cost(
    smollm2: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    real = chat.encoded

    def noted(tokenizer: Any, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return real(tokenizer, text, **options)

    monkeypatch.setattr(chat, "encoded", noted)
    encoder = chat.PromptEncoder(smollm2)
    with pytest.raises(ApiError, match="more than 8000 tokens"):
        await encoder.text(LONG[:600_000], 8000)
    assert sum(encoded) < 40_000
    fits = " " * 200_000  # few tokens of many characters
    assert len(await encoder.text(fits, 8000)) < 8000


async def test_tokenising_counts_against_the_rate_of_requests(small_site: Site) -> None:
    async with calls(small_site, METERED) as client:
        assert (await client.post("/tokenize", json=text())).status_code == 200
        body = {"model": "text", "tokens": [104, 105]}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": "hi"}
        for path in ("/tokenize", "/detokenize"):
            reply = await client.post(path, json=text())
            assert refused(reply, 429)["message"] == "The limit of 2 requests a minute is reached."
            assert 1 <= int(reply.headers["Retry-After"]) <= 30


async def test_what_tokenising_answers_is_bounded(small_site: Site) -> None:
    async with calls(small_site, VICTIM) as client:
        assert (await client.post("/tokenize", json=text(prompt="a" * 2000))).json()[
            "count"
        ] == 2000
        error = refused(await client.post("/tokenize", json=text(prompt="a" * 2001)))
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert "2001 tokens" in error["message"]
        body = {"model": "text", "tokens": [97] * 2000}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": "a" * 2000}
        body["tokens"] = [97] * 2001
        assert refused(await client.post("/detokenize", json=body))["param"] == "tokens"


async def test_text_of_tokens_is_bounded_in_bytes(
    large_site: Site, smollm2: PreTrainedTokenizerFast
) -> None:
    """One token may stand for many characters."""
    token = max(range(len(smollm2)), key=lambda token: len(smollm2.decode([token])))
    async with calls(large_site, VICTIM) as client:
        reply = await client.post(
            "/detokenize", json={"model": "text", "tokens": [token] * 100_000}
        )
        assert refused(reply)["param"] == "tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_many_log_probabilities_are_written_elsewhere(
    small_site: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads: set[str] = set()
    for kind, name in ((Reply, "whole"), (EventWriter, "pieces")):
        real = getattr(kind, name)

        def noted(*args: Any, real: Any = real) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return real(*args)

        monkeypatch.setattr(kind, name, noted)
    few = text(prompt="a" * 50, echo=True, logprobs=20, max_tokens=0, stream=stream)
    async with calls(small_site, VICTIM) as client:
        assert (await client.post(TEXT, json=few)).status_code == 200
        assert len(threads) == 1
        assert "log probabilities" not in str(threads)
        many = few | {"prompt": "a" * 1500}
        assert (await client.post(TEXT, json=many)).status_code == 200
    assert any("log probabilities" in thread for thread in threads)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prompt_logprobs": 20}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 20}, "prompt_logprobs"),
        (TEXT, {"echo": True, "logprobs": 20}, "logprobs"),
        (TEXT, {"echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        (TEXT, {"echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
    ],
)
async def test_log_probabilities_of_prompts_are_bounded(
    small_site: Site, path: str, fields: dict[str, Any], param: str
) -> None:
    """All prompts and choices together."""
    prompt = "a" * 1500
    long: dict[str, Any] = {"prompt": prompt}
    if path == CHAT:
        long = {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": "text", "n": 16, "max_tokens": 1, **long, **fields}
    async with calls(small_site, VICTIM) as client:
        before = len(small_site.backend.generations)
        error = refused(await client.post(path, json=body))
        assert error["param"] == param
        assert str(MAX_PROMPT_LOGPROBS) in error["message"]
        assert len(small_site.backend.generations) == before
        few = await client.post(path, json=body | {"n": 1})
        assert few.status_code == 200
