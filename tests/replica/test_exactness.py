"""Greedy ids equal transformers' `generate`, under every way of running the engine."""

from __future__ import annotations

import random

import pytest

from replica.messages import Abort, Sampling, Submit
from tests.models import EOS_ID, save_tiny
from tests.oracle import Oracle, decoder_runner, prompts
from tests.races import PlannedFailures
from tests.script import Bench, submit

COUNT = 24
BLOCK = 4
BLOCKS = 256
CONTEXT = 160


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def oracle(request, tmp_path_factory) -> Oracle:
    folder = save_tiny(tmp_path_factory.mktemp(request.param), request.param, seed=3)
    return Oracle(folder, COUNT)


@pytest.fixture(scope="module")
def runner(oracle):
    return decoder_runner(oracle.folder, BLOCKS, BLOCK)


def bench(runner, **options) -> Bench:
    defaults = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_rows": 16}
    return Bench(runner, max_model_len=CONTEXT, eos_token_ids=(EOS_ID,), **(defaults | options))


def run(runner, asked, **options):
    engine = bench(runner, **options)
    outputs = engine.run(*(submit(str(i), p, max_tokens=COUNT) for i, p in enumerate(asked)))
    stats = engine.engine.stats()
    engine.close()
    return [outputs[str(i)] for i in range(len(asked))], stats


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_chunks_cache_and_overlap_change_nothing(oracle, runner, overlap, chunk, cache):
    asked = prompts(seed=chunk)
    rows = min(chunk, 16)
    expected = [oracle.greedy(prompt, COUNT) for prompt in asked]
    got, _ = run(
        runner, asked, overlap=overlap, max_step_tokens=chunk, max_rows=rows, prefix_cache=cache
    )
    assert got == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_the_number_of_rows_changes_nothing(oracle, runner, rows):
    asked = prompts(seed=rows)
    expected = [oracle.greedy(prompt, COUNT) for prompt in asked]
    assert run(runner, asked, max_rows=rows)[0] == expected


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_a_warm_cache_changes_nothing(oracle, runner, overlap):
    asked = prompts(seed=99)
    expected = [oracle.greedy(prompt, COUNT) for prompt in asked]
    engine = bench(runner, overlap=overlap)
    for again in range(3):
        names = [f"{again}.{i}" for i in range(len(asked))]
        engine.run(*(submit(n, p, max_tokens=COUNT) for n, p in zip(names, asked, strict=True)))
        assert [engine.outputs()[name] for name in names] == expected
    assert engine.engine.stats().cached_tokens > 2 * sum(map(len, asked)) * 0.6
    engine.close()


@pytest.mark.parametrize("size", [3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_a_prompt_that_is_wholly_cached_changes_nothing(oracle, runner, size):
    """R28: sent three times, the same answer, and the same share cached on calls 2 and 3."""
    prompt = tuple(range(40, 40 + size))
    engine = bench(runner)
    cached = []
    for again in range(3):
        engine.run(submit(str(again), prompt, max_tokens=COUNT))
        assert engine.outputs()[str(again)] == oracle.greedy(prompt, COUNT)
        cached.append([o.cached_tokens for o in engine.reported if o.request_id == str(again)][-1])
    assert cached == [0, (size - 1) // BLOCK * BLOCK, (size - 1) // BLOCK * BLOCK]
    engine.close()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_preemption_changes_nothing(oracle, runner, overlap):
    asked = prompts(seed=5)
    expected = [oracle.greedy(prompt, COUNT) for prompt in asked]
    got, stats = run(runner, asked, overlap=overlap, kv_tokens=CONTEXT + 8)
    assert got == expected
    assert stats.preemptions > 3


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_and_cancels_change_nothing(oracle, runner, seed):
    rng = random.Random(seed)
    asked = prompts(seed=seed, count=24)
    engine = bench(
        runner,
        overlap=bool(seed % 2),
        max_rows=rng.randint(1, 16),
        max_step_tokens=rng.choice([16, 40, 200]),
        kv_tokens=rng.choice([CONTEXT + 8, BLOCKS * BLOCK]),
    )
    cancelled = set()
    for number, prompt in enumerate(asked):
        engine.send(submit(str(number), prompt, max_tokens=COUNT))
        if rng.random() < 0.3:
            victim = str(rng.randrange(number + 1))
            cancelled.add(victim)
            engine.send(Abort(request_id=victim))
        engine.step(rng.randrange(4))
    outputs = engine.run()
    endings = engine.endings()
    for number, prompt in enumerate(asked):
        expected = oracle.greedy(prompt, COUNT)
        got = outputs[str(number)]
        if endings[str(number)] == "abort":
            assert str(number) in cancelled
            assert got == expected[: len(got)]
        else:
            assert got == expected
    engine.close()


def test_seeded_samples_do_not_depend_on_company(oracle, runner):
    """C08 on a real model: alone, in company, preempted, from a warm cache."""

    def seeded(number: int, prompt: tuple[int, ...]) -> Submit:
        sampling = Sampling(max_tokens=COUNT, temperature=0.8, top_p=0.95, seed=number * 7919)
        return Submit(request_id=str(number), prompt_ids=prompt, sampling=sampling)

    asked = [seeded(i, prompt) for i, prompt in enumerate(prompts(seed=11))]
    alone = {}
    for request in asked:
        engine = bench(runner)
        alone |= engine.run(request)
        engine.close()
    for options in ({}, {"kv_tokens": CONTEXT + 8}, {"max_rows": 3}, {"max_step_tokens": 16}):
        engine = bench(runner, **options)
        engine.run(*(submit(f"greedy{i}", p, max_tokens=9) for i, p in enumerate(prompts(12))))
        engine.channel.reports.clear()
        assert engine.run(*asked) == alone
        engine.close()
    assert len({tuple(ids) for ids in alone.values()}) == len(alone)


def test_a_sequence_goes_on_behind_its_prior_output(oracle, runner):
    """What an answer continues with does not depend on where its first part was computed."""
    prompt = prompts(seed=21)[3]
    expected = oracle.greedy(prompt, COUNT)
    engine = bench(runner)
    for known in (1, 5, COUNT - 1):
        name = f"after{known}"
        engine.run(submit(name, prompt, max_tokens=COUNT, prior_output_ids=tuple(expected[:known])))
        assert engine.outputs()[name] == expected[known:]
    engine.close()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("length", range(5, 13))
def test_a_constraint_that_fails_leaves_no_wrong_prefix_behind(oracle, runner, overlap, length):
    """The token on which it fails was fed to the step in flight already, and is settled nowhere."""
    prompt = tuple(range(40, 40 + length))
    for count in range(1, BLOCK + 1):
        engine = bench(runner, overlap=overlap, grammars=PlannedFailures())
        engine.run(submit("fails", prompt, max_tokens=COUNT, grammar=str(count)))
        assert engine.endings() == {"fails": "error"}
        stale = prompt + tuple(engine.outputs()["fails"]) + (0,) * BLOCK
        later = [stale[: len(stale) - drop] for drop in range(BLOCK)]
        for number, asked in enumerate(later):
            got = engine.run(submit(str(number), asked, max_tokens=4))
            assert got[str(number)] == oracle.greedy(asked, 4)
        engine.close()
