"""Engines over TINY on a GPU."""

from __future__ import annotations

from typing import Any

from replica.device.graph_pool import GraphPool
from tests.models import EOS_ID
from tests.script import Bench

COUNT, BLOCK, BLOCKS, CONTEXT, ROWS = 24, 4, 256, 160, 12


def bench(runner, device, sizes: tuple[int, ...] = (), **options: Any) -> tuple[Bench, GraphPool]:
    """With graphs for `sizes`, the last of which must be max_rows."""
    from replica.device.cuda import CudaRecorder

    pool = GraphPool(CudaRecorder(device), sizes, device.free_bytes)
    settings = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_rows": ROWS, **options}
    settings.setdefault("eos_token_ids", (EOS_ID,))
    engine = Bench(runner, max_model_len=CONTEXT, device=device, graphs=pool, **settings)
    engine.engine.pipeline.capture()
    return engine, pool
