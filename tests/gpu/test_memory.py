"""The KV pool takes what is there, or the start is refused with numbers."""

from __future__ import annotations

import gc

import pytest
import torch

from replica.config import EngineConfig
from replica.device.cuda import CudaRecorder
from replica.device.graph_pool import CaptureFailed, GraphPool
from replica.memory import NotEnoughMemory, with_kv_pool
from replica.model.loading import load_decoder
from replica.model.runner import DecoderRunner
from tests.gpu.engines import bench


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def decoder(oracle, device):
    return load_decoder(oracle.folder, None, torch.float32, device.memory)


def config(**options) -> EngineConfig:
    return EngineConfig(model="tiny", device="cuda", block_size=64, max_rows=32, **options)


@pytest.mark.parametrize("fraction", [0.6, 0.9, 0.94, 0.97])
def test_the_pool_fits_and_graphs_are_captured_behind_it(decoder, device, fraction):
    """R34: no late failure at any share of the memory."""
    planned = with_kv_pool(config(memory_fraction=fraction), decoder, device, (8, 32))
    runner = DecoderRunner(decoder, planned.num_blocks, 64)
    options = {"block_size": 64, "kv_tokens": planned.kv_tokens, "max_rows": 32}
    engine, _ = bench(runner, device, (8, 32), **options)
    share = 1 - device.free_bytes() / device.total_bytes()
    assert fraction - 0.02 < share < fraction + 0.01
    engine.close()


def test_asking_for_more_than_there_is_fails_with_numbers(decoder, device):
    with pytest.raises(NotEnoughMemory, match=r"takes \d+\.\d+ GiB, but of \d+\.\d+ GiB"):
        with_kv_pool(config(kv_tokens=2**40), decoder, device, (32,))
    with pytest.raises(NotEnoughMemory, match="no room for a KV pool"):
        with_kv_pool(config(memory_fraction=0.001), decoder, device, (32,))


def test_a_capture_that_fails_is_an_error_with_size_and_memory(runner, device):
    def fail():
        raise RuntimeError("planted")

    class Broken(CudaRecorder):
        def _capture(self, graph, work):
            super()._capture(graph, fail)

    pool = GraphPool(Broken(device), (5,), device.free_bytes)
    with pytest.raises(CaptureFailed, match=r"batch size 5 failed with \d+\.\d+ GiB"):
        device.stream("compute").run(lambda: pool.capture({_key(): lambda: None}))
    engine, _ = bench(runner, device, (12,))  # the device is not spoilt
    engine.close()


def _key():
    from replica.device.graph_pool import GraphKey

    return GraphKey("forward", 0, 5)
