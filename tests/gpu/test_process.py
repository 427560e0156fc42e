"""The engine's own process on a GPU: from settings to answers."""

from __future__ import annotations

import asyncio
import time

import pytest

from replica.client import EngineClient, EngineFailed
from replica.config import EngineConfig
from tests.gpu.engines import COUNT
from tests.oracle import prompts
from tests.script import submit


def config(folder: str, **options: object) -> EngineConfig:
    settings = {"model": folder, "device": "cuda", "dtype": "float32", "memory_fraction": 0.2}
    return EngineConfig(**(settings | options))


async def answer(
    client: EngineClient, name: str, prompt: tuple[int, ...]
) -> tuple[list[int], float]:
    """Ids, and seconds to the first one."""
    client.send(submit(name, prompt, max_tokens=COUNT))
    began, first, ids = time.perf_counter(), 0.0, []
    async for report in client.events():
        for output in report.outputs:
            first = first or time.perf_counter() - began
            ids += output.token_ids
            if output.finish_reason is not None:
                return ids, first
    raise AssertionError("the stream ended")


async def test_a_process_on_the_gpu_answers_like_the_reference_and_its_first_answer_is_quick(
    oracle,
):
    """R35: nothing is compiled or captured after ready."""
    client = await EngineClient.start(config(oracle.folder))
    try:
        assert client.ready.num_blocks * 16 > 1_000_000
        firsts = []
        for number, prompt in enumerate(prompts(4)):
            ids, first = await asyncio.wait_for(answer(client, str(number), prompt), 60)
            assert ids == oracle.greedy(prompt, COUNT)
            firsts.append(first)
        print("first token, ms:", [round(first * 1e3, 2) for first in firsts])
        assert firsts[0] < 2 * max(firsts[1:])
    finally:
        await client.close()


async def test_more_than_there_is_fails_at_start_with_numbers(oracle):
    with pytest.raises(EngineFailed, match=r"takes \d+\.\d+ GiB, but of \d+\.\d+ GiB"):
        await EngineClient.start(config(oracle.folder, kv_tokens=2**38))
