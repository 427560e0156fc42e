"""What one tenant, or somebody without a key, may send to stop all others: bounded, and to this
machine only.

`python -m benchmarks.attacks KIND URL KEY MODEL SECONDS ADDRESS` makes its bodies, prints a line,
sends them from a loopback ADDRESS for so long, and prints what came back as JSON: answers by
status, and how many of them cost their sender nothing. An empty KEY sends none. `burn` sends
nothing: it takes the processor time that an attack's client may take.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import socket
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp

Request: TypeAlias = tuple[str, str]
"""Path and body."""
Attack: TypeAlias = Callable[["Sender"], Coroutine[Any, Any, Counter[str]]]
UNCHARGED = "uncharged"
TOGETHER = 8
"""Requests open at a time."""
MANY_TOGETHER = 800
FLOOD_PER_S = 75
PATIENT = 19
"""Niceness: an attacker has a machine of its own, and takes no time of the server's."""
MAX_CONNECTIONS = 4200
"""More than HAProxy has room for by default."""
CHAT = '"messages": [{"role": "user", "content": "x"}]'


def parse(model: str, turn: int) -> Request:
    """Bodies of megabytes that mean nothing."""
    many = [
        '"logit_bias": {' + ",".join(f'"{i}": 1' for i in range(500_000)) + "}",
        '"chat_template_kwargs": {"a": [' + "1," * 3_000_000 + "1]}",
        '"tools": [' + "{}," * 2_000_000 + "{}]",
    ]
    return "/v1/chat/completions", f'{{"model": "{model}", {CHAT}, {many[turn % 3]}}}'


def tokenize(model: str, turn: int) -> Request:
    """Long texts in few words, and many tokens as a text."""
    letters = "".join(random.choices(string.ascii_letters, k=1_300_000))
    turns: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": letters}]}),
        ("/tokenize", {"prompt": letters * 3}),
        ("/detokenize", {"tokens": [46778] * 1_000_000}),
    ]
    path, body = turns[turn % 3]
    return path, json.dumps({"model": model, **body})


def grammar(model: str, turn: int) -> Request:
    """Small schemas that take long to compile, each another one."""
    hard = [
        {"type": "string", "pattern": f"(a|b)*a(a|b){{{8 + i % 5}}}c{i}x{turn}"} for i in range(100)
    ]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    return "/v1/chat/completions", json.dumps(
        {"model": model, **body, "guided_json": {"type": "string", "allOf": hard}}
    )


def logprobs(model: str, turn: int) -> Request:
    """Twenty alternatives of each of thousands of prompt tokens, as often as is allowed."""
    body = {"prompt": [turn % 1000, *range(1000, 3000)], "max_tokens": 1, "n": 11}
    return "/v1/completions", json.dumps({"model": model, **body, "prompt_logprobs": 20})


def refusals(model: str, turn: int) -> Request:
    """Far more requests than the tenant may make."""
    return "/v1/chat/completions", f'{{"model": "{model}", {CHAT}, "max_tokens": 1}}'


@dataclass(frozen=True)
class Sender:
    url: str
    key: str
    model: str
    seconds: float
    address: str
    """Of this machine, that it sends from."""

    async def send(self, requests: list[Request], together: int) -> Counter[str]:
        """These over and over, so many at a time. Returns answers by status."""
        until, answers = time.monotonic() + self.seconds, Counter[str]()
        turns = count()

        async def loop(client: aiohttp.ClientSession) -> None:
            while time.monotonic() < until:
                path, body = requests[next(turns) % len(requests)]
                await self.ask(client, path, body, answers)

        async with self.client() as client:
            with suppress(TimeoutError):  # who attacks leaves without the last answers
                async with asyncio.timeout(self.seconds):
                    await asyncio.gather(*(loop(client) for _ in range(together)))
        return answers

    async def flood(self, request: Request) -> Counter[str]:
        """Requests at a steady rate, whatever becomes of those before them."""
        answers, until = Counter[str](), time.monotonic() + self.seconds
        async with self.client() as client, asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                group.create_task(self.ask(client, *request, answers))
                await asyncio.sleep(1 / FLOOD_PER_S)
        return answers

    def client(self) -> aiohttp.ClientSession:
        """Its connections are as many as its open requests."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connector = aiohttp.TCPConnector(limit=0, local_addr=(self.address, 0))
        timeout = aiohttp.ClientTimeout(total=60)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)

    async def ask(
        self, client: aiohttp.ClientSession, path: str, body: str, answers: Counter[str]
    ) -> None:
        """Count the answer by its status."""
        try:
            async with client.post(self.url + path, data=body) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            answers[type(error).__name__] += 1
        else:
            answers[str(answer.status)] += 1
            answers[UNCHARGED] += not charged(answer)

    async def connect(self) -> Counter[str]:
        """Connections that send half a request, and then nothing."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_CONNECTIONS + 100,) * 2)
        server = urlsplit(self.url)
        opened: list[socket.socket] = []
        outcomes: Counter[str] = Counter()
        until = time.monotonic() + self.seconds
        while outcomes.total() < MAX_CONNECTIONS and time.monotonic() < until:
            try:
                made = socket.create_connection(
                    (server.hostname, server.port), 2, (self.address, 0)
                )
                made.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
                opened.append(made)
                outcomes["opened"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
        await asyncio.sleep(until - time.monotonic())
        for made in opened:
            made.close()
        return outcomes


def charged(answer: aiohttp.ClientResponse) -> bool:
    """Whether a bucket of its sender's had to pay for it, or nothing of what it may do is left."""
    rate = "requests" if answer.ok else "refusals"
    paid = answer.headers.get(f"x-ratelimit-reset-{rate}", "0s") != "0s"
    return paid or answer.status == 429


async def _burn(sender: Sender) -> Counter[str]:
    until = time.monotonic() + sender.seconds
    while time.monotonic() < until:
        pass
    return Counter()


def _sending(
    make: Callable[[str, int], Request], different: int, together: int = TOGETHER
) -> Callable[[str], Attack]:
    """Bodies are made once, beforehand."""

    def prepared(model: str) -> Attack:
        requests = [make(model, turn) for turn in range(different)]
        return lambda sender: sender.send(requests, together)

    return prepared


ATTACKS: dict[str, Callable[[str], Attack]] = {
    "parse": _sending(parse, 3),
    "tokenize": _sending(tokenize, 3),
    "grammar": _sending(grammar, 500),
    "logprobs": _sending(logprobs, 500),
    "refusals": _sending(refusals, 1),
    "connections": lambda model: Sender.connect,
}
"""What makes each, for a model."""
OTHERS: dict[str, Callable[[str], Attack]] = {
    "burn": lambda model: _burn,
    "flood": lambda model: lambda sender: sender.flood(refusals(model, 0)),
    "crowd": _sending(refusals, 1, MANY_TOGETHER),
}
"""No attacks of the isolation benchmark. `crowd`: refusals on more connections than are held."""


def main() -> None:
    kind, url, key, model, seconds, address = sys.argv[1:]
    if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"):
        sys.exit("only a server on this machine is attacked")
    os.nice(PATIENT)
    attack = (ATTACKS | OTHERS)[kind](model)
    print("ready", flush=True)
    answers = asyncio.run(attack(Sender(url, key, model, float(seconds), address)))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
