"""How benchmarks ask a server: a streamed answer of a known length, by the openai client."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def stream_tokens(
    client: AsyncOpenAI, model: str, prompt: str | list[int], tokens: int, **options: Any
) -> int:
    """Stream an answer of exactly `tokens` tokens. Returns how many the server counted."""
    events = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **options,
    )
    produced = 0
    async for event in events:
        if event.usage is not None:
            produced = event.usage.completion_tokens
    return produced
