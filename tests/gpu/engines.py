"""Engines over TINY on a GPU."""

from __future__ import annotations

import random
from typing import Any

from replica.graph_pool import GraphPool
from tests.models import EOS_ID
from tests.script import Bench

COUNT, BLOCK, BLOCKS, CONTEXT, ROWS = 24, 4, 256, 160, 12


def prompts(seed: int, count: int = 16) -> list[tuple[int, ...]]:
    """1 to 100 tokens; some share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(60)]
    made = []
    for number in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 3, 4, 5, 8, 17, 40]))]
        made.append(tuple(shared[: rng.choice([7, 16, 33, 60])] + own if number % 2 else own))
    return made


def bench(runner, device, sizes: tuple[int, ...] = (), **options: Any) -> tuple[Bench, GraphPool]:
    """With graphs for `sizes`, the last of which must be max_rows."""
    from replica.cuda import CudaRecorder

    pool = GraphPool(CudaRecorder(device), sizes, device.free_bytes)
    settings = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_rows": ROWS, **options}
    settings.setdefault("eos_token_ids", (EOS_ID,))
    engine = Bench(runner, max_model_len=CONTEXT, device=device, graphs=pool, **settings)
    engine.engine.pipeline.capture()
    return engine, pool
