"""Gemma on a GPU: greedy ids beside transformers', graphs, and a start after which nothing is
compiled."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from benchmarks.shapes import random_decoder
from replica.config import EngineConfig
from replica.model.loading import load_decoder
from replica.model.runner import DecoderRunner
from replica.model.spec import LayerSpec, ModelSpec
from replica.process import assemble
from tests.families import VARIANTS
from tests.gpu.engines import BLOCK, BLOCKS, COUNT, ROWS, bench
from tests.models import save_tiny
from tests.oracle import Oracle, prompts
from tests.script import ListChannel, submit

GLOBAL, LOCAL = (tuple(theta ** (-i / 128) for i in range(128)) for theta in (1e6, 1e4))
ATTENTION = {"scale": 256**-0.5, "activation": "gelu_tanh"}
SLIDING = LayerSpec(frequencies=LOCAL, window=512, **ATTENTION)
FULL = LayerSpec(frequencies=GLOBAL, **ATTENTION)
GEMMA_3_1B = ModelSpec(
    model_type="gemma3_text",
    vocab_size=262_144,
    hidden_size=1152,
    intermediate_size=6912,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    layers=tuple(SLIDING if (i + 1) % 6 else FULL for i in range(26)),
    max_position=32_768,
    norm_eps=1e-6,
    qk_norm=True,
    embedding_scale=1152**0.5,
    tied_embeddings=True,
    eos_token_ids=(1,),
)
"""With no soft cap; the oracle's models have them."""


@pytest.fixture(scope="module", params=["gemma3", "gemma3-cap-biases", "gemma2-caps"])
def oracle(request, tmp_path_factory) -> Oracle:
    family, options = VARIANTS[request.param]
    return Oracle(save_tiny(tmp_path_factory.mktemp("gemma"), family, seed=3, **options), COUNT)


@pytest.fixture(scope="module")
def runner(oracle, device):
    decoder = load_decoder(oracle.folder, None, torch.float32, device.memory)
    made = DecoderRunner(decoder, BLOCKS, BLOCK)
    made.cache.layers.fill_(torch.nan)
    return made


@pytest.mark.parametrize("sizes", [(), (1, 4, ROWS)], ids=["eager", "graphs"])
@pytest.mark.parametrize("chunk", [12, 40, 512])
def test_chunks_mixed_batches_and_cached_prefixes_change_nothing(
    oracle, runner, device, sizes, chunk
):
    """Twice, so that every prefix is cached the second time."""
    engine, pool = bench(runner, device, sizes, max_step_tokens=chunk)
    asked = prompts(seed=chunk)
    for again in range(2):
        names = [f"{again}.{i}" for i in range(len(asked))]
        requests = zip(names, asked, strict=True)
        got = engine.run(*(submit(name, p, max_tokens=COUNT) for name, p in requests))
        assert [got[name] for name in names] == [oracle.greedy(p, COUNT) for p in asked]
    assert engine.engine.stats().cached_tokens > sum(map(len, asked)) * 0.6
    assert (pool.counts["replays"] > 0) == bool(sizes)
    engine.close()


def test_nothing_of_a_real_shape_is_compiled_after_the_start(device, tmp_path):
    """In bfloat16, with plans for its products; prompts around the window and far beyond it."""
    config = EngineConfig(
        model="random", device="cuda", block_size=64, max_rows=32, max_model_len=16_384,
        max_step_tokens=2048, kv_tokens=65_536, cache_dir=str(tmp_path),
    )  # fmt: skip
    channel, chance = ListChannel(), random.Random(0)
    with torch.inference_mode():
        decoder = random_decoder(GEMMA_3_1B, torch.bfloat16, device.memory)
        engine = assemble(config, decoder, device, channel)
        lengths = [1, 2, 63, 511, 512, 513, 1100, 5000, 12_000] + [30] * 20
        for number, length in enumerate(lengths):
            prompt = [chance.randrange(2, 262_144) for _ in range(length)]
            channel.commands.append(
                submit(str(number), prompt, max_tokens=20, ignore_eos=True, temperature=0.7)
            )
        while channel.commands or engine.busy:
            engine.advance()
    done = [output for report in channel.reports for output in report.outputs]
    ids = [token for output in done for token in output.token_ids]
    assert sum(output.finish_reason == "length" for output in done) == len(lengths)
    assert len(ids) == 20 * len(lengths)
    assert len(set(ids)) > 100, "logits that are no numbers give always the same token"
    assert engine.stats().compiled == 0
    assert engine.pipeline.graph_counts["replays"] > 20
    engine.pipeline.close()
    del engine, decoder
    gc.collect()
    torch.cuda.empty_cache()
