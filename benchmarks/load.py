"""Keeps streams open against a server, from a process of its own, so that several can ask at once.

`python -m benchmarks.load URL MODEL KEY STREAMS PROMPT OUTPUT SECONDS`: STREAMS completions are
open at all times, each of OUTPUT tokens on average behind PROMPT random ones. Prints those that
ended, as JSON: when (of the monotonic clock), how many tokens, seconds to the first and the last.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from openai import AsyncOpenAI

from benchmarks.client import Answer, Flood, stream

IDS = range(1000, 40_000)
"""Of plain tokens."""


def length(output: int) -> int:
    """Half of it to one and a half: were all as long, all would end in the same steps."""
    return random.randint(output // 2, output + output // 2)


async def ask(client: AsyncOpenAI, model: str, prompt: int, output: int) -> Answer:
    ids = random.choices(IDS, k=prompt)
    return await stream(client, model, ids, length(output), temperature=1)


async def main() -> None:
    url, model, key, *numbers = sys.argv[1:]
    streams, prompt, output, seconds = map(int, numbers)
    async with Flood(url, key, streams, lambda client, _: ask(client, model, prompt, output)) as on:
        await asyncio.sleep(seconds)
    json.dump([[end, a.tokens, a.first_s, a.last_s] for end, a in on.finished], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
