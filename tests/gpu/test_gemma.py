"""Gemma on a GPU: the whole engine in float32, and a real shape in bfloat16."""

from __future__ import annotations

import time
from random import Random

import pytest
import torch

from benchmarks.torture_checks import Record
from benchmarks.torture_engine import setting, start
from benchmarks.torture_phases import PHASES
from replica.model.loading import load_decoder
from replica.model.runner import DecoderRunner
from tests.families import VARIANTS
from tests.gpu.engines import BLOCK, BLOCKS, COUNT, ROWS, bench
from tests.models import save_tiny
from tests.oracle import Oracle, prompts
from tests.script import submit


@pytest.fixture(scope="module", params=["gemma3", "gemma2-caps"])
def oracle(request, tmp_path_factory) -> Oracle:
    family, options = VARIANTS[request.param]
    return Oracle(save_tiny(tmp_path_factory.mktemp("gemma"), family, seed=3, **options), COUNT)


@pytest.fixture(scope="module")
def runner(oracle, device):
    decoder = load_decoder(oracle.folder, None, torch.float32, device.memory)
    made = DecoderRunner(decoder, BLOCKS, BLOCK)
    made.cache.layers.fill_(torch.nan)
    return made


@pytest.mark.parametrize("sizes", [(), (5, ROWS)], ids=["eager", "graphs"])
@pytest.mark.parametrize("chunk", [12, 40, 512])
def test_chunks_mixed_batches_and_cached_prefixes_change_nothing(
    oracle, runner, device, sizes, chunk
):
    """Twice, so that every prefix is cached the second time; windows of 13."""
    engine, _ = bench(runner, device, sizes, max_step_tokens=chunk)
    asked = prompts(seed=chunk)
    expected = [oracle.greedy(prompt, COUNT) for prompt in asked]
    for again in range(2):
        names = [f"{again}.{i}" for i in range(len(asked))]
        requests = zip(names, asked, strict=True)
        engine.run(*(submit(name, prompt, max_tokens=COUNT) for name, prompt in requests))
        assert [engine.outputs()[name] for name in names] == expected
    assert engine.engine.stats().cached_tokens > sum(map(len, asked)) * 0.6
    engine.close()


def test_a_real_shape_serves_prompts_of_every_critical_length(tmp_path):
    """And nothing is compiled behind the start."""
    options = {"max_model_len": 32_768, "cache_dir": str(tmp_path), "memory_fraction": 0.3}
    driven = start(setting("gemma3-1b", "cuda", **options), Record(seed=0))
    record = driven.record
    for phase in ("prompts", "ample_traffic", "beside_a_long_prompt"):
        PHASES[phase][0](driven, Random(0), time.perf_counter() + 5)
    assert record.failures == []
    assert record.compiled == []
    driven.close()
