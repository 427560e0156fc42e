"""How benchmarks ask a server: a streamed answer of a known length, by the openai client, once or
as a flood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from openai import AsyncOpenAI
from openai.types import Completion


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: int
    """As the server counted them."""
    first_s: float
    """Seconds from the request to the first of its events that has text ..."""
    last_s: float
    """... and to the last."""


async def stream(
    client: AsyncOpenAI,
    model: str,
    prompt: str | list[int],
    tokens: int,
    notice: Callable[[Completion], None] = lambda event: None,
    **options: Any,
) -> Answer:
    """Stream an answer of exactly `tokens` tokens. `notice` sees its events as they come."""
    started = time.perf_counter()
    events = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **options,
    )
    produced, first_s, last_s = 0, 0.0, 0.0
    async for event in events:
        notice(event)
        if event.choices and event.choices[0].text:
            last_s = time.perf_counter() - started
            first_s = first_s or last_s
        if event.usage is not None:
            produced = event.usage.completion_tokens
    return Answer(produced, first_s, last_s)


class Flood:
    """A tenant that always has as many requests open. A context manager: its end cuts them off."""

    def __init__(
        self,
        base_url: str,
        key: str,
        open_requests: int,
        ask: Callable[[AsyncOpenAI, int], Awaitable[Answer]],
    ) -> None:
        """`ask` is told the turn, which each of the open requests begins with another number."""
        self.finished: list[tuple[float, Answer]] = []
        """Answers and the time of their end."""
        self._client = AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
        self._ask, self._count = ask, open_requests

    async def __aenter__(self) -> Flood:
        self._tasks = [asyncio.create_task(self._loop(first)) for first in range(self._count)]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Raises what a request has failed with."""
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _loop(self, first: int) -> None:
        for turn in count(first):
            answer = await self._ask(self._client, turn)
            self.finished.append((time.monotonic(), answer))
