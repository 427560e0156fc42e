"""How benchmarks ask a server: a streamed answer of a known length, by the openai client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: int
    """As the server counted them."""
    first_s: float
    """Seconds from the request to the first of its events that has text."""


async def stream(
    client: AsyncOpenAI, model: str, prompt: str | list[int], tokens: int, **options: Any
) -> Answer:
    """Stream an answer of exactly `tokens` tokens."""
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
    produced, first_s = 0, 0.0
    async for event in events:
        if event.choices and event.choices[0].text and not first_s:
            first_s = time.perf_counter() - started
        if event.usage is not None:
            produced = event.usage.completion_tokens
    return Answer(produced, first_s)
