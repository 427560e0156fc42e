"""Gemma through the whole engine: greedy ids equal transformers' `generate`, however a step is cut.

What every family has in common is in `test_exactness.py`; the logits are in `test_model.py`.
"""

from __future__ import annotations

import pytest

from tests.families import VARIANTS
from tests.models import EOS_ID, save_tiny
from tests.oracle import Oracle, decoder_runner, prompts
from tests.script import Bench, submit

COUNT, BLOCK, BLOCKS, CONTEXT = 24, 4, 256, 160
"""Prompts of up to 100 tokens, windows of 13."""


@pytest.fixture(scope="module", params=["gemma3", "gemma2-caps"])
def oracle(request, tmp_path_factory) -> Oracle:
    family, options = VARIANTS[request.param]
    return Oracle(save_tiny(tmp_path_factory.mktemp("gemma"), family, seed=3, **options), COUNT)


@pytest.fixture(scope="module")
def runner(oracle):
    return decoder_runner(oracle.folder, BLOCKS, BLOCK)


@pytest.mark.parametrize("chunk", [8, 29, 512])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_chunks_mixed_batches_and_cached_prefixes_change_nothing(oracle, runner, chunk, overlap):
    """Twice, so that every prefix is cached the second time."""
    asked = prompts(seed=chunk)
    expected = [oracle.greedy(prompt, COUNT) for prompt in asked]
    bench = Bench(
        runner, max_model_len=CONTEXT, eos_token_ids=(EOS_ID,), block_size=BLOCK,
        kv_tokens=BLOCKS * BLOCK, max_rows=8, max_step_tokens=chunk, overlap=overlap,
    )  # fmt: skip
    for again in range(2):
        names = [f"{again}.{i}" for i in range(len(asked))]
        requests = zip(names, asked, strict=True)
        bench.run(*(submit(name, prompt, max_tokens=COUNT) for name, prompt in requests))
        assert [bench.outputs()[name] for name in names] == expected
    assert bench.engine.stats().cached_tokens > sum(map(len, asked)) * 0.6
    bench.close()


def test_rows_that_are_preempted_go_on_as_before(oracle, runner):
    """Their windows are computed anew behind what is left in the cache."""
    asked = [prompt for prompt in prompts(seed=5) if len(prompt) > 20]
    bench = Bench(
        runner, max_model_len=CONTEXT, eos_token_ids=(EOS_ID,), block_size=BLOCK,
        kv_tokens=CONTEXT + 60, max_rows=8, max_step_tokens=64,
    )  # fmt: skip
    got = bench.run(*(submit(str(i), p, max_tokens=COUNT) for i, p in enumerate(asked)))
    assert [got[str(i)] for i in range(len(asked))] == [oracle.greedy(p, COUNT) for p in asked]
    assert bench.engine.stats().preemptions > 0
    bench.close()
