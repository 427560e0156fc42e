"""Greedy ids on a GPU equal transformers', under every way of running a step."""

from __future__ import annotations

import random

import pytest

from replica.messages import Abort, Sampling, Submit
from tests.gpu.engines import BLOCK, BLOCKS, CONTEXT, COUNT, ROWS, bench
from tests.oracle import decoder_runner, prompts
from tests.script import Bench, submit


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 12), (12,), (5, 12)], ids=str)
@pytest.mark.parametrize("chunk", [12, 40, 512])
def test_graphs_overlap_and_chunks_change_nothing(oracle, runner, device, sizes, overlap, chunk):
    """C43: eager and graph, on and off a captured size, batches that grow and shrink."""
    engine, pool = bench(runner, device, sizes, overlap=overlap, max_step_tokens=chunk)
    asked = prompts(seed=chunk)
    limits = [COUNT - i for i in range(len(asked))]
    requests = zip(asked, limits, strict=True)
    got = engine.run(*(submit(str(i), p, max_tokens=n) for i, (p, n) in enumerate(requests)))
    assert [got[str(i)] for i in range(len(asked))] == [
        oracle.greedy(prompt, limit) for prompt, limit in zip(asked, limits, strict=True)
    ]
    assert (pool.counts["replays"] > 0) == bool(sizes)
    engine.close()


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_slots_swapped_change_nothing(oracle, runner, device, steps_before):
    """The same requests start in either slot."""
    engine, _ = bench(runner, device, (4, ROWS), prefix_cache=False)
    if steps_before:
        engine.run(submit("first", (9, 9), max_tokens=steps_before))
    asked = prompts(seed=2, count=8)
    got = engine.run(*(submit(str(i), p, max_tokens=COUNT) for i, p in enumerate(asked)))
    assert [got[str(i)] for i in range(8)] == [oracle.greedy(p, COUNT) for p in asked]
    engine.close()


def test_contexts_are_not_baked_into_graphs(oracle, runner, device):
    """C44: captured on a context of one token; replayed on long ones, then on short ones."""
    engine, pool = bench(runner, device, (ROWS,), prefix_cache=False)
    rng = random.Random(0)
    long = [tuple(rng.randrange(256) for _ in range(130)) for _ in range(5)]
    short = [(rng.randrange(256),) for _ in range(5)]
    for again, asked in enumerate([short, long, short]):
        names = [f"{again}.{i}" for i in range(5)]
        requests = zip(names, asked, strict=True)
        got = engine.run(*(submit(name, p, max_tokens=COUNT) for name, p in requests))
        assert [got[name] for name in names] == [oracle.greedy(p, COUNT) for p in asked]
    assert pool.counts["replays"] > 60
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_cancels_and_preemptions(oracle, runner, device, seed):
    rng = random.Random(seed)
    kv_tokens = rng.choice([CONTEXT + 8, BLOCKS * BLOCK])
    engine, _ = bench(runner, device, (3, ROWS), overlap=bool(seed % 3), kv_tokens=kv_tokens)
    asked = prompts(seed, count=24)
    for number, prompt in enumerate(asked):
        engine.send(submit(str(number), prompt, max_tokens=COUNT))
        if rng.random() < 0.3:
            engine.send(Abort(request_id=str(rng.randrange(number + 1))))
        engine.step(rng.randrange(4))
    outputs, endings = engine.run(), engine.endings()
    for number, prompt in enumerate(asked):
        got, expected = outputs[str(number)], oracle.greedy(prompt, COUNT)
        assert got == expected[: len(got)]
        assert endings[str(number)] == "abort" or got == expected
    engine.close()


def sampled(number: int, prompt: tuple[int, ...], **options) -> Submit:
    sampling = Sampling(max_tokens=COUNT, seed=number * 7919, **options)
    return Submit(request_id=str(number), prompt_ids=prompt, sampling=sampling)


KINDS = [
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 9},
    {"temperature": 0.7, "min_tokens": 5, "stop_token_ids": (7, 8)},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(20, 90))},
    {"temperature": 0.0},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": ((70, 3.0), (90, -100.0))},
    {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "min_tokens": 9, "logprobs": 5},
    {"temperature": 0.8, "bad_token_ids": ((30,), (40, 41)), "prompt_logprobs": 1},
]


def test_samples_equal_those_of_the_cpu(oracle, runner, device):
    """C08, X6: every kind of sampling, alone and in company, eager, graph and on a CPU."""
    asked = [
        sampled(i, prompt, **KINDS[i % len(KINDS)]) for i, prompt in enumerate(prompts(11, 33))
    ]
    host = Bench(
        decoder_runner(oracle.folder, BLOCKS, BLOCK),
        max_model_len=CONTEXT,
        eos_token_ids=(256,),
        block_size=BLOCK,
        kv_tokens=BLOCKS * BLOCK,
    )
    expected, told = host.run(*asked), logprobs(host)
    host.close()
    for options in ({}, {"sizes": (ROWS,)}, {"sizes": (2, 3)}, {"sizes": (1,), "max_rows": 1}):
        rows = options.get("max_rows") or (options.get("sizes") or (ROWS,))[-1]
        engine, _ = bench(runner, device, **{"max_rows": rows, **options})
        assert engine.run(*asked) == expected
        assert logprobs(engine) == {
            name: pytest.approx(values, abs=1e-3) for name, values in told.items()
        }
        engine.close()


def logprobs(engine: Bench) -> dict[str, list[float]]:
    """By request, of prompts and outputs, alternatives included."""
    told: dict[str, list[float]] = {}
    for output in sorted(engine.reported, key=lambda output: output.offset):
        values = told.setdefault(output.request_id, [])
        for entry in (*output.prompt_logprobs, *output.logprobs):
            values += [entry.logprob, *entry.top_logprobs]
    return told


def test_the_device_computes_when_the_meter_says_so(runner, device):
    """Event times lie on the host's clock, and classes of time add up to it."""
    import time

    engine, _ = bench(runner, device, (ROWS,), eos_token_ids=())
    began = time.perf_counter_ns()
    engine.send(submit("a", max_tokens=100))
    while not engine.engine.scheduler.counts["output_tokens"] > 50:
        engine.step()
        batch = engine.engine.pipeline.in_flight
    engine.run()
    ((start, end),) = engine.engine.pipeline.timing(batch)
    assert began < start < end < time.perf_counter_ns()
    engine.close()
