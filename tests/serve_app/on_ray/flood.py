"""Many long streams at once, each read to its end as bytes, so that reading costs little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tests.serve_app.on_ray.site import BULK_KEY, MODEL, Site


def bodies(greedy: int, seeded: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of so many tokens.

    The seeded ones draw between two tokens: a draw among hundreds falls on another one in every
    30,000th or so, since rounding depends on how many rows a step has.
    """
    common = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
    return [common | {"prompt": f"{n}, please: ", "temperature": 0.0} for n in range(greedy)] + [
        common | {"prompt": f"draw {n}: ", "temperature": 1.0, "top_k": 2, "seed": n}
        for n in range(seeded)
    ]


@dataclass
class Stream:
    """One request on its way."""

    body: dict[str, Any]
    data: bytes = b""
    longest_gap_s: float = 0.0
    """Between two pieces that arrived."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """All but the last, which must say that the answer is whole."""
        assert self.data.endswith(b"data: [DONE]\n\n"), self.data[-300:]
        return self.told[:-1]

    @property
    def told(self) -> list[dict[str, Any]]:
        """Comments aside."""
        blocks = [block for block in self.data.split(b"\n\n") if block.startswith(b"data: ")]
        return [
            {} if block == b"data: [DONE]" else msgspec.json.decode(block[6:]) for block in blocks
        ]

    @property
    def text(self) -> str:
        """Of an answer that is whole."""
        choices = [choice for event in self.events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        return "".join(choice["text"] for choice in choices)

    async def read(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=self.body | {"stream": True}) as r:
            assert r.status_code == 200, await r.aread()
            heard_at = None
            async for piece in r.aiter_raw():
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now - (heard_at or now))
                self.data, heard_at = self.data + piece, now


@dataclass
class Flood:
    """Streams that run at the same time. As a context it waits until all have begun."""

    site: Site
    bodies: Sequence[dict[str, Any]]
    streams: list[Stream] = field(default_factory=list)

    async def __aenter__(self) -> Flood:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=self.site.url,
            headers={"Authorization": f"Bearer {BULK_KEY}"},
            timeout=60,
            limits=limits,
        )
        self.streams = [Stream(body) for body in self.bodies]
        self._tasks = [asyncio.create_task(one.read(self._client)) for one in self.streams]
        while not all(one.data for one in self.streams):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        return self

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def texts(self) -> list[str]:
        """Of all streams, which must end whole."""
        await self.ended()
        return [one.text for one in self.streams]

    async def ended(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()


async def texts_of(site: Site, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """What they read as, all at the same time."""
    async with Flood(site, bodies) as flood:
        return await flood.texts()
